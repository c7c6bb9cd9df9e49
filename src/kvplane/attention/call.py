"""One call of attention, whatever the order: checked, then one sequence after another."""

import torch
from torch import Tensor

from kvplane.attention.blocks import Rule, attended
from kvplane.attention.checks import check_precision
from kvplane.attention.columns import Order, pieces_of
from kvplane.kernels.checks import RowPlane


def attend_in(
    order: Order,
    plane: RowPlane,
    query: Tensor,
    chunk: tuple[Tensor, Tensor] | None,
    *,
    first: int,
    rule: Rule,
) -> Tensor:
    """`[batch, tokens, heads, value_dim]` in the query's dtype, over keys in an order.

    No gradient is kept.

    Raises:
        ArgumentError: float32 products are set to be computed in fewer digits.
    """
    check_precision(query.device)
    batch, num_tokens, num_heads, _ = query.shape
    out = query.new_empty((batch, num_tokens, num_heads, plane.value.shape[3]))
    with torch.no_grad():
        # in turn: a neighbour can change no shape
        for sequence in range(batch if num_tokens else 0):
            pieces = pieces_of(plane, order, chunk, sequence)
            out[sequence] = attended(pieces, query[sequence], first, rule)
    return out
