"""`kvplane doctor`: what it finds, and what it says when something is wrong."""

import json

import pytest
import torch

from kvplane.cli import doctor as command
from kvplane.cli import main, selftest
from kvplane.errors import BackendUnavailable


@pytest.fixture
def said(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KVPLANE_HOME", str(tmp_path / "home"))

    def run(*arguments, code=0):
        try:
            ended = main(["doctor", *arguments])
        except SystemExit as error:
            ended = error.code
        assert code == ended
        return capsys.readouterr().out

    return run


def test_everything_is_said_for_programs_too(said):
    facts = json.loads(said("--json"))

    assert torch.__version__.startswith(facts["packages"]["torch"].partition("+")[0])
    assert facts["devices"]["cpu"]["memory"] in {"mapped", "heap"}
    assert facts["devices"]["cpu"]["free_nbytes"] > 0
    assert facts["home"]["writable"]
    assert [True] * 3 == [part["good"] for part in facts["selftest"]]


def test_a_missing_extra_is_named_with_the_line_that_brings_it(said, monkeypatch):
    monkeypatch.setattr(command, "OPTIONAL", (("not-there", "nothing", "s3"),))

    assert "not-there (nothing)  not installed: pip install 'kvplane[s3]'" in said()


def test_a_part_that_raises_has_failed_and_the_command_says_so(said, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(selftest, "load", broken)
    printed = said(code=1)

    assert "FAILED a saved session comes back" in printed
    assert "RuntimeError: no such thing" in printed


def test_a_rewind_that_is_let_through_is_a_failure(monkeypatch):
    monkeypatch.setattr(selftest, "WINDOW", 1)

    assert [True, False, True] == [part.good for part in selftest.selftest()]


def test_a_device_without_a_backend_says_why(said, monkeypatch):
    def none(_):
        raise BackendUnavailable(backend="mapped", reason="needs luck")

    monkeypatch.setattr(selftest, "small_store", none)
    printed = said(code=1)

    assert "needs luck" in printed


def test_a_gpu_that_cannot_be_used_is_told_with_the_reason_and_fails(said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    printed = said(code=1)

    assert "cuda:0: " in printed
    assert "FAILED the same on cuda:0" in printed
    assert "cpu: " in printed
