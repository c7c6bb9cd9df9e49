"""`kvplane run` that is interrupted, in use, or out of context: what was committed stays usable."""

import contextlib
import re
import signal
import subprocess
import sys

import pytest

from kvplane.cli import INTERRUPTED, REFUSED, main
from kvplane.integrations.transformers import HybridCache, loading
from kvplane.models.nano import BOS, encode, heldout_text, load_nano
from kvplane.pack import open_root, read_session, session_names

TEXT, MORE = heldout_text()[:700], heldout_text()[700:1400]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Sessions go to a folder of the test's."""
    folder = tmp_path / "home"
    monkeypatch.setenv("KVPLANE_HOME", str(folder))
    return folder


@pytest.fixture
def run(capsys):
    """`kvplane run`: what it said, and what it noted on stderr."""

    def call(*arguments, code=0):
        assert code == main(["run", *map(str, arguments)])
        captured = capsys.readouterr()
        return captured.out.removesuffix("\n"), captured.err

    return call


@contextlib.contextmanager
def interrupted(monkeypatch, call, layer):
    """Ctrl-C in the model's call of that number, behind its layer of that number."""
    load_model = loading.load_model

    def hooked(*arguments, **options):
        named = load_model(*arguments, **options)
        countdown = iter(range(call, -1, -1))

        def interrupt(*_):
            if next(countdown) == 0:
                raise KeyboardInterrupt

        named.model.model.language_model.layers[layer].register_forward_hook(interrupt)
        return named

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_model", hooked)
        yield


def position(home, name="notes"):
    return read_session(open_root(home), name).state.position


@pytest.mark.parametrize("layer", [0, 4, 7])
def test_ctrl_c_inside_a_token_leaves_the_session_before_it_and_all_of_it_printed(
    run, home, monkeypatch, layer
):
    whole, _ = run(TEXT, "--max-new-tokens", 20)
    # calls 0 to 2 read the prompt
    with interrupted(monkeypatch, 3 + 8, layer):
        first, _ = run(TEXT, "--session", "notes", code=INTERRUPTED)
    # a token whose last layer has its rows was read
    said = 8 + (layer == 7)

    assert (said, 701 + said) == (len(first), position(home))
    second, notes = run("--session", "notes", "--max-new-tokens", 20 - said)
    assert whole == first + second
    assert f"{701 + said} of {701 + said} tokens from session notes" in notes


def test_ctrl_c_while_a_prompt_is_read_keeps_its_chunks_and_the_same_command_goes_on(
    run, home, monkeypatch
):
    whole, _ = run(TEXT, "--max-new-tokens", 9)
    with interrupted(monkeypatch, 2, 4):
        said, notes = run(TEXT, "--session", "notes", code=INTERRUPTED)

    assert ("", 512) == (said, position(home))
    assert "stopped after 512 of 701 tokens, saved session notes" in notes
    again, notes = run(TEXT, "--session", "notes", "--max-new-tokens", 9)
    assert whole == again
    assert "512 of 701 tokens from session notes" in notes


def test_ctrl_c_while_a_session_is_added_to_leaves_it_as_it_was(run, home, monkeypatch):
    run(TEXT, "--session", "notes", "--max-new-tokens", 0)
    with interrupted(monkeypatch, 1, 4):
        run(MORE, "--session", "notes", code=INTERRUPTED)

    assert 701 == position(home)


def test_ctrl_c_before_a_first_token_saves_nothing(run, home, monkeypatch):
    with interrupted(monkeypatch, 0, 4):
        run(TEXT, "--session", "notes", code=INTERRUPTED)

    assert [] == session_names(open_root(home))


def test_a_second_run_on_a_name_is_refused_while_the_first_streams_and_ctrl_c_ends_that(run, home):
    command = [sys.executable, "-m", "kvplane.cli", "run", TEXT, "--session", "notes"]
    first = subprocess.Popen(
        [*command, "--max-new-tokens", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        said = first.stdout.read(5)
        _, notes = run(TEXT, "--session", "notes", code=REFUSED)
        first.send_signal(signal.SIGINT)
        rest, _ = first.communicate(timeout=300)
    finally:
        first.kill()

    assert f"in use by process {first.pid}" in notes
    assert INTERRUPTED == first.returncode
    said = (said + rest).removesuffix(b"\n").decode()
    assert 701 + len(said) == position(home)
    more, _ = run("--session", "notes", "--max-new-tokens", 9)
    assert run(TEXT, "--max-new-tokens", len(said) + 9)[0] == said + more


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_read_and_the_session_is_intact(
    run, home
):
    run(TEXT, "--session", "notes", "--max-new-tokens", 0)
    _, notes = run(MORE, "--session", "notes", "--max-context", 1400, code=REFUSED)

    assert "700 tokens from position 701 would pass max_context 1400" in notes
    assert 701 == position(home)


def test_a_prompt_that_says_the_session_again_goes_on_there(run):
    said, _ = run(TEXT, "--session", "notes", "--max-new-tokens", 9)
    _, notes = run(TEXT + said + " And", "--session", "notes", "--max-new-tokens", 9)

    assert "710 of 714 tokens from session notes" in notes
    assert "the prompt begins with all that session notes holds" in notes


def test_a_short_session_is_added_to_whatever_the_prompt_begins_with(run, home):
    run("The ", "--session", "notes", "--max-new-tokens", 0)
    run("The end", "--session", "notes", "--max-new-tokens", 0)

    assert len("The The end") + 1 == position(home)


def test_a_turn_that_was_said_is_a_cut_of_the_prompt_cache_without_a_session(run, tmp_path):
    root = tmp_path / "prefixes"
    said, _ = run(TEXT, "--prompt-cache", root, "--max-new-tokens", 9)
    _, notes = run(TEXT + said + " And", "--prompt-cache", root, "--max-new-tokens", 1)

    assert "710 of 714 tokens from the prompt cache" in notes


def test_a_session_of_the_command_is_one_of_the_cache(run, home):
    said, _ = run(TEXT, "--session", "notes", "--max-new-tokens", 9)
    cache = HybridCache.load(home, load_nano(), name="notes")

    assert [BOS, *encode(TEXT + said)] == cache.tokens
    assert cache.origin.same_numerics


def test_stats_say_wraps_bytes_and_rate(run):
    _, notes = run(TEXT, "--max-new-tokens", 9, "--stats")

    assert "nothing saved: no --session" in notes
    assert "710 tokens, rings wrapped 5 times" in notes
    # on a line of its own, however wide the terminal
    assert re.search(r"times, .* of rows in .* of pages, \d+ tokens/s\n", notes)
