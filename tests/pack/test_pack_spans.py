"""Which rows are put and which are named: against a model that walks position by position."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.ledger import Span
from kvplane.pack.limits import BLOCK, ROUND_DOWN
from kvplane.pack.spans import overlapping, planned, rounded_down


@st.composite
def known_spans(draw):
    """Ascending spans with holes, each inside one block."""
    spans = []
    at = draw(st.integers(0, 300))
    for number in range(draw(st.integers(0, 6))):
        at += draw(st.sampled_from([0, 0, 1, 40, 256]))
        stop = min(at + draw(st.integers(1, 256)), at - at % BLOCK + BLOCK)
        spans.append(Span(at, stop, f"blob {number}"))
        at = stop
    return spans


@given(known_spans(), st.integers(0, 700), st.integers(0, 700))
def test_every_position_is_named_once_by_the_blob_that_holds_it_or_put_once(known, first, count):
    stop = first + count
    holder = {p: span.blob for span in known for p in range(span.first, span.stop)}
    parts = planned(known, first, stop)
    found = {}
    for part in parts:
        begin, end = part[:2] if isinstance(part, Span) else (part.start, part.stop)
        blob = part.blob if isinstance(part, Span) else None
        assert begin < end
        assert begin // BLOCK == (end - 1) // BLOCK
        for position in range(begin, end):
            assert position not in found
            found[position] = blob

    assert list(range(first, stop)) == list(found)
    assert {position: holder.get(position) for position in range(first, stop)} == found


@given(known_spans(), st.integers(0, 700), st.integers(0, 700))
def test_equal_rows_are_planned_in_as_few_pieces_as_blocks_and_spans_ask(known, first, count):
    parts = planned(known, first, first + count)

    for one, two in itertools.pairwise(parts):
        if isinstance(one, range) and isinstance(two, range):
            # only a block's edge parts two pieces
            assert (one.stop, 0) == (two.start, two.start % BLOCK)


@pytest.mark.parametrize(
    ("piece", "known", "oldest", "expected"),
    [
        (range(257, 300), [], 0, range(256, 300)),
        (range(256 + ROUND_DOWN, 300), [], 0, range(256, 300)),
        (range(257 + ROUND_DOWN, 300), [], 0, range(257 + ROUND_DOWN, 300)),
        (range(256, 300), [], 0, range(256, 300)),
        (range(260, 300), [], 257, range(260, 300)),
        (range(260, 300), [], 256, range(256, 300)),
        (range(260, 300), [Span(200, 258, "a")], 0, range(260, 300)),
        (range(260, 300), [Span(200, 256, "a")], 0, range(256, 300)),
        (range(260, 300), [Span(300, 310, "a")], 0, range(256, 300)),
    ],
)
def test_a_first_piece_reaches_back_to_its_block_where_few_rows_are_missing_and_at_hand(
    piece, known, oldest, expected
):
    assert expected == rounded_down(piece, known, oldest=oldest)


def test_spans_that_hold_some_of_a_range_are_found():
    spans = [Span(0, 10, "a"), Span(10, 20, "b"), Span(30, 40, "c")]

    assert ["b"] == [span.blob for span in overlapping(spans, 10, 30)]
    assert ["a", "b", "c"] == [span.blob for span in overlapping(spans, 9, 31)]
    assert [] == overlapping(spans, 20, 30)
