"""Attention in float64, one query and one head at a time: what the others are compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvplane.attention.checks import check_positions, check_rule, checked_chunk
from kvplane.kernels.checks import RowPlane


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
    """Softmax attention, `[batch, tokens, heads, value_dim]`, in the query's dtype.

    Args:
        plane: rows.
        runs: rows of the positions from `first_key` on, in logical order.
        query: `[batch, tokens, heads, head_dim]`, of the positions from `first_query` on.
        key: `[batch, tokens, kv_heads, head_dim]` of the positions after the runs', in the
            plane's dtype; None when they are stored.
        value: `[batch, tokens, kv_heads, value_dim]`, likewise.
        first_key: position of the first row.
        first_query: position of the first query.
        window: keys a query sees, its own included; None: all.
        scale: factor on the scores.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: `[heads]`, a logit that joins the softmax and reads no value.

    Raises:
        ArgumentError: a query has no key of its own position; a window, scale or softcap that no
            attention has; a key without a value.
        TensorMismatch: sinks that are not one a head.
    """
    chunk = checked_chunk(key, value)
    num_tokens, num_heads = query.shape[1:3]
    check_positions(
        runs, chunk, first_key=first_key, first_query=first_query, num_tokens=num_tokens
    )
    check_rule(num_heads, window=window, scale=scale, softcap=softcap, sinks=sinks)
    rows = [row for run in runs for row in run]
    keys, values = plane.key[:, rows].double(), plane.value[:, rows].double()
    if chunk is not None:
        keys = torch.cat([keys, chunk[0].double()], dim=1)
        values = torch.cat([values, chunk[1].double()], dim=1)
    groups = num_heads // keys.shape[2]
    out = query.new_zeros((*query.shape[:3], values.shape[3]), dtype=torch.float64)
    for sequence in range(query.shape[0]):
        for token in range(num_tokens):
            position = first_query + token
            oldest = first_key if window is None else max(first_key, position - (window - 1))
            seen = slice(oldest - first_key, position - first_key + 1)
            for head in range(num_heads):
                out[sequence, token, head] = _head(
                    query[sequence, token, head].double(),
                    keys[sequence, seen, head // groups],
                    values[sequence, seen, head // groups],
                    scale,
                    softcap,
                    None if sinks is None else sinks[head].double(),
                )
    return out.to(query.dtype)


def _head(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    scores = keys @ query * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sink is not None:
        scores = torch.cat([scores, sink[None]])
    weights = torch.softmax(scores, dim=0)
    return weights[: len(values)] @ values
