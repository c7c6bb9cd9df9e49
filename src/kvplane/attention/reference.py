"""Attention in float64, one query at a time: what the others are compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvplane.kernels.vectorized import RowPlane

TABLE = 1


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
    """Softmax attention, [batch, tokens, heads, value_dim], in the query's dtype.

    Args:
        plane: rows.
        runs: rows of positions from `first_key` on, in logical order.
        query: [batch, tokens, heads, head_dim], of positions from `first_query` on.
        key: [batch, tokens, kv_heads, head_dim] of the positions after the runs', or None.
        value: [batch, tokens, kv_heads, value_dim], likewise.
        first_key: position of the first row.
        first_query: position of the first query.
        window: keys a query sees, its own included; None: all.
        scale: factor on the scores.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: [heads], a logit that joins the softmax and reads no value.
    """
    keys = [plane.key[:, run.start : run.stop] for run in runs]
    values = [plane.value[:, run.start : run.stop] for run in runs]
    if key is not None and value is not None:
        keys.append(key)
        values.append(value)
    all_keys, all_values = torch.cat(keys, dim=1).double(), torch.cat(values, dim=1).double()
    batch, tokens, heads, _ = query.shape
    groups = heads // all_keys.shape[2]
    out = query.new_zeros((batch, tokens, heads, all_values.shape[-1]), dtype=torch.float64)
    for token in range(tokens):
        position = first_query + token
        oldest = first_key if window is None else max(first_key, position - (window - 1))
        seen = slice(oldest - first_key, position - first_key + 1)
        for head in range(heads):
            rows = all_keys[:, seen, head // groups]
            scores = (rows @ query[:, token, head].double()[:, :, None])[..., 0] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                sink = sinks[head].double().expand(batch, 1)
                scores = torch.cat([scores, sink], dim=1)
            weights = torch.softmax(scores, dim=1)[:, None, : rows.shape[1]]
            out[:, token, head] = (weights @ all_values[:, seen, head // groups])[:, 0]
    return out.to(query.dtype)
