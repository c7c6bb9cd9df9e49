"""The order whose bits do not depend on history: blocks of absolute positions.

    positions   | 0 ... 255 | 256 ... 511 | 512 ... 767 |      blocks, edges at multiples of 256
    query 600         seen: [ 89 ........................ 600 ]   window 512
    sums          b0 over 89..255, then b1, then b2 over 512..600, combined in this order

Which keys a query sums together, and in which order, depends on its own position and window only:
not on the rotation of a ring, the layout, how tokens were cut into steps, or the neighbours in a
batch. Queries go through in tiles of 8 on multiples of 8, missing ones as zeros, so that every
matrix product has the same shape whatever the step (see `partials`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvplane.attention.partials import Partial, Rule, by_head, by_token, combine, finish, partial
from kvplane.errors import ArgumentError
from kvplane.kernels.vectorized import RowPlane

BLOCK = 256
TILE = 8
# a change of BLOCK, TILE or the arithmetic is another table
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
    """As `reference.attend`, in float32 and in blocks.

    Raises:
        ArgumentError: a query has no key of its own position.
    """
    held = sum(len(run) for run in runs) + (0 if key is None else key.shape[1])
    num_tokens = query.shape[1]
    if not first_key <= first_query or first_key + held < first_query + num_tokens:
        raise ArgumentError(
            argument="first_query",
            expected=f"queries within [{first_key}, {first_key + held})",
            got=(first_query, first_query + num_tokens),
        )
    # one sequence after another: a neighbour can change no shape
    outs = [
        _sequence(
            _Rows(plane, runs, key, value, first_key, sequence),
            query[sequence],
            first_query=first_query,
            window=window,
            rule=Rule(scale, softcap),
            sinks=sinks,
        )
        for sequence in range(query.shape[0])
    ]
    return torch.stack(outs)


class _Rows:
    """One sequence's keys and values by position."""

    def __init__(
        self,
        plane: RowPlane,
        runs: Sequence[range],
        key: Tensor | None,
        value: Tensor | None,
        first_key: int,
        sequence: int,
    ) -> None:
        self.first = first_key
        self.num_kv_heads = plane.key.shape[2]
        self._pieces: list[tuple[int, Tensor, Tensor]] = []
        first = first_key
        for run in runs:
            rows = slice(run.start, run.stop)
            self._pieces.append((first, plane.key[sequence, rows], plane.value[sequence, rows]))
            first += len(run)
        if key is not None and value is not None:
            self._pieces.append((first, key[sequence], value[sequence]))

    def block(self, block: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Float32 [kv_heads, 256, dim] of one block; zeros outside positions [first, stop)."""
        _, key, value = self._pieces[0]
        keys = key.new_zeros((self.num_kv_heads, BLOCK, key.shape[-1]), dtype=torch.float32)
        values = value.new_zeros((self.num_kv_heads, BLOCK, value.shape[-1]), dtype=torch.float32)
        base = block * BLOCK
        for begin, key, value in self._pieces:
            low = max(first, base, begin)
            high = min(stop, base + BLOCK, begin + key.shape[0])
            if low < high:
                there, here = slice(low - begin, high - begin), slice(low - base, high - base)
                keys[:, here] = key[there].transpose(0, 1)
                values[:, here] = value[there].transpose(0, 1)
        return keys, values


def _sequence(
    rows: _Rows,
    query: Tensor,
    *,
    first_query: int,
    window: int | None,
    rule: Rule,
    sinks: Tensor | None,
) -> Tensor:
    tiles = list(_tiles(first_query, query.shape[0]))
    oldest = [_oldest(rows.first, first, window) for first, _ in tiles]
    sums: list[Partial | None] = [None] * len(tiles)
    padded = [by_head(_padded(query, first_query, *tile), rows.num_kv_heads) for tile in tiles]
    groups = query.shape[1] // rows.num_kv_heads
    stop = first_query + query.shape[0]
    for block in range(oldest[0] // BLOCK, (stop - 1) // BLOCK + 1):
        shared: tuple[int, int] | None = None
        for number, (first, end) in enumerate(tiles):
            if block not in range(oldest[number] // BLOCK, (end - 1) // BLOCK + 1):
                continue
            # only what a real query of the tile sees is read: rows beyond may hold anything
            bounds = (
                max(oldest[number], block * BLOCK),
                min(end, (block + 1) * BLOCK),
            )
            if bounds != shared:
                keys, values = rows.block(block, *bounds)
                shared = bounds
            seen = _seen(block, first, rows.first, window, query.device).repeat(groups, 1)
            part = partial(padded[number], keys, values, seen, rule)
            sums[number] = combine(sums[number], part)
    outs = []
    for (first, end), total in zip(tiles, sums, strict=True):
        if total is None:
            continue
        sink = None
        if sinks is not None:
            each = sinks.float().reshape(rows.num_kv_heads, groups, 1)
            sink = each.expand(-1, -1, TILE).reshape(rows.num_kv_heads, -1, 1)
        out = by_token(finish(total, sink), TILE)
        base = first - first % TILE
        outs.append(out[first - base : end - base])
    return torch.cat(outs).to(query.dtype)


def _tiles(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Positions [first, first + count) cut at multiples of TILE."""
    stop = first + count
    while first < stop:
        end = min(stop, first - first % TILE + TILE)
        yield first, end
        first = end


def _oldest(first_key: int, position: int, window: int | None) -> int:
    return first_key if window is None else max(first_key, position - (window - 1))


def _padded(query: Tensor, first_query: int, first: int, end: int) -> Tensor:
    """A tile's queries in their places among TILE, zeros elsewhere; float32."""
    tile = query.new_zeros((TILE, *query.shape[1:]), dtype=torch.float32)
    place = first % TILE
    tile[place : place + end - first] = query[first - first_query : end - first_query]
    return tile


def _seen(
    block: int, first: int, first_key: int, window: int | None, device: torch.device
) -> Tensor:
    """[TILE, BLOCK]: which of a block's positions each query of a tile sees."""
    queries = torch.arange(TILE, device=device)[:, None] + (first - first % TILE)
    keys = torch.arange(BLOCK, device=device)[None] + block * BLOCK
    seen = (keys <= queries) & (keys >= first_key)
    return seen if window is None else seen & (keys > queries - window)
