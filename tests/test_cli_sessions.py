"""What commands say of what is not there, damaged, too large or long; how the demo ends."""

import io
import json

import pytest
from rich.console import Console

from kvplane.cli import REFUSED, demo, main
from kvplane.cli.memory import available_nbytes
from kvplane.cli.run import SHOWN_PROGRESS, _progress
from kvplane.integrations.transformers import loading


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Sessions go to a folder of the test's."""
    folder = tmp_path / "home"
    monkeypatch.setenv("KVPLANE_HOME", str(folder))
    return folder


@pytest.mark.parametrize(
    "verb",
    [
        ["sessions", "show", "noets"],
        ["sessions", "rm", "noets"],
        ["sessions", "fork", "noets", "x"],
    ],
    ids=lambda verb: verb[1],
)
def test_an_unknown_session_names_the_nearest(capsys, verb):
    main(["run", "x", "--session", "notes", "--max-new-tokens", "0"])
    capsys.readouterr()

    assert REFUSED == main(verb)
    assert "no session 'noets'; nearest: notes" in capsys.readouterr().err


def test_a_damaged_session_is_listed_as_such_beside_the_others(capsys, home):
    for name in ("notes", "other"):
        main(["run", "x", "--session", name, "--max-new-tokens", "0"])
    (home / "sessions" / "other.json").write_bytes(b"{}")
    capsys.readouterr()

    assert 0 == main(["sessions", "ls"])
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["notes", "2"] in lines
    assert ["other", "damaged"] in lines


def test_too_little_memory_is_refused_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(loading, "load_model", None)

    assert REFUSED == main(["run", "x", "--max-context", str(1 << 40)])
    assert "are free: choose a smaller --max-context" in capsys.readouterr().err


def test_what_is_free_is_not_known_everywhere(monkeypatch):
    assert available_nbytes() > 1 << 20

    def unreadable(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.read_text", unreadable)
    assert available_nbytes() is None


def test_a_long_prompt_shows_how_far_it_was_read_and_a_short_or_piped_one_does_not():
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=80)
    with _progress(terminal, SHOWN_PROGRESS) as advance:
        advance(SHOWN_PROGRESS // 2)

    assert "reading" in shown.getvalue()
    for console, count in ((terminal, SHOWN_PROGRESS - 1), (Console(file=shown), SHOWN_PROGRESS)):
        before = shown.getvalue()
        with _progress(console, count) as advance:
            advance(count)

        assert before == shown.getvalue()


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_the_demo_exits_with_1_when_a_comparison_is_not_what_it_should_be(
    monkeypatch, capsys, as_json
):
    facts = {"steps": 3, "largest": 0.5}
    rows = [
        demo.Comparison(what="same", wanted=True, equal=3, **facts),
        demo.Comparison(what="other", wanted=False, equal=1, **facts),
        demo.Comparison(what="wrongly other", wanted=True, equal=2, **facts),
        demo.Comparison(what="wrongly same", wanted=False, equal=3, **facts),
    ]
    for shown, code in ((rows[:2], 0), ([rows[2]], 1), ([rows[3]], 1), (rows, 1)):
        monkeypatch.setattr(demo._Show, "run", lambda _, shown=shown: iter(shown))
        try:
            found = main(["demo", *(["--json"] if as_json else [])])
        except SystemExit as ended:
            found = ended.code
        out = capsys.readouterr().out

        assert code == found
        if as_json:
            assert (code == 0) == json.loads(out)["good"]
        else:
            assert "\x1b" not in out
            assert ("every comparison came out" in out) == (code == 0)
