"""The order whose bits do not depend on history: blocks of absolute positions.

    positions   | 0 ... 255 | 256 ... 511 | 512 ... 767 |      blocks, edges at multiples of 256
    query 600         seen: [ 89 ........................ 600 ]   window 512
    sums          over 89..255, then 256..511, then 512..600

Which keys a query sums together, and in which order, depends on its own position and window only:
not on the rotation of a ring, the layout, how tokens were cut into steps, or the neighbours in a
batch. The arithmetic is in `blocks`; what else bits depend on, and what was measured, is in
docs/exactness.md.
"""

from collections.abc import Sequence

from torch import Tensor

from kvplane.attention.blocks import TABLE, Rule
from kvplane.attention.call import attend_in
from kvplane.attention.checks import check_positions, check_rule, checked_chunk
from kvplane.attention.columns import Order, Place
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
    """As `reference.attend`, in float32 and in blocks of absolute positions.

    Raises:
        ArgumentError, TensorMismatch: as there; also while float32 products are set to be computed
            in fewer digits (`torch.set_float32_matmul_precision`).
    """
    chunk = checked_chunk(key, value)
    num_tokens, num_heads = query.shape[1:3]
    check_positions(
        runs, chunk, first_key=first_key, first_query=first_query, num_tokens=num_tokens
    )
    check_rule(num_heads, window=window, scale=scale, softcap=softcap, sinks=sinks)
    rule = Rule(first_key, window, scale, softcap, sinks)
    return attend_in(_order(runs, first_key), plane, query, chunk, first=first_query, rule=rule)


def _order(runs: Sequence[range], first_key: int) -> Order:
    """A position's column is the position."""
    places = []
    position = first_key
    for run in runs:
        places.append(Place(run, position, position))
        position += len(run)
    return Order(places, position, position)
