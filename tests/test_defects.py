"""Public defects of such stores, each a recipe: rings, steps and rewinds.

A name begins with the recipe's number. Tokens equal their positions unless they are written 1xx;
`meta` is (origin_logical, origin_physical, length).
"""

import pytest
import torch

import tiny
from kvplane.attention import reference
from kvplane.errors import (
    CacheDiscontinuity,
    ContextFull,
    PositionError,
    WindowLost,
)
from kvplane.ring import RingCursor, Source

pytestmark = pytest.mark.usefixtures("memory")

FULL = None


def at(store, origin_logical, origin_physical, length, layer=0):
    """A session whose ring has that meta, with tokens equal to positions."""
    group = store.geometry.group_of(layer)
    capacity = store.plan.capacities[group.id]
    cursors = {group.id: (capacity, length, origin_logical, origin_physical)}
    builder = store.builder(cursors, first_position=origin_logical)
    if length:
        rows = tiny.rows(group, layer, range(origin_logical, origin_logical + length))
        builder.write(layer, origin_logical, *(part[None] for part in rows))
    return builder.finish()


def test_b01_the_token_that_fills_the_window_and_the_next_take_their_turns():
    session = tiny.store(8).open()
    tiny.put(session, range(6))
    logical, rows = [tiny.held(session, 0)], []
    for token in (6, 7, 8, 9):
        tiny.put(session, [token])
        logical.append(tiny.held(session, 0))
        rows.append(tiny.in_rows(session, 0).index(token))

    assert [*range(6)] == logical[0]
    assert [[*range(7)], [*range(8)], [*range(1, 9)], [*range(2, 10)]] == logical[1:]
    assert [6, 7, 0, 1] == rows
    assert (2, 2, 8) == tiny.meta(session, 0)


@pytest.mark.parametrize(
    ("row", "rows", "slots", "meta"),
    [
        (5, [5, 0, 1, 2, 3, 4, 5, 0], [12, 7, 8, 9, 10, 11], (7, 1, 6)),
        (0, [0, 1, 2, 3, 4, 5, 0, 1], [11, 12, 7, 8, 9, 10], (7, 2, 6)),
    ],
)
def test_b02_rows_follow_the_rings_own_origin_not_the_position(row, rows, slots, meta):
    session = tiny.store(6).open(first_position=5, first_row=row)
    taken = []
    for token in range(5, 13):
        tiny.put(session, [token])
        taken.append(tiny.in_rows(session, 0).index(token))

    assert rows == taken
    assert slots == tiny.in_rows(session, 0)
    assert meta == tiny.meta(session, 0)


def test_b03_every_row_of_a_wrapped_ring_is_live_by_its_logical_position():
    session = tiny.filled(tiny.store(8).open(), 9)
    cursor = session.cursors[session.groups[0].id]
    by_row = {cursor.row_of(position): position for position in cursor.live}

    assert [8, 1, 2, 3, 4, 5, 6, 7] == [by_row[row] for row in range(8)]
    assert [8, 1, 2, 3, 4, 5, 6, 7] == tiny.in_rows(session, 0)
    with session.step(1) as step:
        tiny.write(step, session, [9])

        assert [*range(2, 10)] == tiny.tokens_of(session, 0, step.view(0).spans)


def test_b04_the_very_first_chunk_may_be_longer_than_the_ring():
    session = tiny.store(4).open()
    tiny.put(session, range(7))

    assert [3, 4, 5, 6] == tiny.held(session, 0)
    assert (3, 3, 4) == tiny.meta(session, 0)
    assert [4, 5, 6, 3] == tiny.in_rows(session, 0)


def test_b06_of_a_chunk_longer_than_the_ring_only_its_end_is_stored_in_sequential_rows(memory):
    assert Source(6, 4) == RingCursor(4).append_batch(0, 10)

    chunk = tiny.store(4, memory=memory).open()
    tiny.put(chunk, range(10))
    single = tiny.filled(tiny.store(4, memory=memory).open(), 10)

    assert [8, 9, 6, 7] == tiny.in_rows(chunk, 0) == tiny.in_rows(single, 0)
    assert (6, 2, 4) == tiny.meta(chunk, 0) == tiny.meta(single, 0)


def test_b07_a_position_before_the_origin_never_becomes_a_row():
    cursor = RingCursor(6, 6, 5, 5)
    with pytest.raises(CacheDiscontinuity) as refused:
        cursor.append_batch(3, 2)

    assert (11, 3) == (refused.value.expected, refused.value.got)
    assert (6, 6, 5, 5) == cursor.as_tuple()
    # python's modulo of a negative distance is a row all the same: asked for by position only
    assert {0, 1, 2, 3, 4, 5} == {cursor.row_at(position) for position in range(-1, 5)}


def test_b09_a_row_of_zeros_is_a_row_and_a_stale_row_is_none():
    session = tiny.store(FULL, max_context=16).open()
    group = session.groups[0]
    for token in range(4):
        key, value = tiny.rows(group, 0, [token])
        if token == 2:
            key, value = torch.zeros_like(key), torch.zeros_like(value)
        with session.step(1) as step:
            step.write(0, key, value)

    assert 4 == session.position == len(session.live(0))
    (key, value), *_ = session.spans(0, 2, 3)
    assert not key.any()
    assert not value.any()

    session.reset()

    assert 0 == session.position == len(session.live(0))


def test_b10_a_reset_starts_every_layer_at_row_zero():
    session = tiny.filled(tiny.store(8, FULL, max_context=16).open(), 11)
    session.reset()
    tiny.put(session, [0])

    assert (0, 0, 1) == tiny.meta(session, 0) == tiny.meta(session, 1)
    assert 0 == tiny.in_rows(session, 0).index(0) == tiny.in_rows(session, 1).index(0)
    assert [0] == tiny.held(session, 0) == tiny.held(session, 1)
    with pytest.raises(CacheDiscontinuity) as refused:
        session.cursors[session.groups[0].id].copy().append(11)

    assert 1 == refused.value.expected


def attend(session, count, *, window_tokens=None):
    """Attention of the next tokens over random rows, written in one step."""
    tokens = range(session.position, session.position + count)
    generator = torch.Generator().manual_seed(0)
    every = torch.randn(3, 64, 2, 4, generator=generator)
    query, key, value = (part[tokens.start : tokens.stop].clone() for part in every)
    if window_tokens is not None:
        window_tokens(key, value)
    with session.step(count) as step:
        return step.attend(0, query, key, value)


def exact(count, window):
    """The same for a session of `count` tokens in float64, without any cache."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 64, 2, 4, generator=generator)[:, None, :count].double()
    plane = tiny.store(window, heads=2, head_dim=4).open().planes[0]
    return reference.attend(
        plane, (), query, key, value,
        first_key=0, first_query=0, window=window, scale=4**-0.5,
    )[0].float()  # fmt: skip


def test_b11_no_query_of_a_chunk_sees_the_future_or_what_the_chunk_overwrote():
    session = tiny.store(4, heads=2, head_dim=4).open()
    out = attend(session, 6)
    for query in range(6):
        # a change to a row that is not seen changes nothing
        seen = range(max(0, query - 3), query + 1)
        other = tiny.store(4, heads=2, head_dim=4).open()

        def spoil(key, value, seen=seen):
            for token in set(range(6)) - set(seen):
                key[token] = value[token] = 1e4

        assert torch.equal(out[query], attend(other, 6, window_tokens=spoil)[query])

    torch.testing.assert_close(out, exact(6, 4))


def test_b13_a_chunk_sees_the_old_window_and_itself():
    session = tiny.filled(tiny.store(4).open(), 6)
    with session.step(4) as step:
        tiny.write(step, session, range(6, 10))
        view = step.view(0)

        assert [3, 4, 5, 6, 7, 8, 9] == tiny.tokens_of(session, 0, view.spans)
        assert (3, 10) == (view.first, view.stop)

    assert [6, 7, 8, 9] == tiny.held(session, 0)
    assert (6, 2, 4) == tiny.meta(session, 0)

    whole = tiny.store(4, heads=2, head_dim=4).open()
    outs = torch.cat([attend(whole, 6), attend(whole, 4)])

    torch.testing.assert_close(outs, exact(10, 4))


@pytest.mark.parametrize("windows", [(4, FULL), (FULL, 4)])
def test_b15_a_step_that_overflows_one_layer_moves_none(windows):
    session = tiny.filled(tiny.store(*windows, max_context=8).open(), 6)
    ring, full = windows.index(4), windows.index(FULL)
    before = tiny.state(session)
    with pytest.raises(ContextFull):
        tiny.put(session, range(6, 10))

    assert tiny.same(before, tiny.state(session))
    assert [2, 3, 4, 5] == tiny.held(session, ring)
    assert (2, 2, 4) == tiny.meta(session, ring)
    assert 6 == len(session.live(full))


@pytest.mark.parametrize("order", ["blocked", "physical"])
@pytest.mark.parametrize("query", [3, 4, 5, 9])
def test_b17_a_window_of_four_is_four_tokens_with_the_current_one(order, query):
    seen = range(query - 3, query + 1)
    plain = tiny.store(4, heads=2, head_dim=4, attention=order).open()
    attend(plain, query)
    expected = attend(plain, 1)
    for token in range(query):
        session = tiny.store(4, heads=2, head_dim=4, attention=order).open()

        def spoil(_, value, token=token):
            value[token] = 1e4

        attend(session, query, window_tokens=spoil)

        assert (token not in seen) == torch.equal(expected, attend(session, 1))


@pytest.mark.parametrize("order", ["blocked", "physical"])
def test_b19_a_window_of_one_sees_the_current_token_and_has_one_row(order):
    session = tiny.store(1, heads=2, head_dim=4, attention=order).open()
    outs = torch.cat([attend(session, 1) for _ in range(4)])
    values = torch.randn(3, 64, 2, 4, generator=torch.Generator().manual_seed(0))[2, :4]

    torch.testing.assert_close(outs, values)

    scalars = tiny.store(1).open()
    for token in range(4):
        tiny.put(scalars, [token])

        assert [token] == tiny.held(scalars, 0) == tiny.in_rows(scalars, 0)


@pytest.mark.parametrize("order", ["blocked", "physical"])
@pytest.mark.parametrize("count", [1, 3])
def test_b20_rows_older_than_the_window_are_never_read(order, count):
    exactly = tiny.store(6, heads=2, head_dim=4, attention=order).open()
    slack = tiny.store(6, heads=2, head_dim=4, slack=8, attention=order).open()
    for session in (exactly, slack):
        for _ in range(20):
            attend(session, 1)
    plane, cursor = slack.planes[0], next(iter(slack.cursors.values()))
    for position in range(slack.live(0).start, 20 - 5):
        row = cursor.row_of(position)
        plane.key[0, row] = plane.value[0, row] = torch.nan
    out = attend(slack, count)

    assert torch.isfinite(out).all()
    if order == "blocked":
        assert torch.equal(attend(exactly, count), out)
    else:
        torch.testing.assert_close(attend(exactly, count), out)


def test_b23_a_ring_is_trimmed_where_it_has_slack_and_refuses_where_it_has_not():
    session = tiny.filled(tiny.store(8).open(), 11)
    with pytest.raises(WindowLost) as refused:
        session.rewind(9)

    # the window of position 9 is [2, 9), and row 2 is gone
    assert (2, 3) == (refused.value.first, refused.value.stop)
    assert [*range(3, 11)] == tiny.held(session, 0)

    # a window of 7 in the same ring of 8 has the slack
    session = tiny.filled(tiny.store(7, slack=1).open(), 11)
    session.rewind(9)
    rows = []
    for token in (109, 110, 111, 112):
        tiny.put(session, [token])
        rows.append(tiny.in_rows(session, 0).index(token))
        if token == 109:
            assert (3, 3, 7) == tiny.meta(session, 0)
            assert [3, 4, 5, 6, 7, 8, 109] == tiny.held(session, 0)

    assert [1, 2, 3, 4] == rows
    assert [8, 109, 110, 111, 112, 5, 6, 7] == tiny.in_rows(session, 0)
    assert (5, 5, 8) == tiny.meta(session, 0)


def test_b24_a_rejected_draft_gives_its_window_back_or_is_refused():
    # by slack: W = 8, C = 12
    session = tiny.filled(tiny.store(8, slack=4).open(), 20)
    tiny.put_each(session, range(120, 124))
    session.rewind(20)

    assert [*range(13, 20)] == tiny.held(session, 0)[-7:]

    # by journal: one speculative step, C = W
    session = tiny.filled(tiny.store(8).open(), 20)
    tiny.put(session, range(120, 124), accepted=0, speculative=True)

    assert [*range(13, 20)] == tiny.held(session, 0)[-7:]

    # without either
    session = tiny.filled(tiny.store(8).open(), 20)
    tiny.put_each(session, range(120, 124))
    with pytest.raises(WindowLost):
        session.rewind(20)

    assert [*range(16, 20), 120, 121, 122, 123] == tiny.held(session, 0)


def test_b25_a_rollback_that_one_layer_cannot_do_is_done_by_none():
    session = tiny.filled(tiny.store(4, 6, FULL).open(), 12)
    before = tiny.state(session)
    with pytest.raises(WindowLost):
        session.rewind(9)

    assert tiny.same(before, tiny.state(session))
    assert {12} == {session.live(layer).stop for layer in range(3)}


def test_b27_a_rollback_below_zero_is_refused_alike_in_every_layer():
    session = tiny.store(4, FULL).open([])
    tiny.put_each(session, range(3))
    before = tiny.state(session)
    for position in (3 - 5, 3 + 1):
        with pytest.raises(PositionError):
            session.rewind(position)

        assert tiny.same(before, tiny.state(session))

    session.rewind(3)

    assert tiny.same(before, tiny.state(session))


def test_b28_a_rollback_past_what_the_ring_holds_never_restarts_at_zero():
    session = tiny.filled(tiny.store(4, FULL).open(), 20)
    with pytest.raises(WindowLost) as refused:
        session.rewind(4)

    assert (1, 4) == (refused.value.first, refused.value.stop)
    assert 20 == session.position
    with pytest.raises(CacheDiscontinuity) as skipped:
        session.cursors[session.groups[0].id].copy().append(0)

    assert 20 == skipped.value.expected


def test_b67_sequences_of_two_lengths_share_a_step_and_no_padding_is_ever_stored(memory):
    store = tiny.store(4, memory=memory)
    group = store.geometry.groups[0]
    first, second = store.open(), store.open()
    with store.batch([first, second], [5, 3]) as step:
        step.write(0, *tiny.rows(group, 0, [10, 11, 12, 13, 14, 20, 21, 22]))

    assert [11, 12, 13, 14] == tiny.held(first, 0)
    assert (1, 1, 4) == tiny.meta(first, 0)
    assert [20, 21, 22] == tiny.held(second, 0)
    assert (0, 0, 3) == tiny.meta(second, 0)
    with store.batch([first, second]) as step:
        step.write(0, *tiny.rows(group, 0, [15, 23]))

    assert [12, 13, 14, 15] == tiny.held(first, 0)
    assert [20, 21, 22, 23] == tiny.held(second, 0)
    assert (0, 0, 4) == tiny.meta(second, 0)
