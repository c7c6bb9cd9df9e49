"""The commands that move sessions: send, receive, simulate."""

import os
import subprocess
import sys

import pytest
import torch
from proxies import Fault, Proxy

from kvplane.cli import REFUSED, main
from kvplane.integrations.transformers.calls import call
from kvplane.integrations.transformers.conversation import converse
from kvplane.integrations.transformers.loading import load_model
from kvplane.models.nano import heldout_text
from kvplane.pack import open_root, read_session, session_names
from kvplane.testing.certificates import Authority

TEXT = heldout_text()[:700]


@pytest.fixture(name="here")
def home_here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    monkeypatch.setenv("KVPLANE_HOME", str(folder))
    return folder


@pytest.fixture(name="said")
def output(capsys):
    """Run a command; its output, without what it notes on stderr."""

    def run(*arguments, code=0):
        assert code == main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        run.notes = captured.err
        return captured.out

    return run


class Receiver:
    """A command that listens, in another process, with a home of its own."""

    def __init__(self, home, *arguments, command="receive"):
        command = [sys.executable, "-m", "kvplane.cli", command, *map(str, arguments)]
        environment = {**os.environ, "KVPLANE_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True
        )
        said = ""
        # whatever else a library has to say comes first
        while "listening on " not in said and (line := self._process.stderr.readline()):
            said += line
        assert "listening on " in said, said
        self.address = said.rpartition("listening on ")[2].strip()

    def end(self, code=0):
        """What it said, once it has ended."""
        _, said = self._process.communicate(timeout=300)
        assert code == self._process.returncode, said
        return said


def options_of(identity):
    return (
        "--certificate",
        identity.certificate,
        "--key",
        identity.key,
        "--authority",
        identity.authority,
    )


def logits_of(home, name, count=64):
    """Of the next tokens of a saved session, each the likeliest."""
    talk = converse(load_model("glimmer-nano"))
    talk.resume(open_root(home), name)
    ids = talk.ids
    talk.cache.rewind(len(ids) - 1)
    found, token = [], ids[-1]
    for _ in range(count):
        found.append(call(talk.named.model, talk.cache, [token]))
        token = int(found[-1].argmax())
    return torch.stack(found)


def test_a_session_goes_on_where_it_was_sent_strangers_are_refused_and_a_longer_one_is_a_delta(
    here, tmp_path, said, monkeypatch
):
    there = tmp_path / "there"
    authority = Authority(tmp_path / "certificates")
    mine, theirs = authority.identity("sender"), authority.identity("receiver")
    strange = Authority(tmp_path / "strange", "strange").identity("stranger")
    said("run", TEXT, "--session", "notes", "--max-new-tokens", 20)
    listen = ("--listen", "127.0.0.1:0", "--session", "copy", "--timeout", 300)
    receiver = Receiver(there, *listen, *options_of(theirs))
    said("send", "notes", "--to", receiver.address, *options_of(strange), code=REFUSED)
    by_tls = (*options_of(mine), "--timeout", 300, "--chunk", 256)
    with Proxy(receiver.address, there=Fault(cut_after=400_000)) as proxy:
        said("send", "notes", "--to", proxy.address, *by_tls, code=REFUSED)
    said("send", "notes", "--to", receiver.address, *by_tls)
    told = receiver.end()

    assert "refused: " in told
    assert " segments are kept for the next try" in told
    assert " 0 of them before a connection was lost" not in told
    assert "the receiver can use 721 tokens, 0 of which it held" in said.notes
    assert "saved session copy: 721 tokens, 0 of which were here" in told
    saved = [
        read_session(open_root(home), name) for home, name in ((here, "notes"), (there, "copy"))
    ]
    assert saved[0].tokens == saved[1].tokens
    assert saved[0].state.numerics == saved[1].state.numerics
    assert torch.equal(logits_of(here, "notes"), logits_of(there, "copy"))

    # the next turn is said here, and sent as what the other does not have yet
    said("run", " More of it.", "--session", "notes", "--max-new-tokens", 5)
    receiver = Receiver(there, "--listen", f"unix:{tmp_path}/s", "--session", "copy")
    said("send", "notes", "--to", receiver.address, "--chunk", 256)
    told = receiver.end()

    assert "saved session copy: 738 tokens, 512 of which were here" in told
    assert torch.equal(logits_of(here, "notes"), logits_of(there, "copy"))
    whole = said("run", "--session", "notes", "--max-new-tokens", 9)
    monkeypatch.setenv("KVPLANE_HOME", str(there))
    assert whole == said("run", "--session", "copy", "--max-new-tokens", 9)


def test_a_prompt_that_another_machine_reads_is_answered_alike(here, tmp_path, said):
    whole = said("run", TEXT, "--max-new-tokens", 20)
    prefill = Receiver(
        tmp_path / "there",
        *("--listen", f"unix:{tmp_path}/s", "--max-context", 720, "--number", 3),
        command="prefill",
    )
    there = ("--prefill-from", prefill.address)
    said("run", TEXT * 2, *there, "--max-new-tokens", 2, code=REFUSED)
    refused = said.notes
    answered = said("run", TEXT, *there, "--session", "notes", "--max-new-tokens", 20)
    notes = said.notes
    said("run", TEXT, *there, "--dtype", "float16", code=REFUSED)
    told = prefill.end()

    assert "a REQUEST is 5604, the limit is 2880" in told
    assert "kvplane: " in refused
    assert whole == answered
    assert f"700 of 701 tokens read by unix:{tmp_path}/s" in notes
    assert "dtype: the receiver has 'float16', the sender 'float32'" in said.notes
    assert "read and sent 700 tokens" in told
    assert ["notes"] == session_names(open_root(here))


def test_a_dry_run_says_the_plan_in_bytes(here, said):
    said("run", TEXT, "--session", "notes", "--max-new-tokens", 20)
    state = read_session(open_root(here), "notes").state
    lines = said("send", "notes", "--dry-run", "--chunk", 256).splitlines()
    together = next(line for line in lines if line.startswith("together"))

    assert "721 tokens, 0 held, streamed" in lines[0]
    assert 721 == state.position
    assert str(sum_of(lines)) in together.replace(",", "")
    delta = said("send", "notes", "--dry-run", "--cut", 512, "--chunk", 256).splitlines()
    assert "721 tokens, 512 held, streamed" in delta[0]
    assert sum_of(delta) < sum_of(lines)


def sum_of(lines):
    """The two kinds' bytes in a plan's table."""
    kinds = [line.split() for line in lines if line.startswith(("sliding", "full"))]
    return sum(int(words[3].replace(",", "")) for words in kinds)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["send", "nothing", "--to", "127.0.0.1:1"], "no session 'nothing'"),
        (["send", "notes"], "an address, or --dry-run"),
        (["send", "notes", "--to", "192.0.2.1:1"], "insecure=True"),
        (["send", "notes", "--to", "x"], "host:port"),
        (["send", "notes", "--to", "127.0.0.1:1", "--key", "k"], "--authority together"),
        (["send", "notes", "--dry-run", "--cut", "100"], "a multiple of 256"),
        (["send", "notes", "--dry-run", "--schedule", "x"], "streamed"),
        (["receive", "--listen", "0.0.0.0:0", "--session", "c"], "insecure=True"),
        (["receive", "--listen", "127.0.0.1:0", "--session", "../c"], "name"),
        (
            ["receive", "--listen", "127.0.0.1:0", "--session", "c", "--wait", "0.05"],
            "nobody connected",
        ),
        (["simulate", "--bandwidth", "fast"], "bandwidth"),
        (["simulate", "--prompt", "0"], "prompt"),
        (["simulate", "--prefill-rate", "0"], "tokens_per_s"),
        (["simulate", "no-such-model"], "no preset of that name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_refused_in_words(here, said, arguments, words):
    said("run", TEXT[:40], "--session", "notes", "--max-new-tokens", 2)
    said(*arguments, code=REFUSED)

    assert words in said.notes
    assert ["notes"] == session_names(open_root(here))


def test_simulate_says_when_a_handoff_wins(said, tmp_path):
    picture = tmp_path / "timeline.png"
    lines = said("simulate", "--prompt", "8192,130815", "--plot", picture).splitlines()

    assert 8 == sum("Gb/s  " in line for line in lines)
    assert any("1,823,184,896" in line for line in lines)
    assert picture.stat().st_size > 1_000


def test_simulate_without_matplotlib_names_the_extra(said, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said("simulate", "--prompt", "512", "--plot", tmp_path / "x.png", code=REFUSED)

    assert "pip install 'kvplane[plot]'" in said.notes
