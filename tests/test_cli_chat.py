"""`kvplane chat`: a turn reads what is new, also where the template changed what was said."""

import io

import pytest
import torch
from rich.console import Console

import model_folders
from kvplane.cli.chat import turn
from kvplane.integrations.transformers import loading
from kvplane.integrations.transformers.conversation import converse
from kvplane.models.nano import BOS, encode, heldout_text
from kvplane.pack import PrefixCache

IDS = [BOS, *encode(heldout_text())]


@pytest.fixture
def notes():
    return Console(file=io.StringIO(), width=1000)


def begun(named, root, ids):
    """A conversation that has read some tokens, and the lengths of the calls that follow."""
    talk = converse(named, prefixes=PrefixCache(root, named.fingerprint))
    talk.read(ids)
    read = []

    def note(_, __, kwargs):
        read.append(kwargs["input_ids"].shape[1])

    named.model.register_forward_pre_hook(note, with_kwargs=True)
    return talk, read


def test_a_turn_that_adds_to_what_was_said_reads_what_it_adds(tmp_path, notes):
    named = loading.load_model(loading.SHIPPED)
    talk, read = begun(named, tmp_path, IDS[:600])
    after = turn(talk, named, IDS[:640], notes)

    assert after is talk
    assert ([40], "") == (read, notes.file.getvalue())


def test_a_turn_that_changes_the_end_of_a_short_talk_goes_back_in_place(tmp_path, notes):
    named = loading.load_model(loading.SHIPPED)
    talk, read = begun(named, tmp_path, IDS[:100])
    ids = [*IDS[:60], *IDS[:30]]
    after = turn(talk, named, ids, notes)

    assert after is talk
    assert ([30], ids) == (read, after.ids)


def test_a_turn_that_changes_what_a_ring_lost_goes_on_from_the_deepest_cut(tmp_path, notes):
    named = loading.load_model(loading.SHIPPED)
    talk, read = begun(named, tmp_path, IDS[:700])
    ids = [*IDS[:600], *IDS[:50]]
    after = turn(talk, named, ids, notes)

    assert after is not talk
    assert ([138], ids) == (read, after.ids)
    assert "512 of 650 tokens reused: " in notes.file.getvalue()
    with torch.no_grad():
        expected = named.model(
            input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1
        ).logits
    torch.testing.assert_close(expected[0, -1], after.logits)


def test_a_turn_that_states_cannot_go_back_to_begins_again(tmp_path, notes):
    named = loading.load_model(str(model_folders.stateful(tmp_path / "model")))
    ids = [5 + number % 90 for number in range(60)]
    talk, read = begun(named, tmp_path / "root", ids)
    after = turn(talk, named, [*ids[:40], 7, 8], notes)

    assert after is not talk
    assert ([42], 42) == (read, after.cache.seen)
    assert "0 of 42 tokens reused: " in notes.file.getvalue()
