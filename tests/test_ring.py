"""The ring's arithmetic: the chapter's own numbers, any rotation, every refusal."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import ArgumentError, CacheDiscontinuity, ContextFull, EvictedPosition
from kvplane.ring import RingCursor, Source

W = 2048


@st.composite
def empty_cursors(draw, max_context=None):
    """A cursor at any rotation: from (0, 0) alone, `position % capacity` would pass every test."""
    capacity = draw(st.integers(1, 9))
    return RingCursor(
        capacity,
        origin_logical=draw(st.integers(0, 50)),
        origin_physical=draw(st.integers(0, capacity - 1)),
        max_context=max_context,
    )


@st.composite
def cursors(draw):
    """A cursor at any rotation with any number of tokens."""
    cursor = draw(empty_cursors())
    fill(cursor, draw(st.integers(0, 30)))
    return cursor


def fill(cursor, tokens):
    """Append tokens; an independent model of what each row holds."""
    held_by_row = {}
    for _ in range(tokens):
        position = cursor.next_position
        held_by_row[cursor.append(position)] = position
    return held_by_row


def state(cursor):
    return cursor.length, cursor.origin_logical, cursor.origin_physical


def refusal(error, call, *args):
    """The error that a call on a cursor raises, which leaves the cursor as it was."""
    cursor = call.__self__
    before = dataclasses.replace(cursor)
    with pytest.raises(error) as caught:
        call(*args)
    assert before == cursor
    return caught.value


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 2047, 2048])
def test_until_it_is_full_a_ring_only_grows(tokens):
    cursor = RingCursor(W)
    fill(cursor, tokens)

    assert (tokens, 0, 0) == state(cursor)


def test_the_first_tokens_past_the_window_take_rows_zero_and_one():
    cursor = RingCursor(W)
    fill(cursor, 2048)

    assert 0 == cursor.append(2048)
    assert (2048, 1, 1) == state(cursor)
    assert 1 == cursor.append(2049)
    assert (2048, 2, 2) == state(cursor)


@pytest.mark.parametrize(
    ("tokens", "origin_logical", "origin_physical"),
    [
        (2559, 511, 511),
        (2560, 512, 512),
        (2561, 513, 513),
        (4095, 2047, 2047),
        (4096, 2048, 0),
        (4097, 2049, 1),
        (65535, 63487, 2047),
        (130814, 128766, 1790),
        (131008, 128960, 1984),
        (131072, 129024, 0),
    ],
)
def test_a_full_ring_moves_both_origins_together(tokens, origin_logical, origin_physical):
    cursor = RingCursor(W)
    fill(cursor, tokens)

    assert (W, origin_logical, origin_physical) == state(cursor)


def test_a_ring_of_three_wraps_and_a_forced_rotation_is_believed():
    cursor = RingCursor(3)

    assert [0, 1, 2, 0] == [cursor.append(position) for position in range(4)]

    cursor.origin_physical = 2

    assert 2 == cursor.append(4)
    assert (3, 2, 0) == state(cursor)


@pytest.mark.parametrize(
    ("capacity", "before", "call", "after", "source"),
    [
        (W, (0, 0, 0), (0, 512), (0, 0, 512), (0, 512)),
        (W, (0, 0, 1900), (1900, 512), (364, 364, 2048), (0, 512)),
        (W, (100, 7, 2048), (2148, 512), (612, 519, 2048), (0, 512)),
        (W, (9, 2000, 2048), (2057, 512), (521, 464, 2048), (0, 512)),
        (W, (0, 0, 1536), (1536, 512), (0, 0, 2048), (0, 512)),
        (4, (0, 0, 0), (0, 5), (1, 1, 4), (1, 4)),
        (4, (0, 0, 4), (4, 6), (6, 2, 4), (2, 4)),
        (4, (3, 2, 3), (6, 0), (3, 2, 3), (0, 0)),
    ],
)
def test_a_batch_moves_the_origins_as_the_chapter_says(capacity, before, call, after, source):
    origin_logical, origin_physical, length = before
    cursor = RingCursor(capacity, length, origin_logical, origin_physical)

    assert Source(*source) == cursor.append_batch(*call)
    assert after == (cursor.origin_logical, cursor.origin_physical, cursor.length)


@given(empty_cursors(), st.integers(0, 40))
def test_every_live_position_is_found_in_the_row_it_was_written_to(cursor, tokens):
    start = cursor.next_position
    held_by_row = fill(cursor, tokens)

    live = range(start + max(0, tokens - cursor.capacity), start + tokens)

    assert live == cursor.live
    assert list(live) == [held_by_row[cursor.row_of(position)] for position in live]


@given(cursors(), st.integers(0, 25))
def test_a_batch_is_the_same_as_its_tokens_one_by_one(cursor, tokens):
    single = cursor.copy()
    first = cursor.next_position
    held_by_row = fill(single, tokens)

    source = cursor.append_batch(first, tokens)

    assert single == cursor
    live = range(first + source.source_first, first + source.source_first + source.source_count)
    assert live == range(first + max(0, tokens - cursor.capacity), first + tokens)
    assert list(live) == [held_by_row[cursor.row_of(position)] for position in live]


@given(cursors(), st.data())
def test_runs_of_rows_are_the_rows_of_the_positions_in_order(cursor, data):
    first = data.draw(st.integers(cursor.origin_logical, cursor.next_position))
    stop = data.draw(st.integers(first, cursor.next_position))

    runs = cursor.rows_of(first, stop)

    assert [cursor.row_of(position) for position in range(first, stop)] == [
        row for run in runs for row in run
    ]
    assert len(runs) <= 2
    assert all(runs)


@given(cursors(), st.data())
def test_what_is_kept_stays_in_its_row_and_the_next_token_goes_on_from_there(cursor, data):
    first = data.draw(st.integers(cursor.origin_logical, cursor.next_position))
    stop = data.draw(st.integers(first, cursor.next_position))
    rows = {position: cursor.row_at(position) for position in range(first, stop + 1)}

    cursor.keep(first, stop)

    assert range(first, stop) == cursor.live
    assert rows == {position: cursor.row_at(position) for position in rows}
    assert rows[stop] == cursor.append(stop)


@given(cursors(), st.integers(0, 80))
def test_a_ring_that_keeps_nothing_goes_on_at_any_position_in_its_usual_row(cursor, position):
    row = cursor.row_at(position)

    cursor.keep(position, position)

    assert (0, position, row) == state(cursor)
    assert 0 <= row < cursor.capacity


@given(cursors(), st.integers(-60, 60).filter(bool))
def test_a_skipped_or_replayed_position_is_refused_and_changes_nothing(cursor, offset):
    expected = cursor.next_position

    error = refusal(CacheDiscontinuity, cursor.append, expected + offset)

    assert (expected, expected + offset) == (error.expected, error.got)
    assert f"expected position {expected}, got {expected + offset}" in str(error)

    error = refusal(CacheDiscontinuity, cursor.append_batch, expected + offset, 2)

    assert (expected, expected + offset) == (error.expected, error.got)


@given(cursors())
def test_an_empty_batch_at_another_position_is_refused_too(cursor):
    error = refusal(CacheDiscontinuity, cursor.append_batch, cursor.next_position + 1, 0)

    assert cursor.next_position == error.expected


@pytest.mark.parametrize("capacity", [4, 8, 32])
def test_max_context_ends_a_session_whatever_rows_are_free(capacity):
    cursor = RingCursor(capacity, max_context=8)
    fill(cursor, 7)

    error = refusal(ContextFull, cursor.append_batch, 7, 2)
    assert (7, 2, 8) == (error.position, error.num_tokens, error.max_context)

    cursor.append(7)

    error = refusal(ContextFull, cursor.append, 8)
    assert (8, 1, 8) == (error.position, error.num_tokens, error.max_context)
    assert Source(0, 0) == cursor.append_batch(8, 0)


def test_a_ring_without_max_context_has_no_end():
    cursor = RingCursor(2, origin_logical=10**15)

    assert 0 == cursor.append(10**15)


@given(cursors(), st.integers(1, 20))
def test_a_position_that_is_not_live_has_no_row_to_read(cursor, distance):
    first, stop = cursor.origin_logical, cursor.next_position
    for position in (first - distance, stop + distance - 1):
        error = refusal(EvictedPosition, cursor.row_of, position)

        assert (position, first, stop) == (error.position, error.first, error.stop)
        assert f"position {position} is outside the live range [{first}, {stop})" in str(error)


def test_rows_of_a_range_name_the_end_that_is_not_live():
    cursor = RingCursor(4)
    fill(cursor, 6)

    assert 1 == refusal(EvictedPosition, cursor.rows_of, 1, 6).position
    assert 6 == refusal(EvictedPosition, cursor.rows_of, 2, 7).position
    assert [range(2, 4), range(2)] == cursor.rows_of(2, 6)
    assert [] == cursor.rows_of(100, 100)


def test_a_range_that_ends_before_it_begins_is_no_range():
    cursor = RingCursor(4)
    fill(cursor, 6)

    assert "stop" == refusal(ArgumentError, cursor.rows_of, 4, 3).argument
    assert (4, 3) == refusal(ArgumentError, cursor.keep, 4, 3).got
    assert (-1, 3) == refusal(ArgumentError, cursor.keep, -1, 3).got
    assert (-2, -2) == refusal(ArgumentError, cursor.keep, -2, -2).got


def test_positions_that_are_not_live_cannot_be_kept():
    cursor = RingCursor(4)
    fill(cursor, 6)

    assert 1 == refusal(EvictedPosition, cursor.keep, 1, 6).position
    assert 6 == refusal(EvictedPosition, cursor.keep, 2, 7).position


def test_a_negative_batch_is_refused():
    cursor = RingCursor(4)

    assert ("num_tokens", -1) == (
        refusal(ArgumentError, cursor.append_batch, 0, -1).argument,
        refusal(ArgumentError, cursor.append_batch, 0, -1).got,
    )


@pytest.mark.parametrize(
    ("argument", "numbers"),
    [
        ("capacity", {"capacity": 0}),
        ("capacity", {"capacity": -1}),
        ("length", {"capacity": 4, "length": 5}),
        ("length", {"capacity": 4, "length": -1}),
        ("origin_logical", {"capacity": 4, "origin_logical": -1}),
        ("origin_physical", {"capacity": 4, "origin_physical": 4}),
        ("origin_physical", {"capacity": 4, "origin_physical": -1}),
        ("max_context", {"capacity": 4, "max_context": -1}),
        ("max_context", {"capacity": 4, "length": 2, "origin_logical": 7, "max_context": 8}),
    ],
)
def test_numbers_that_no_cursor_can_have_are_refused(argument, numbers):
    with pytest.raises(ArgumentError) as refused:
        RingCursor(**numbers)

    assert argument == refused.value.argument
    assert numbers[argument] == refused.value.got


@pytest.mark.parametrize("number", [True, 1.0, "1", None, 2.5])
@pytest.mark.parametrize("argument", ["capacity", "length", "origin_logical", "origin_physical"])
def test_a_cursor_is_made_of_whole_numbers(argument, number):
    with pytest.raises(ArgumentError) as refused:
        RingCursor(**{"capacity": 4, argument: number})

    assert (argument, number) == (refused.value.argument, refused.value.got)


@pytest.mark.parametrize("number", [True, 1.0, "1", None])
def test_a_position_is_a_whole_number(number):
    cursor = RingCursor(4, length=1)

    assert number is refusal(ArgumentError, cursor.append, number).got
    assert number is refusal(ArgumentError, cursor.append_batch, number, 1).got
    assert number is refusal(ArgumentError, cursor.append_batch, 1, number).got


def test_a_copy_goes_its_own_way():
    cursor = RingCursor(4, 2, 3, 1, max_context=9)
    copy = cursor.copy()
    copy.append(5)

    assert (4, 2, 3, 1) == cursor.as_tuple()
    assert (4, 3, 3, 1) == copy.as_tuple()
    assert 9 == copy.max_context
