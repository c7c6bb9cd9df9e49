"""Detached copies: complete, immutable, with the rotation; and sessions made of rows elsewhere."""

import dataclasses

import pytest
import torch

import tiny
from kvplane import Layout
from kvplane.errors import (
    ArgumentError,
    EvictedPosition,
    LimitReached,
    SessionClosed,
    SnapshotMismatch,
    StepOpen,
    TensorMismatch,
)
from tiny import equal, live_bytes

pytestmark = pytest.mark.usefixtures("memory")

ROW = 2 * 2 * 4


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 11, 12, 13])
@pytest.mark.parametrize("slack", [0, 4])
def test_a_restored_session_is_the_session_and_both_go_on_alike(tokens, slack, memory):
    store = tiny.store(6, 3, None, slack=slack, memory=memory)
    session = store.open([], first_row=2)
    tiny.put_each(session, range(tokens))
    restored = store.restore(session.snapshot())

    for _ in range(14):
        assert session.position == restored.position
        assert session.cursors == restored.cursors
        assert session.tokens == restored.tokens
        assert session.ledger == restored.ledger
        assert equal(live_bytes(session), live_bytes(restored))
        for one in (session, restored):
            tiny.put(one, [one.position])

    assert [tiny.in_rows(session, layer)[:3] for layer in range(3)] == [
        tiny.in_rows(restored, layer)[:3] for layer in range(3)
    ]


def test_a_snapshot_says_all_about_its_session():
    store = tiny.store(4, None)
    session = tiny.filled(store.open([]), 7)
    snapshot = session.snapshot()

    assert store.geometry == snapshot.geometry
    assert torch.float32 == snapshot.dtype
    assert (7, 0, None) == (snapshot.position, snapshot.first_position, snapshot.batch)
    assert (tuple(range(7)),) == snapshot.tokens
    assert {"s4.1x2x2.f32": (4, 4, 3, 3), "f0.1x2x2.f32": (64, 7, 0, 0)} == snapshot.cursors
    assert {0, 1} == set(snapshot.rows)
    assert (1, 4, 1, 2) == snapshot.rows[0][0].shape
    assert (4 + 7) * ROW == snapshot.nbytes
    assert ((7, store.numerics),) == snapshot.numerics


def test_an_empty_session_can_be_snapshot_and_restored():
    store = tiny.store(4, None)
    restored = store.restore(store.open(first_row=2).snapshot())
    tiny.put_each(restored, range(3))

    assert (0, 2, 3) == tiny.meta(restored, 0)


def test_rows_that_live_in_the_slack_are_kept_too():
    session = tiny.filled(tiny.store(4, None, slack=5).open(), 14)
    restored = session.store.restore(session.snapshot())
    restored.rewind(9)

    assert [6, 7, 8] == tiny.held(restored, 0)[-3:]


def test_a_batch_is_restored_as_a_batch():
    store = tiny.store(4, None)
    session = store.open([], batch=2)
    group = store.geometry.groups[0]
    for first in range(7):
        with session.step([[first], [first + 50]]) as step:
            for layer in (0, 1):
                parts = [tiny.rows(group, layer, [token]) for token in (first, first + 50)]
                step.write(layer, *(torch.stack(rows) for rows in zip(*parts, strict=True)))
    restored = store.restore(session.snapshot())

    assert 2 == restored.batch
    assert [list(range(7)), list(range(50, 57))] == restored.tokens
    assert equal(live_bytes(session), live_bytes(restored))


def test_a_step_must_be_closed_and_the_session_open():
    session = tiny.store(4).open()
    with session.step(1) as step:
        with pytest.raises(StepOpen):
            session.snapshot()
        step.abort()
    snapshot = session.snapshot()
    session.close()
    with pytest.raises(SessionClosed):
        session.snapshot()
    session.store.close()
    with pytest.raises(SessionClosed):
        session.store.restore(snapshot)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("geometry", {"windows": (5, None)}),
        ("geometry", {"windows": (4, None, None)}),
        ("geometry", {"windows": (4, None), "dtype": "float16"}),
        ("position", {"windows": (4, None), "max_context": 8}),
        ("capacity of s4.1x2x2.f32", {"windows": (4, None), "slack": 3, "attention": "physical"}),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_made(field, options):
    session = tiny.filled(tiny.store(4, None, attention="physical").open(), 11)
    options = dict(options)
    other = tiny.store(*options.pop("windows"), **options)
    with pytest.raises(SnapshotMismatch) as refused:
        other.restore(session.snapshot())

    assert field == refused.value.field
    assert 0 == other.account.held
    assert [] == other.sessions


def test_a_snapshot_of_another_dtype_is_refused():
    store = tiny.store(4)
    snapshot = dataclasses.replace(tiny.filled(store.open(), 3).snapshot(), dtype=torch.float16)
    with pytest.raises(SnapshotMismatch) as refused:
        store.restore(snapshot)

    assert ("dtype", torch.float32, torch.float16) == (
        refused.value.field,
        refused.value.expected,
        refused.value.got,
    )


@pytest.mark.parametrize(("slack", "held"), [(6, range(3, 11)), (0, range(7, 11))])
def test_in_blocked_order_a_ring_of_another_capacity_takes_the_newest_rows(slack, held):
    session = tiny.filled(tiny.store(4, None, slack=4).open(first_row=5), 11)
    restored = tiny.store(4, None, slack=slack).restore(session.snapshot())
    capacity = 4 + slack

    assert list(held) == tiny.held(restored, 0)
    # where a session born at row 0 would hold them
    assert held.start % capacity == tiny.meta(restored, 0)[1]
    tiny.filled(restored, 20)

    assert [16, 17, 18, 19] == tiny.held(restored, 0)[-4:]


@pytest.mark.parametrize("layout", Layout)
def test_a_snapshot_goes_into_any_layout_and_a_longer_context(layout):
    session = tiny.filled(tiny.store(4, None, heads=2, head_dim=4).open(), 40)
    other = tiny.store(
        4, None, heads=2, head_dim=4, max_context=128, layout={"full_attention": layout}
    )
    restored = other.restore(session.snapshot())

    assert list(range(40)) == tiny.held(restored, 1)
    assert range(36, 40) == restored.live(0)


def test_what_fails_in_the_middle_of_a_restore_leaves_nothing():
    store = tiny.store(4, None)
    session = tiny.filled(store.open(), 6)
    snapshot = session.snapshot()
    held = store.account.held
    key, value = snapshot.rows[1]
    for rows in (
        {**snapshot.rows, 1: (key[..., :1], value)},
        {**snapshot.rows, 1: (key.half(), value)},
        {0: snapshot.rows[0]},
        {**snapshot.rows, 1: (key[:, :3], value[:, :3])},
    ):
        with pytest.raises((TensorMismatch, SnapshotMismatch, EvictedPosition)):
            store.restore(dataclasses.replace(snapshot, rows=rows))

        assert held == store.account.held
        assert [session] == store.sessions


def test_a_restore_past_the_limit_is_refused():
    store = tiny.store(4, None, limit=17 * ROW)
    session = tiny.filled(store.open(), 6)
    with pytest.raises(LimitReached) as refused:
        store.restore(session.snapshot())

    assert (10 * ROW, 10 * ROW, 17 * ROW) == (
        refused.value.asked,
        refused.value.held,
        refused.value.limit,
    )
    assert 10 * ROW == store.account.held


# builders


CURSORS = {"s4.1x2x2.f32": (4, 4, 3, 1), "f0.1x2x2.f32": (64, 7, 0, 0)}


def test_a_builder_takes_rows_in_any_order_and_shows_nothing_before_the_end(memory):
    store = tiny.store(4, None, memory=memory)
    builder = store.builder(CURSORS, tokens=[list(range(7))])
    groups = dict(enumerate(store.geometry.groups))
    for layer, first, stop in ((1, 3, 7), (0, 5, 7), (1, 0, 3), (0, 3, 5)):
        builder.write(
            layer,
            first,
            *(rows[None] for rows in tiny.rows(groups[layer], layer, range(first, stop))),
        )

        assert [] == store.sessions

    session = builder.finish()

    assert [session] == store.sessions
    assert [3, 4, 5, 6] == tiny.held(session, 0)
    assert (3, 1, 4) == tiny.meta(session, 0)
    assert list(range(7)) == tiny.held(session, 1) == session.tokens
    tiny.put(session, [7])

    assert 1 == tiny.in_rows(session, 0).index(7)


def test_a_builder_that_misses_rows_makes_no_session():
    store = tiny.store(4, None)
    builder = store.builder(CURSORS)
    rows = tiny.rows(store.geometry.groups[0], 0, range(3, 7))
    builder.write(0, 3, *(part[None] for part in rows))
    with pytest.raises(SnapshotMismatch) as refused:
        builder.finish()

    assert ("rows of layer 1", [range(7)]) == (refused.value.field, refused.value.expected)
    assert 0 == store.account.held
    builder.abandon()
    builder.abandon()

    assert 0 == store.account.held


def test_a_row_written_twice_does_not_make_up_for_one_that_is_missing():
    store = tiny.store(4)
    rows = tiny.rows(store.geometry.groups[0], 0, [3, 4])
    for firsts in ((3, 3), (3, 5, 5)):
        builder = store.builder({"s4.1x2x2.f32": (4, 4, 3, 1)})
        for first in firsts:
            builder.write(0, first, *(part[None] for part in rows))
        with pytest.raises(SnapshotMismatch, match="rows of layer 0"):
            builder.finish()

        assert [] == store.sessions


def test_a_builder_refuses_rows_that_are_no_ones():
    store = tiny.store(4, None)
    builder = store.builder(CURSORS)
    rows = torch.zeros(1, 2, 1, 2)
    with pytest.raises(EvictedPosition):
        builder.write(0, 2, rows, rows)
    with pytest.raises(EvictedPosition):
        builder.write(0, 6, rows, rows)
    for layer in (2, -1):
        with pytest.raises(ArgumentError):
            builder.write(layer, 3, rows, rows)
    for key, value in (
        (rows[0], rows[0]),
        (rows.half(), rows),
        (rows, rows[:, :1]),
        (rows, torch.zeros(1, 2, 1, 3)),
        (torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2)),
        (rows, None),
        (None, rows),
    ):
        with pytest.raises(TensorMismatch):
            builder.write(0, 3, key, value)
    with pytest.raises(SnapshotMismatch):
        builder.finish()


@pytest.mark.parametrize(
    ("field", "cursors"),
    [
        ("groups", {}),
        ("groups", {"s4.1x2x2.f32": (4, 4, 3, 1)}),
        ("groups", {**CURSORS, "s5.1x2x2.f32": (4, 4, 3, 1)}),
        ("position", {**CURSORS, "f0.1x2x2.f32": (64, 6, 0, 0)}),
        ("position", dict.fromkeys(CURSORS, (70, 65, 0, 0))),
        # position 7 needs [4, 7) of the ring and all of the full plane
        ("rows of s4.1x2x2.f32", {**CURSORS, "s4.1x2x2.f32": (4, 2, 5, 1)}),
        ("rows of f0.1x2x2.f32", {**CURSORS, "f0.1x2x2.f32": (64, 6, 1, 0)}),
    ],
)
def test_a_builder_refuses_cursors_that_no_session_of_the_store_can_have(field, cursors):
    store = tiny.store(4, None)
    with pytest.raises(SnapshotMismatch) as refused:
        store.builder(cursors)

    assert field == refused.value.field
    assert 0 == store.account.held


@pytest.mark.parametrize("origin", [2, 7, 8])
def test_a_builder_refuses_rows_from_before_the_first_position_or_too_few(origin):
    store = tiny.store(4)
    cursors = {"s4.1x2x2.f32": (4, 9 - origin if origin > 5 else 4, origin, 1)}
    with pytest.raises(SnapshotMismatch) as refused:
        store.builder(cursors, first_position=3)

    assert "rows of s4.1x2x2.f32" == refused.value.field
    store.builder({"s4.1x2x2.f32": (4, 3, 6, 1)}, first_position=3).abandon()
    store.builder({"s4.1x2x2.f32": (4, 1, 3, 1)}, first_position=3).abandon()


@pytest.mark.parametrize(
    "cursor", [(4, 5, 0, 0), (4, 4, 3, 4), (0, 0, 0, 0), (4, 4, -3, 1), (4.0, 4, 3, 1)]
)
def test_a_builder_refuses_numbers_that_no_cursor_can_have(cursor):
    store = tiny.store(4, None)
    with pytest.raises(ArgumentError):
        store.builder({**CURSORS, "s4.1x2x2.f32": cursor})

    assert 0 == store.account.held
