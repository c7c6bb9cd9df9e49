"""One row copied by its address: a decode token needs no views of its plane.

On a CPU the views that a strided copy needs take longer than the copy of one token. The same bytes
arrive; whatever is not plain memory of the plane's dtype is left to the strided copy.
"""

from ctypes import memmove
from typing import NamedTuple

import torch
from torch import Tensor

# a row in more pieces is quicker as one strided copy
MAX_PIECES = 4


class RowAddresses(NamedTuple):
    """Where the rows of a plane's keys, or of its values, lie.

    Attributes:
        pieces: the addresses of row 0's contiguous pieces, in logical order.
        piece_nbytes: bytes of each piece.
        step_nbytes: from a row to the next.
        num_rows: how many rows there are.
        num_elements: of a row.
        dtype: of the elements.
    """

    pieces: tuple[int, ...]
    piece_nbytes: int
    step_nbytes: int
    num_rows: int
    num_elements: int
    dtype: torch.dtype


def addresses_of(rows: Tensor) -> RowAddresses | None:
    """The addresses of `[batch, row, kv_head, dim]`; None where a strided copy does as well.

    They hold as long as the tensor does.
    """
    batch, num_rows, heads, dim = rows.shape
    of_batch, of_row, of_head, of_element = rows.stride()
    if rows.device.type != "cpu" or of_element != 1 or not rows.data_ptr():
        return None
    # the heads of a token-major row follow each other
    joined = of_head == dim or heads == 1
    offsets = [
        place * of_batch + head * of_head
        for place in range(batch)
        for head in range(1 if joined else heads)
    ]
    if len(offsets) > MAX_PIECES:
        return None
    itemsize = rows.element_size()
    return RowAddresses(
        pieces=tuple(rows.data_ptr() + offset * itemsize for offset in offsets),
        piece_nbytes=(heads * dim if joined else dim) * itemsize,
        step_nbytes=of_row * itemsize,
        num_rows=num_rows,
        num_elements=batch * heads * dim,
        dtype=rows.dtype,
    )


def put_row(target: RowAddresses, row: int, source: Tensor) -> bool:
    """Copy one token, `[batch, 1, kv_head, dim]` or without the batch axis, into a row.

    Returns:
        Whether it was done; False, with nothing written, for a source that a copy of plain memory
        would not be right for.
    """
    if (
        # a subclass may have no memory of its own
        type(source) is not Tensor
        or source.dtype is not target.dtype
        or source.numel() != target.num_elements
        or source.layout is not torch.strided
        or not source.is_cpu
        or not source.is_contiguous()
        # the sign is not in the bytes
        or source.is_neg()
        or not 0 <= row < target.num_rows
    ):
        return False
    address = source.data_ptr()
    if not address:
        # zeros that were never made
        return False
    offset, nbytes = row * target.step_nbytes, target.piece_nbytes
    for piece in target.pieces:
        memmove(piece + offset, address, nbytes)
        address += nbytes
    return True
