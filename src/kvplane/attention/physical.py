"""Rows in buffer order, as the chapter's engine scans them (its section 15.6).

The same rows at another rotation are summed in another order, so that bits are equal at one
rotation only: it is why a restore keeps the rotation. A step's own chunk comes after the rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvplane.attention.partials import Partial, Rule, by_head, by_token, combine, finish, partial
from kvplane.kernels.vectorized import RowPlane

BLOCK = 256
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
    """As `reference.attend`, in float32, rows in buffer order."""
    positions: list[tuple[int, int]] = []
    position = first_key
    for run in runs:
        for row in run:
            positions.append((row, position))
            position += 1
    positions.sort()
    rows = torch.tensor([row for row, _ in positions], dtype=torch.int64, device=query.device)
    at = [held for _, held in positions]
    count = 0 if key is None else key.shape[1]
    at += range(position, position + count)
    outs = []
    for sequence in range(query.shape[0]):
        keys = plane.key[sequence].index_select(0, rows)
        values = plane.value[sequence].index_select(0, rows)
        if key is not None and value is not None:
            keys = torch.cat([keys, key[sequence]])
            values = torch.cat([values, value[sequence]])
        places = torch.tensor(at, device=query.device)
        tokens = [
            _token(
                query[sequence, token],
                keys,
                values,
                _seen(places, first_query + token, window),
                Rule(scale, softcap),
                sinks,
            )
            for token in range(query.shape[1])
        ]
        outs.append(torch.stack(tokens))
    return torch.stack(outs).to(query.dtype)


def _seen(places: Tensor, position: int, window: int | None) -> Tensor:
    seen = places <= position
    return seen if window is None else seen & (places > position - window)


def _token(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    rule: Rule,
    sinks: Tensor | None,
) -> Tensor:
    num_kv_heads = keys.shape[1]
    rows = by_head(query[None].float(), num_kv_heads)
    groups = rows.shape[1]
    sums: Partial | None = None
    for first in range(0, keys.shape[0], BLOCK):
        piece = slice(first, first + BLOCK)
        visible = seen[piece]
        if not visible.any():
            continue
        key = keys[piece].transpose(0, 1).float().masked_fill(~visible[None, :, None], 0)
        value = values[piece].transpose(0, 1).float().masked_fill(~visible[None, :, None], 0)
        mask = visible[None].expand(groups, -1)
        sums = combine(sums, partial(rows, key, value, mask, rule))
    sink = None if sinks is None else sinks.float().reshape(num_kv_heads, groups, 1)
    return by_token(finish(sums, sink), 1)[0]  # type: ignore[arg-type] # its own key is visible
