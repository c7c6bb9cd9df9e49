"""Continuity of position ids, padding included, against what a mask says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.errors import CacheDiscontinuity
from kvplane.integrations.transformers import positions


def followed(last, rows, *, padding=False):
    ids = torch.tensor(rows)
    return positions.followed(last, ids, ids.shape[-1], padding=padding)


def test_a_sequence_follows_its_last_position():
    assert [(0,)] == followed(positions.start(0, 1), [[0]])
    assert [(4,)] == followed(positions.start(0, 1), [[0, 1, 2, 3, 4]])
    assert [(12,)] == followed([(11,)], [[12]])
    assert [(14,)] == followed([(11,)], [[12, 13, 14]])


@pytest.mark.parametrize(
    ("row", "expected", "got"),
    [
        ([11], 12, 11),
        ([13], 12, 13),
        ([0], 12, 0),
        ([13, 14], 12, 13),
        ([11, 12, 13], 12, 11),
        ([12, 13, 15], 14, 15),
        ([12, 12, 13], 13, 12),
        ([0, 0, 12], 12, 0),
        ([0, 1, 2, 3], 12, 0),
    ],
)
def test_a_skipped_or_replayed_position_is_named(row, expected, got):
    with pytest.raises(CacheDiscontinuity) as refusal:
        followed([(11,)], [row])

    assert (expected, got) == (refusal.value.expected, refusal.value.got)


def test_one_sequence_of_a_batch_that_does_not_follow_is_enough():
    assert [(12,), (5,)] == followed([(11,), (4,)], [[12], [5]], padding=True)
    for rows in ([[12], [6]], [[11], [5]], [[12, 13], [6, 7]]):
        with pytest.raises(CacheDiscontinuity):
            followed([(11,), (4,)], rows, padding=True)


def test_padding_on_the_left_is_numbered_0_or_1():
    begin = positions.start(0, 3)

    assert [(4,), (2,), (0,)] == followed(
        begin, [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2], [1, 1, 1, 1, 0]], padding=True
    )


def test_padding_that_fills_a_whole_chunk_may_be_a_first_token_or_none():
    state = followed(positions.start(0, 2), [[0, 1, 2], [0, 0, 0]], padding=True)

    assert [(2,), (-1, 0)] == state
    assert [(5,), (2,)] == followed(state, [[3, 4, 5], [0, 1, 2]], padding=True)
    assert [(5,), (3,)] == followed(state, [[3, 4, 5], [1, 2, 3]], padding=True)
    assert [(5,), (-1, 0)] == followed(state, [[3, 4, 5], [0, 0, 0]], padding=True)
    with pytest.raises(CacheDiscontinuity):
        followed(state, [[3, 4, 5], [2, 3, 4]], padding=True)


def test_padding_of_a_later_turn_is_followed_in_a_batch():
    assert [(13,), (6,)] == followed([(11,), (3,)], [[0, 12, 13], [4, 5, 6]], padding=True)


def test_positions_that_say_nothing_are_not_known_afterwards():
    begin = positions.start(3, 1)

    assert positions.followed(begin, None, 1, padding=False) is None
    assert positions.followed(begin, torch.zeros(3, 1, 1), 1, padding=False) is None
    assert positions.followed(begin, torch.tensor([[1, 2, 3, 4]]), 2, padding=False) is None
    assert positions.followed(positions.start(3, 2), torch.zeros(3, 1), 1, padding=True) is None
    assert positions.followed(None, torch.tensor([[8]]), 1, padding=False) is None


def test_one_row_of_positions_serves_a_whole_batch():
    assert [(5,), (5,)] == followed(positions.start(4, 2), [[4, 5]], padding=True)


def test_going_back_takes_positions_back():
    assert [(8,), (0,), (-1,)] == positions.rewound([(11,), (3,), (1,)], 3)
    assert positions.rewound(None, 3) is None


def numbered(mask):
    """Position ids as transformers makes them of a mask."""
    ids = mask.long().cumsum(-1) - 1
    return ids.masked_fill(mask == 0, 0)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_left_padded_batch_in_any_chunks_is_followed_to_its_end(data):
    batch = data.draw(st.integers(2, 4))
    length = data.draw(st.integers(1, 12))
    pads = [data.draw(st.integers(0, length - 1)) for _ in range(batch)]
    mask = torch.tensor([[0] * pad + [1] * (length - pad) for pad in pads])
    ids = numbered(torch.nn.functional.pad(mask, (0, 3), value=1))
    state = positions.start(0, batch)
    first = 0
    while first < ids.shape[1]:
        count = data.draw(st.integers(1, ids.shape[1] - first))
        part = ids[:, first : first + count]
        state = positions.followed(state, part, count, padding=True)
        first += count

    assert [(length + 2 - pad,) for pad in pads] == state


@settings(max_examples=300, deadline=None)
@given(
    held=st.integers(3, 50),
    count=st.integers(1, 8),
    shift=st.integers(-60, 60).filter(bool),
)
def test_any_shift_of_a_call_is_refused(held, count, shift):
    row = [max(0, held + shift + place) for place in range(count)]
    with pytest.raises(CacheDiscontinuity):
        followed(positions.start(held, 1), [row])


@settings(max_examples=100, deadline=None)
@given(pad=st.integers(0, 9), real=st.integers(1, 9))
def test_one_padded_sequence_is_followed_from_its_first_call(pad, real):
    ids = numbered(torch.tensor([[0] * pad + [1] * real]))
    state = positions.followed(positions.start(0, 1), ids, pad + real, padding=False)

    assert real - 1 in state[0]
    assert [(real,)] == followed(state, [[real]])
