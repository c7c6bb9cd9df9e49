"""The `kvplane` command: one file a command, imported when it is called.

Exit codes: 0 done; 2 refused, with the reason on stderr; 130 interrupted.
"""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from kvplane._version import __version__
from kvplane.errors import KVPlaneError

REFUSED = 2
INTERRUPTED = 130

# name, where the function is, what lists say: text here, so that a list imports no command
COMMANDS = (
    ("bench", "kvplane.cli.bench:bench", "Measure this machine, from a checkout."),
    ("chat", "kvplane.cli.chat:chat", "Talk to a model that has a chat template."),
    ("completion", "kvplane.cli.completion:completion", "Print a shell's completion script."),
    ("demo", "kvplane.cli.demo:demo", "Stop, resume and fork a hybrid model, bits compared."),
    ("doctor", "kvplane.cli.doctor:doctor", "What is installed and used; a short self-test."),
    ("footprint", "kvplane.cli.footprint:footprint", "Bytes that a model's sessions take."),
    ("inspect", "kvplane.cli.inspect:inspect", "A page about a saved session or a cut."),
    ("prefill", "kvplane.cli.prefill:prefill", "Read prompts for machines that answer them."),
    ("receive", "kvplane.cli.receive:receive", "Take a session from another machine; save it."),
    ("run", "kvplane.cli.run:run", "Read a prompt and say what follows; keep the session."),
    ("send", "kvplane.cli.send:send", "Send a saved session to another machine."),
    ("simulate", "kvplane.cli.simulate:simulate", "When a handoff beats reading a prompt here."),
)
GROUPS = (
    (
        "pack",
        "What lies in a root of packs.",
        (
            ("ls", "kvplane.cli.pack:ls", "List sessions and cuts."),
            ("show", "kvplane.cli.pack:show", "Say what a session or cut holds."),
            ("verify", "kvplane.cli.pack_verify:verify", "Name what is broken or still usable."),
            ("du", "kvplane.cli.pack:du", "Say where the bytes are."),
            ("rm", "kvplane.cli.pack:rm", "Forget sessions or cuts."),
            ("diff", "kvplane.cli.pack_diff:diff", "Say where two sessions first differ."),
            ("push", "kvplane.cli.pack_move:push", "Copy sessions to another root."),
            ("pull", "kvplane.cli.pack_move:pull", "Copy sessions from another root."),
            ("gc", "kvplane.cli.pack_gc:gc", "Delete what nothing names; keep to a budget."),
            ("export", "kvplane.cli.pack_files:export", "Write a session as files of its own."),
            ("import", "kvplane.cli.pack_files:import_", "Save a session that was exported."),
        ),
    ),
    (
        "sessions",
        "What `kvplane run --session` keeps.",
        (
            ("ls", "kvplane.cli.sessions:ls", "List the saved sessions."),
            ("show", "kvplane.cli.sessions:show", "Say what a saved session holds."),
            ("rm", "kvplane.cli.sessions:rm", "Forget a saved session."),
            ("fork", "kvplane.cli.sessions:fork", "Give a saved session a second name."),
        ),
    ),
)


def make_app(called: Sequence[str] = ()) -> App:
    """The command line, with every command registered and none imported.

    Args:
        called: the words of the call: a command that is among them says its docstring, which has an
            example, in place of its line in a list.
    """

    def line(name: str, text: str) -> str | None:
        return None if name in called else text

    app = App(
        name="kvplane",
        help="Exact, portable KV storage for hybrid-attention language models.",
        version=__version__,
        result_action="return_none",
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
    )
    for name, where, text in COMMANDS:
        app.command(where, name=name, help=line(name, text))
    for group, group_help, commands in GROUPS:
        part = App(name=group, help=group_help)
        for name, where, text in commands:
            part.command(where, name=name, help=line(name, text))
        app.command(part)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: None takes the process's own.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        make_app(words)(words)
        sys.stdout.flush()
    except CycloptsError:
        # it has printed itself
        return REFUSED
    except KVPlaneError as error:
        print(f"kvplane: {error}", file=sys.stderr)  # noqa: T201 - the one place that does
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read has seen enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
