"""Which rows of a cut go where in an engine's paged memory; integers only.

    positions      0 ........ local ............ position
    full           held by the engine | loaded
    sliding        dead blocks | window, but what the engine holds

A sliding group needs `window - 1` rows before the cut, which touch at most
ceil((window - 1) / block) + 1 blocks. The engine's blocks need not divide a pack's 256 positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvplane.errors import ArgumentError
from kvplane.pack.limits import BLOCK
from kvplane.pack.policy import EVERY_LEAST, EVERY_WINDOWS

DEAD = 0


class Part(NamedTuple):
    """Rows of one paged block: slots [offset, offset + num_rows) hold positions from `first` on."""

    block: int
    offset: int
    first: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedGroup:
    """One of the engine's groups of layers, which share a table of blocks.

    Args:
        layers: of the model, by index.
        block_size: tokens in a block.
        sliding_window: keys a query sees, its own included; None for full layers.
    """

    layers: tuple[int, ...]
    block_size: int
    sliding_window: int | None

    def first_needed(self, position: int) -> int:
        """The oldest row that the token at `position` reads."""
        if self.sliding_window is None:
            return 0
        return max(0, position - (self.sliding_window - 1))

    def num_blocks(self, position: int) -> int:
        """Live blocks at a position."""
        if position == 0:
            return 0
        return (
            (position - 1) // self.block_size - self.first_needed(position) // self.block_size + 1
        )


def parts(table: Sequence[int], block_size: int, first: int, stop: int) -> Iterator[Part]:
    """Positions [first, stop) block by block.

    Args:
        table: block ids, by position // block_size.
        block_size: tokens in a block.
        first: position.
        stop: position.

    Raises:
        ArgumentError: a position has no block, or a dead one.
    """
    while first < stop:
        index, offset = divmod(first, block_size)
        if index >= len(table) or table[index] == DEAD:
            expected = f"a live block for position {first}"
            raise ArgumentError(argument="table", expected=expected, got=list(table[index:])[:1])
        count = min(block_size - offset, stop - first)
        yield Part(table[index], offset, first, count)
        first += count


def half_filled(group: PagedGroup, table: Sequence[int], local: int, position: int) -> int | None:
    """The block whose oldest rows a load leaves out, which nobody else may then find by prefix.

    Args:
        group: whose table.
        table: block ids.
        local: positions below are the engine's own.
        position: of the cut.
    """
    first = group.first_needed(position)
    if first <= local or first % group.block_size == 0:
        return None
    return table[first // group.block_size]


def wished_cuts(
    num_tokens: int, windows: Sequence[int | None], block_sizes: Sequence[int], *, step: int | None
) -> list[int]:
    """Where cuts of a prompt are taken: its end, the edges before its last token, and on the way.

    Args:
        num_tokens: of the prompt.
        windows: of the groups.
        block_sizes: the engine's, of its groups.
        step: tokens between cuts on the way; None: max(2048, 4 x largest window); 0: none.
    """
    if step is None:
        largest = max((window or 0 for window in windows), default=0)
        step = -(-max(EVERY_LEAST, EVERY_WINDOWS * largest) // BLOCK) * BLOCK
    wished = {num_tokens}
    for edge in {BLOCK, *block_sizes}:
        wished.add((num_tokens - 1) // edge * edge)
    if step:
        wished |= set(range(step, num_tokens, step))
    return sorted(cut for cut in wished if cut > 0)


def local_heads(num_kv_heads: int, rank: int, size: int) -> range:
    """The heads that one of several tensor-parallel workers holds.

    Raises:
        ArgumentError: heads and workers are no multiples of each other.
    """
    if num_kv_heads % size == 0:
        each = num_kv_heads // size
        return range(rank * each, (rank + 1) * each)
    if size % num_kv_heads == 0:
        head = rank // (size // num_kv_heads)
        return range(head, head + 1)
    expected = f"a divisor or multiple of {num_kv_heads} key-value heads"
    raise ArgumentError(argument="tensor_parallel_size", expected=expected, got=size)


def gathered_heads(num_kv_heads: int, size: int) -> list[int]:
    """Which of all workers' heads, one worker after another, are the model's, in order."""
    each = max(1, num_kv_heads // size)
    found: dict[int, int] = {}
    for rank in range(size):
        for number, head in enumerate(local_heads(num_kv_heads, rank, size)):
            found.setdefault(head, rank * each + number)
    return [found[head] for head in range(num_kv_heads)]
