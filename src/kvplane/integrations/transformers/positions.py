"""Continuity of position ids: each sequence's next token follows its last.

transformers' models hand their position ids to each cache layer. They count a sequence's own
tokens; left padding holds rows and repeats an id, 0 (or 1 in older callers). So what is followed
here is the last id of each sequence, not a row.
"""

from collections.abc import Sequence

from torch import Tensor

from kvplane.errors import CacheDiscontinuity

# what padding is numbered
FILLS = (0, 1)
NOTHING = -1

# the ids that a sequence's last token may have had: two while all that was seen may be padding
Last = tuple[int, ...]


def start(position: int, num_sequences: int) -> list[Last]:
    """The state of sequences that hold `position` tokens each."""
    return [(position - 1,)] * num_sequences


def rewound(last: Sequence[Last] | None, num_tokens: int) -> list[Last] | None:
    """The state `num_tokens` earlier."""
    if last is None:
        return None
    return [tuple(max(NOTHING, each - num_tokens) for each in sequence) for sequence in last]


def followed(
    last: Sequence[Last] | None, position_ids: Tensor | None, num_tokens: int, *, padding: bool
) -> list[Last] | None:
    """The state after a call with these ids.

    Args:
        last: the state before it; None when that is not known.
        position_ids: `[1 or batch, tokens]`. Other shapes (three axes: M-RoPE) say nothing.
        num_tokens: tokens of the call.
        padding: whether padding may begin here.

    Returns:
        None when it is not known.

    Raises:
        CacheDiscontinuity: a position was skipped or replayed.
    """
    known = position_ids is not None and position_ids.ndim == 2  # noqa: PLR2004 - batch, tokens
    if last is None or position_ids is None or not known or position_ids.shape[1] != num_tokens:
        return None
    rows = position_ids.expand(len(last), -1) if len(position_ids) == 1 else position_ids
    if len(rows) != len(last):
        return None
    if num_tokens == 1:
        return [
            _after(before, row, padding=padding)
            for before, row in zip(last, rows.tolist(), strict=True)
        ]
    ends = rows[:, [0, -1]].tolist()
    steady = (rows[:, 1:] - rows[:, :-1] == 1).all(dim=1).tolist()
    after: list[Last] = []
    for number, before in enumerate(last):
        first, end = ends[number]
        if steady[number] and first - 1 in before:
            after.append((end,))
        else:
            after.append(_after(before, rows[number].tolist(), padding=padding))
    return after


def _after(before: Last, row: Sequence[int], *, padding: bool) -> Last:
    """The ids that the last token of a call may have; refuse a call that no reading explains."""
    run = next((place for place, each in enumerate(row) if each != row[0]), len(row))
    found = set()
    for last in before:
        heads = [0]
        # one sequence by itself is padded only where its text begins
        if row[0] in FILLS and (padding or (last == NOTHING and len(row) > 1)):
            # the first real token may have the padding's number
            heads += [run - 1, run]
        for head in heads:
            tail = row[head:]
            if list(tail) == list(range(last + 1, last + 1 + len(tail))):
                found.add(last + len(tail))
    if not found:
        for place, got in enumerate(row):
            expected = before[-1] + 1 + place
            if got != expected:
                raise CacheDiscontinuity(expected=expected, got=got)
    return tuple(sorted(found))
