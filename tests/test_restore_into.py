"""A snapshot put back into a session that is there: in its memory, or nothing changed."""

import dataclasses

import pytest
import torch

import tiny
from kvplane.errors import (
    ArgumentError,
    CheckpointLost,
    LimitReached,
    MemoryUnavailable,
    SessionClosed,
    SessionReadOnly,
    SnapshotMismatch,
    StepOpen,
    TensorMismatch,
)
from tiny import equal, live_bytes

pytestmark = pytest.mark.usefixtures("memory")

ROW = 2 * 2 * 4


def addresses(session):
    return [plane.key.data_ptr() for plane in session.planes.values()]


@pytest.mark.parametrize("before", [0, 3, 9, 20])
@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 7, 13])
def test_a_session_takes_on_a_snapshot_in_the_memory_it_has(tokens, before, memory):
    store = tiny.store(6, 3, None, memory=memory)
    source = store.open([], first_row=2)
    tiny.put_each(source, range(tokens))
    into = store.open([])
    tiny.put_each(into, range(500, 500 + before))
    at = addresses(into)
    restored = store.restore(source.snapshot(), into=into)

    assert restored is into
    assert at == addresses(into)
    for _ in range(14):
        assert source.position == into.position
        assert source.cursors == into.cursors
        assert source.tokens == into.tokens
        assert source.ledger == into.ledger
        assert equal(live_bytes(source), live_bytes(into))
        for one in (source, into):
            tiny.put(one, [one.position])


def test_what_is_held_is_counted_as_if_the_session_were_new(memory):
    store = tiny.store(4, None, memory=memory)
    kept = tiny.filled(store.open(), 6).snapshot()
    into = tiny.filled(store.open(), 11)
    held = store.account.held
    store.restore(kept, into=into)

    assert held - 5 * ROW == store.account.held
    store.restore(kept, into=into)

    assert held - 5 * ROW == store.account.held


def test_a_fork_that_shares_pages_keeps_its_own_rows(memory):
    store = tiny.store(4, None, memory=memory)
    kept = tiny.filled(store.open(), 6).snapshot()
    into = tiny.filled(store.open(), 11)
    fork = into.fork()
    before = live_bytes(fork)
    store.restore(kept, into=into)

    assert equal(before, live_bytes(fork))
    assert [2, 3, 4, 5] == tiny.held(into, 0)


def test_places_in_what_is_gone_are_lost(memory):
    store = tiny.store(4, None, memory=memory)
    into = tiny.filled(store.open(), 3)
    into.mark()
    early = into.checkpoint()
    kept = into.snapshot()
    tiny.filled(into, 9)
    into.record()
    tiny.filled(into, 11)
    store.restore(kept, into=into)

    assert set() == into.marks
    assert {} == into.captures
    with pytest.raises(CheckpointLost):
        into.return_to(early)
    tiny.filled(into, 5)
    into.rewind(4)

    assert [1, 2, 3] == tiny.held(into, 0)[-3:]


def test_a_session_that_began_elsewhere_begins_where_the_snapshot_does(memory):
    store = tiny.store(4, None, memory=memory)
    kept = tiny.filled(store.open(first_position=3), 9).snapshot()
    into = tiny.filled(store.open([]), 2)
    store.restore(kept, into=into)

    assert (3, 9) == (into.first_position, into.position)
    assert into.tokens is None
    into.reset()

    assert 3 == into.position


def test_a_batch_is_restored_into_a_batch_of_as_many():
    store = tiny.store(4)
    kept = store.open(batch=2).snapshot()
    for batch in (None, 1, 3):
        with pytest.raises(SnapshotMismatch) as refused:
            store.restore(kept, into=store.open(batch=batch))

        assert ("batch", batch, 2) == (
            refused.value.field,
            refused.value.expected,
            refused.value.got,
        )


def broken(snapshot):
    key, value = snapshot.rows[1]
    return {
        "too few layers": {0: snapshot.rows[0]},
        "a layer too many": {**snapshot.rows, 2: (key, value)},
        "another dim": {**snapshot.rows, 1: (key[..., :1], value)},
        "another dtype": {**snapshot.rows, 1: (key.half(), value)},
        "too few rows": {**snapshot.rows, 1: (key[:, :3], value[:, :3])},
        "too few values": {**snapshot.rows, 1: (key, value[:, :3])},
        "no tensor": {**snapshot.rows, 1: (key, None)},
    }


@pytest.mark.parametrize(
    "what", list(broken(tiny.filled(tiny.store(4, None).open(), 6).snapshot()))
)
def test_rows_that_do_not_fit_are_refused_and_nothing_changes(what, memory):
    store = tiny.store(4, None, memory=memory)
    snapshot = tiny.filled(store.open(), 6).snapshot()
    into = tiny.filled(store.open(), 9)
    before = tiny.state(into)
    with pytest.raises((TensorMismatch, SnapshotMismatch)):
        store.restore(dataclasses.replace(snapshot, rows=broken(snapshot)[what]), into=into)

    assert tiny.same(before, tiny.state(into))


def test_sessions_that_cannot_take_it_are_refused(memory):
    store = tiny.store(4, None, memory=memory)
    kept = tiny.filled(store.open(), 6).snapshot()
    with pytest.raises(ArgumentError, match="into"):
        store.restore(kept, into=tiny.store(4, None).open())
    with pytest.raises(ArgumentError, match="into"):
        store.restore(kept, into=kept)
    into = store.open()
    with into.step(1) as step:
        with pytest.raises(StepOpen):
            store.restore(kept, into=into)
        step.abort()
    into.freeze()
    with pytest.raises(SessionReadOnly):
        store.restore(kept, into=into)
    into.close()
    with pytest.raises(SessionClosed):
        store.restore(kept, into=into)
    with pytest.raises(SnapshotMismatch):
        store.restore(tiny.store(5, None).open().snapshot(), into=store.open())


def test_a_snapshot_past_the_limit_leaves_the_session_as_it_was():
    store = tiny.store(4, None, limit=20 * ROW)
    kept = tiny.filled(tiny.store(4, None).open(), 17).snapshot()
    into = tiny.filled(store.open(), 9)
    before = tiny.state(into)
    with pytest.raises(LimitReached) as refused:
        store.restore(kept, into=into)

    assert (8 * ROW, 13 * ROW) == (refused.value.asked, refused.value.held)
    assert tiny.same(before, tiny.state(into))


def test_pages_that_cannot_be_had_leave_the_session_as_it_was(monkeypatch):
    store = tiny.store(4, None)
    kept = tiny.filled(store.open(), 6).snapshot()
    into = tiny.filled(store.open(), 3)
    before = tiny.state(into)

    def refuse(_):
        raise MemoryUnavailable("no page")

    monkeypatch.setattr(type(into.planes[1]), "back", lambda _, run: refuse(run))
    with pytest.raises(MemoryUnavailable):
        store.restore(kept, into=into)

    assert tiny.same(before, tiny.state(into))


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupt_between_two_layers_leaves_it_empty_and_usable(monkeypatch, after):
    store = tiny.store(4, None)
    kept = tiny.filled(store.open([]), 6).snapshot()
    into = store.open([])
    tiny.put_each(into, range(9))
    plane = type(into.planes[0])
    real, calls = plane.store, []

    def store_rows(self, *rows):
        calls.append(rows)
        if len(calls) > after:
            raise KeyboardInterrupt
        real(self, *rows)

    held = store.account.held
    monkeypatch.setattr(plane, "store", store_rows)
    with pytest.raises(KeyboardInterrupt):
        store.restore(kept, into=into)
    monkeypatch.undo()

    assert (0, []) == (into.position, into.tokens)
    assert held - 9 * ROW == store.account.held
    tiny.put_each(into, range(7))

    assert [3, 4, 5, 6] == tiny.held(into, 0)


def test_no_row_of_the_old_content_is_read_again():
    store = tiny.store(4, None)
    kept = tiny.filled(store.open(), 2).snapshot()
    into = tiny.filled(store.open(), 30)
    for plane in into.planes.values():
        plane.key.fill_(torch.nan)
        plane.value.fill_(torch.nan)
    store.restore(kept, into=into)
    group = store.geometry.groups[0]
    with into.step([2]) as step:
        for layer in (0, 1):
            key, value = tiny.rows(group, layer, [2])
            out = step.attend(layer, key, key, value)

            assert torch.isfinite(out).all()
