"""Softmax attention over blocks of 256 columns, with products whose shapes never change.

    scores   [tile, block, kv_head, row, 256]   a row is one query of one head
    m        the largest score of a row: exact, in whatever order it is found
    z        sums of exp(score - m), a block's at once, then block after block
    out      sums of exp(score - m) * value, likewise

A library picks its kernel, and so its order of summation, by the shapes of a product. Here each
product is one tile of queries against one block of keys: its shape depends on the model alone, a
query's row in the tile on its own position, a key's column on the order. So a query's bits depend
on its own keys, however many others go with it. Sums over blocks are taken one after another, and
SPAN blocks are closed before the next begin; a block in which a query sees nothing adds zeros to
it, which changes no bit.

Zero times a value is zero only while the value is finite. Where an output is NaN it is made again
with this query alone, so that an infinite or NaN value reaches nobody who does not see it.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvplane.attention.columns import BLOCK, Block, Piece, blocks_of, load_keys, load_values

# blocks whose scores are held at once, on multiples of SPAN
SPAN = 32
# a tile has a multiple of this many rows a kv head: with other numbers the bits of a single kv
# head's product were seen to depend on how many threads shared it, with 1 and 2 on addresses
ROWS = 8
# a change of BLOCK, SPAN, ROWS or of the arithmetic is another table
TABLE = 2
# scores held at once: how many tiles go together, which no bit depends on
NUM_SCORES = 2**20
LEAST = torch.finfo(torch.float32).min


class Rule(NamedTuple):
    """What a call's queries see and how their scores are weighed."""

    first_key: int
    window: int | None
    scale: float
    softcap: float | None
    sinks: Tensor | None

    def oldest(self, position: int) -> int:
        """The oldest position that the query at `position` sees."""
        if self.window is None:
            return self.first_key
        return max(self.first_key, position - (self.window - 1))


class Tile(NamedTuple):
    """The call's queries at [first, stop), within one tile of the absolute grid."""

    first: int
    stop: int


class Sums(NamedTuple):
    """Over some blocks: m and z `[tiles, kv_heads, rows]`, out `[tiles, kv_heads, rows, dim]`."""

    m: Tensor
    z: Tensor
    out: Tensor


class Grid(NamedTuple):
    """How a model's queries are laid out in tiles.

    Args:
        num_kv_heads: as many matrices has a product.
        groups: query heads of a kv head.
        size: queries of a tile, which begins at multiples of it: a power of two, so that ROWS rows
            are filled as far as whole queries do. Few rows keep a single query cheap.
        rows: of a tile, for each kv head; those past `groups * size` are zeros.
    """

    num_kv_heads: int
    groups: int
    size: int
    rows: int

    @property
    def used(self) -> int:
        """Rows that queries stand in: head by head, each in the order of positions."""
        return self.groups * self.size


def grid_of(num_kv_heads: int, num_heads: int) -> Grid:
    """The grid of a layer with so many heads."""
    groups = num_heads // num_kv_heads
    size = 1
    while 2 * size * groups <= ROWS:
        size *= 2
    return Grid(num_kv_heads, groups, size, -(-groups * size // ROWS) * ROWS)


def attended(pieces: Sequence[Piece], query: Tensor, first: int, rule: Rule) -> Tensor:
    """Float32 `[tokens, heads, value_dim]` for one sequence's queries from position `first` on."""
    out = _attended(pieces, query, first, rule)
    if query.shape[0] > 1:
        for token in out.isnan().flatten(1).any(1).nonzero()[:, 0].tolist():
            alone = slice(token, token + 1)
            out[alone] = _attended(pieces, query[alone], first + token, rule)
    return out


def _attended(pieces: Sequence[Piece], query: Tensor, first: int, rule: Rule) -> Tensor:
    num_kv_heads, value_dim = pieces[0].value.shape[1:]
    num_tokens, num_heads, _ = query.shape
    grid = grid_of(num_kv_heads, num_heads)
    tiles = list(_tiles(first, num_tokens, grid.size))
    blocks = blocks_of(pieces, rule.oldest(first), first + num_tokens)
    scores_a_tile = min(SPAN, len(blocks)) * num_kv_heads * grid.rows * BLOCK
    together = max(1, NUM_SCORES // scores_a_tile)
    out = query.new_empty((num_tokens, num_heads, value_dim), dtype=torch.float32)
    for number in range(0, len(tiles), together):
        part = tiles[number : number + together]
        here = slice(part[0].first - first, part[-1].stop - first)
        place = part[0].first % grid.size
        rows = _tiled(query[here], place, len(part), grid).mul_(rule.scale)
        done = _by_token(_finished(_summed(blocks, part, rows, rule, grid), rule.sinks, grid), grid)
        out[here] = done[place : place + here.stop - here.start]
    return out


def _tiles(first: int, count: int, size: int) -> Iterator[Tile]:
    """Positions [first, first + count) cut at multiples of `size`."""
    stop = first + count
    while first < stop:
        end = min(stop, first - first % size + size)
        yield Tile(first, end)
        first = end


def _summed(
    blocks: dict[int, Block], tiles: Sequence[Tile], rows: Tensor, rule: Rule, grid: Grid
) -> Sums:
    """The sums of a few tiles over every block that one of their queries sees."""
    every = Tile(tiles[0].first, tiles[-1].stop)
    seen = [(number, block) for number, block in blocks.items() if _sees(every, block, rule)]
    spans = groupby(seen, key=lambda entry: entry[0] // SPAN)
    parts = (_span([block for _, block in span], tiles, rows, rule, grid) for _, span in spans)
    return reduce(_combined, parts)


def _span(
    blocks: Sequence[Block], tiles: Sequence[Tile], rows: Tensor, rule: Rule, grid: Grid
) -> Sums:
    """The sums over the blocks of one span, of float32 queries `[tiles, kv_heads, rows, dim]`."""
    num_tiles, num_kv_heads, num_rows, _ = rows.shape
    piece = blocks[0][0].piece
    products = [
        [tile for tile, part in enumerate(tiles) if _sees(part, block, rule)] for block in blocks
    ]
    scores = rows.new_empty((num_tiles, len(blocks), num_kv_heads, num_rows, BLOCK))
    keys = rows.new_empty((num_kv_heads, BLOCK, piece.key.shape[2]))
    turned = keys.transpose(1, 2)
    for number, block in enumerate(blocks):
        load_keys(block, keys)
        for tile in products[number]:
            # into given memory, which autocast leaves alone
            torch.bmm(rows[tile], turned, out=scores[tile, number])
    if rule.softcap is not None:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    for number, block in enumerate(blocks):
        if not _all_see_all(tiles, block, rule):
            _hide(scores[:, number], tiles, block, rule, grid)
    m = scores.amax(4).amax(1)
    # a row that sees nothing here: exp(-inf - LEAST) is 0, and its m stays -inf for `_combined`
    scores.sub_(m.clamp(min=LEAST)[:, None, :, :, None]).exp_()
    z, *others = scores.sum(4).unbind(1)
    for other in others:
        z = z + other
    out = _aligned(num_tiles, (num_kv_heads, num_rows, piece.value.shape[2]), rows).zero_()
    values = rows.new_empty((num_kv_heads, BLOCK, piece.value.shape[2]))
    for number, block in enumerate(blocks):
        load_values(block, values)
        for tile in products[number]:
            out[tile].baddbmm_(scores[tile, number], values)
    return Sums(m, z, out)


def _sees(tile: Tile, block: Block, rule: Rule) -> bool:
    oldest = rule.oldest(tile.first)
    return any(part.first < tile.stop and oldest < part.stop for part in block)


def _all_see_all(tiles: Sequence[Tile], block: Block, rule: Rule) -> bool:
    first, stop = block[0].first, block[0].stop
    newest, last = tiles[0].first, tiles[-1].stop - 1
    return block[0].whole and stop <= newest + 1 and rule.oldest(last) <= first


def _hide(scores: Tensor, tiles: Sequence[Tile], block: Block, rule: Rule, grid: Grid) -> None:
    """Write -inf over those of a block's scores `[tiles, kv_heads, rows, 256]` that are unseen."""
    device = scores.device
    positions = torch.full((BLOCK,), -1, dtype=torch.int64, device=device)
    for part in block:
        positions[part.columns] = torch.arange(part.first, part.stop, device=device)
    base = tiles[0].first - tiles[0].first % grid.size
    queries = torch.arange(base, base + len(tiles) * grid.size, device=device)[:, None]
    unseen = (positions > queries) | (positions < rule.first_key)
    if rule.window is not None:
        unseen |= positions <= queries - rule.window
    unseen = unseen.view(len(tiles), 1, 1, grid.size, BLOCK)
    shape = (len(tiles), grid.num_kv_heads, grid.groups, grid.size, BLOCK)
    scores[:, :, : grid.used].view(shape).masked_fill_(unseen, float("-inf"))


def _combined(one: Sums, other: Sums) -> Sums:
    """The sums over both; a query sees something in one of them."""
    m = torch.maximum(one.m, other.m)
    a, b = torch.exp(one.m - m), torch.exp(other.m - m)
    out = one.out * a[..., None] + other.out * b[..., None]
    return Sums(m, one.z * a + other.z * b, out)


def _finished(sums: Sums, sinks: Tensor | None, grid: Grid) -> Tensor:
    m, z, out = (part[:, :, : grid.used] for part in sums)
    if sinks is not None:
        each = sinks.float().view(grid.num_kv_heads, -1).repeat_interleave(grid.size, dim=1)
        largest = torch.maximum(m, each)
        share = torch.exp(m - largest)
        z = z * share + torch.exp(each - largest)
        out = out * share[..., None]
    # the sign of a zero would tell how many blocks were added
    return out.div(z[..., None]).add_(0.0)


def _aligned(count: int, shape: tuple[int, int, int], like: Tensor) -> Tensor:
    """Uninitialised float32 `[count, *shape]`, each of the `count` at a multiple of 64 bytes."""
    numel = shape[0] * shape[1] * shape[2]
    flat = like.new_empty((count, -(-numel // 16) * 16), dtype=torch.float32)
    return flat[:, :numel].view(count, *shape)


def _tiled(query: Tensor, place: int, num_tiles: int, grid: Grid) -> Tensor:
    """Queries as float32 `[tiles, kv_heads, rows, dim]`, zeros around; the first at `place`."""
    num_tokens, num_heads, dim = query.shape
    num_places = num_tiles * grid.size
    rows = _aligned(num_tiles, (grid.num_kv_heads, grid.rows, dim), query).zero_()
    if num_tokens < num_places:
        queries = query
        query = queries.new_zeros((num_places, num_heads, dim))
        query[place : place + num_tokens] = queries
    shape = (num_tiles, grid.num_kv_heads, grid.groups, grid.size, dim)
    by_token = rows[:, :, : grid.used].view(shape).permute(0, 3, 1, 2, 4)
    by_token.copy_(query.reshape(by_token.shape))
    return rows


def _by_token(rows: Tensor, grid: Grid) -> Tensor:
    """The way back: `[tiles, kv_heads, used, dim]` as `[places, heads, dim]`."""
    shape = (rows.shape[0], grid.num_kv_heads, grid.groups, grid.size, rows.shape[3])
    by_query = rows.reshape(shape).permute(0, 3, 1, 2, 4)
    return by_query.reshape(rows.shape[0] * grid.size, -1, rows.shape[3])
