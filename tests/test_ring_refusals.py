"""Every refusal of the ring names what was given, what was expected, and what was got."""

import pytest

from kvplane.errors import ArgumentError, CacheDiscontinuity, ContextFull, EvictedPosition
from kvplane.ring import RingCursor


def cursor(**facts):
    """Four rows that hold positions 3 to 6, the oldest in row 1."""
    defaults = {"capacity": 4, "length": 4, "origin_logical": 3, "origin_physical": 1}
    return RingCursor(**(defaults | facts))


def refused(kind, call, *arguments, **named):
    with pytest.raises(kind) as error:
        call(*arguments, **named)
    return error.value


@pytest.mark.parametrize(
    ("facts", "argument", "expected", "got"),
    [
        ({"capacity": 0}, "capacity", "at least 1", 0),
        ({"capacity": 2.0}, "capacity", "a whole number", 2.0),
        ({"length": -1}, "length", "within [0, 4]", -1),
        ({"length": 5}, "length", "within [0, 4]", 5),
        ({"length": None}, "length", "a whole number", None),
        ({"origin_logical": -1}, "origin_logical", "at least 0", -1),
        ({"origin_logical": "3"}, "origin_logical", "a whole number", "3"),
        ({"origin_physical": -1}, "origin_physical", "within [0, 4)", -1),
        ({"origin_physical": 4}, "origin_physical", "within [0, 4)", 4),
        ({"origin_physical": True}, "origin_physical", "a whole number", True),
        ({"max_context": 6}, "max_context", "at least 7, the next position", 6),
        ({"max_context": 7.0}, "max_context", "a whole number", 7.0),
    ],
)
def test_a_cursor_that_cannot_be_is_refused_by_its_argument(facts, argument, expected, got):
    error = refused(ArgumentError, cursor, **facts)

    assert (argument, expected) == (error.argument, error.expected)
    assert got is error.got


@pytest.mark.parametrize(
    ("call", "arguments", "argument", "expected", "got"),
    [
        ("append", (7.0,), "position", "a whole number", 7.0),
        ("append_batch", (7.0, 1), "position", "a whole number", 7.0),
        ("append_batch", (7, "1"), "num_tokens", "a whole number", "1"),
        ("append_batch", (7, -1), "num_tokens", "at least 0", -1),
        ("row_of", (5.0,), "position", "a whole number", 5.0),
        ("row_at", ("5",), "position", "a whole number", "5"),
        ("rows_of", (3.0, 4), "first", "a whole number", 3.0),
        ("rows_of", (3, True), "stop", "a whole number", True),
        ("keep", (None, 4), "first", "a whole number", None),
        ("keep", (3, 4.0), "stop", "a whole number", 4.0),
        ("rows_of", (5, 4), "stop", "at least 5", 4),
        ("keep", (5, 4), "[first, stop)", "a range", (5, 4)),
        ("keep", (-1, 4), "[first, stop)", "a range", (-1, 4)),
    ],
)
def test_a_call_that_cannot_be_is_refused_by_its_argument(call, arguments, argument, expected, got):
    ring = cursor()
    before = ring.as_tuple()
    error = refused(ArgumentError, getattr(ring, call), *arguments)

    assert (argument, expected, got) == (error.argument, error.expected, error.got)
    assert before == ring.as_tuple()


def test_a_position_out_of_turn_names_both():
    ring = cursor()
    for call, arguments in (("append", (8,)), ("append_batch", (6, 2))):
        error = refused(CacheDiscontinuity, getattr(ring, call), *arguments)

        assert (7, arguments[0]) == (error.expected, error.got)


def test_a_full_context_names_what_was_asked_for():
    ring = cursor(max_context=8)
    error = refused(ContextFull, ring.append_batch, 7, 2)

    assert (7, 2, 8) == (error.position, error.num_tokens, error.max_context)
    error = refused(ContextFull, cursor(max_context=7).append, 7)

    assert (7, 1, 7) == (error.position, error.num_tokens, error.max_context)


@pytest.mark.parametrize(
    ("call", "arguments", "position"),
    [
        ("row_of", (2,), 2),
        ("row_of", (7,), 7),
        ("rows_of", (2, 4), 2),
        ("rows_of", (3, 8), 7),
        ("keep", (2, 4), 2),
        ("keep", (3, 8), 7),
    ],
)
def test_a_position_that_is_not_held_is_named_with_those_that_are(call, arguments, position):
    ring = cursor()
    error = refused(EvictedPosition, getattr(ring, call), *arguments)

    assert (position, 3, 7) == (error.position, error.first, error.stop)
    assert (4, 4, 3, 1) == ring.as_tuple()
