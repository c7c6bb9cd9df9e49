"""Rows in buffer order, as the chapter's engine scans them (its section 15.6).

    ring of 8, origin at row 3      row        0  1  2  3  4  5  6  7
                                    position   9 10 11  4  5  6  7  8
                                    summed as  9 10 11  4  5  6  7  8, then a chunk not stored yet

The same rows at another rotation are summed in another order, so that bits are equal at one
rotation only: it is why a restore keeps the rotation.
"""

from collections.abc import Sequence

from torch import Tensor

from kvplane.attention.blocks import TABLE, Rule
from kvplane.attention.call import attend_in
from kvplane.attention.checks import check_positions, check_rule, checked_chunk
from kvplane.attention.columns import BLOCK, Order, Place
from kvplane.kernels.checks import RowPlane

__all__ = ["TABLE", "attend"]


def attend(
    plane: RowPlane,
    runs: Sequence[range],
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    first_key: int,
    first_query: int,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.attend`, in float32, rows in buffer order and then the chunk.

    Raises:
        ArgumentError, TensorMismatch: as `blocked.attend`.
    """
    chunk = checked_chunk(key, value)
    num_tokens, num_heads = query.shape[1:3]
    check_positions(
        runs, chunk, first_key=first_key, first_query=first_query, num_tokens=num_tokens
    )
    check_rule(num_heads, window=window, scale=scale, softcap=softcap, sinks=sinks)
    rule = Rule(first_key, window, scale, softcap, sinks)
    order = _order(_folded(plane, runs), first_key)
    return attend_in(order, plane, query, chunk, first=first_query, rule=rule)


def _order(runs: Sequence[range], first_key: int) -> Order:
    """A row's column is the row; a chunk begins with the block after the last row."""
    places = []
    position = first_key
    stop = 0
    for run in runs:
        places.append(Place(run, run.start, position))
        position += len(run)
        stop = max(stop, run.stop)
    return Order(places, -(-stop // BLOCK) * BLOCK, position)


def _folded(plane: RowPlane, runs: Sequence[range]) -> list[range]:
    """The runs with rows that memory shows a second time, past the end, by their first number."""
    if not getattr(plane, "unrolled", False):
        return list(runs)
    capacity = plane.key.shape[1] // 2
    folded = []
    for run in runs:
        folded.append(range(run.start, min(run.stop, capacity)))
        if run.stop > capacity:
            folded.append(range(run.stop - capacity))
    return folded
