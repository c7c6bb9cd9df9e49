"""Keys as columns: a column is a key's place in the order of summation.

    column      0 ............ 255 | 256 .......... 511 | 512 ...          blocks of 256
    blocked     a position's column is the position
    physical    a row's column is the row; a chunk that is not stored yet comes after the rows

Products see one block at a time, as float32 with zeros where no query of the call sees a key, so
that what lies there, NaN for all we know, is never read.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvplane.kernels.checks import RowPlane

BLOCK = 256


class Place(NamedTuple):
    """Where the rows of one run stand in an order."""

    rows: range
    column: int
    position: int


class Order(NamedTuple):
    """Where every key of a call stands: the runs', then the chunk's, which follow in position."""

    places: Sequence[Place]
    chunk_column: int
    chunk_position: int


class Piece(NamedTuple):
    """Keys at consecutive columns and consecutive positions: views `[rows, kv_heads, dim]`."""

    column: int
    position: int
    key: Tensor
    value: Tensor


class Segment(NamedTuple):
    """The part of a piece that lies in one block: positions [first, stop)."""

    piece: Piece
    columns: slice
    rows: slice
    first: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether it fills the block."""
        return self.stop - self.first == BLOCK


Block = Sequence[Segment]


def pieces_of(
    plane: RowPlane, order: Order, chunk: tuple[Tensor, Tensor] | None, sequence: int
) -> list[Piece]:
    """One sequence's keys and values, in an order; `chunk` is what is not stored yet."""
    pieces = []
    for run, column, position in order.places:
        rows = slice(run.start, run.stop)
        key, value = plane.key[sequence, rows], plane.value[sequence, rows]
        pieces.append(Piece(column, position, key, value))
    if chunk is not None:
        key, value = chunk[0][sequence], chunk[1][sequence]
        pieces.append(Piece(order.chunk_column, order.chunk_position, key, value))
    return pieces


def blocks_of(pieces: Sequence[Piece], first: int, stop: int) -> dict[int, Block]:
    """The blocks that hold positions [first, stop), in their order, with what lies in each."""
    blocks: dict[int, list[Segment]] = {}
    for piece in pieces:
        offset = piece.position - piece.column
        low = max(first, piece.position)
        end = min(stop, piece.position + piece.key.shape[0])
        while low < end:
            block, begin = divmod(low - offset, BLOCK)
            high = min(end, low + BLOCK - begin)
            rows = slice(low - piece.position, high - piece.position)
            segment = Segment(piece, slice(begin, begin + high - low), rows, low, high)
            blocks.setdefault(block, []).append(segment)
            low = high
    return dict(sorted(blocks.items()))


def load_keys(block: Block, into: Tensor) -> None:
    """Fill float32 `[kv_heads, 256, head_dim]` with a block's keys, zeros elsewhere."""
    if not block[0].whole:
        into.zero_()
    for segment in block:
        into[:, segment.columns] = segment.piece.key[segment.rows].transpose(0, 1)


def load_values(block: Block, into: Tensor) -> None:
    """Fill float32 `[kv_heads, 256, value_dim]` with a block's values, zeros elsewhere."""
    if not block[0].whole:
        into.zero_()
    for segment in block:
        into[:, segment.columns] = segment.piece.value[segment.rows].transpose(0, 1)
