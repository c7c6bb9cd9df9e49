"""Every command says what it does, with an example that would run."""

import inspect
import shlex
import sys

import pytest

from kvplane.cli import COMMANDS, GROUPS, main, make_app

PATHS = [(name,) for name, _, _ in COMMANDS] + [
    (group, name) for group, _, commands in GROUPS for name, _, _ in commands
]


def function_of(path):
    app = make_app()
    for name in path:
        app = app[name]
    return app.default_command


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_help_says_an_example_of_the_command(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    assert 0 == main([*path, "--help"])
    assert f"Example: kvplane {' '.join(path)}" in capsys.readouterr().out


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_the_example_is_a_call_that_the_command_takes(path):
    text = inspect.getdoc(function_of(path))
    lines = [line for line in text.splitlines() if line.startswith("Example: ")]
    words = shlex.split(lines[0].removeprefix("Example: kvplane ").partition(" > ")[0])
    command, _, _ = make_app().parse_args(words, exit_on_error=False, print_error=False)

    assert function_of(path) is command


def test_a_list_of_commands_imports_none_of_them(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kvplane.cli.")]:
        monkeypatch.delitem(sys.modules, name)

    assert 0 == main(["--help"])
    printed = capsys.readouterr().out
    assert all(text in printed for _, _, text in COMMANDS)
    assert [] == [name for name in sys.modules if name.startswith("kvplane.cli.")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_knows_the_commands(shell, capsys):
    assert 0 == main(["completion", shell])

    script = capsys.readouterr().out
    assert all(name in script for name, _, _ in COMMANDS)
