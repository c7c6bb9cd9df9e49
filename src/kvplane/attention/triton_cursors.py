"""Ring cursors on the device, for steps that a graph replays.

    [sequence]    capacity, length, origin_logical, origin_physical      int64

`advance` moves them as `RingCursor.append_batch` does; kernels read them before the step's tokens
are counted. The host keeps its own cursors and checks them first: the device refuses nothing.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803, ANN001, ANN202 - sizes known at compile time are in capitals, as in Triton's own

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvplane.ring import RingCursor

SEQUENCES = 32


def cursor_table(cursors: Sequence[RingCursor], device: torch.device | str) -> Tensor:
    """The cursors as int64 [sequences, 4] on a device."""
    rows = [cursor.as_tuple() for cursor in cursors]
    return torch.tensor(rows, dtype=torch.int64).to(device)


def write_cursors(table: Tensor, cursors: Sequence[RingCursor]) -> None:
    """Put the host's cursors into a table that graphs already know."""
    table.copy_(cursor_table(cursors, "cpu"))


def advance(table: Tensor, num_tokens: int = 1) -> None:
    """Move every cursor on by `num_tokens`, in place, on the current stream."""
    count = table.shape[0]
    _advance[(triton.cdiv(count, SEQUENCES),)](table, count, num_tokens, SEQUENCES=SEQUENCES)


@triton.jit(do_not_specialize=["count", "num_tokens"])
def _advance(table, count, num_tokens, SEQUENCES: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    held = sequence < count
    at = table + sequence * 4
    capacity = tl.load(at, mask=held, other=1)
    length = tl.load(at + 1, mask=held, other=0)
    origin_logical = tl.load(at + 2, mask=held, other=0)
    origin_physical = tl.load(at + 3, mask=held, other=0)
    stop = origin_logical + length + num_tokens
    # when full, the oldest rows are given up, so both origins move together
    oldest = tl.maximum(origin_logical, stop - capacity)
    row = origin_physical + oldest - origin_logical
    row -= (row // capacity) * capacity
    tl.store(at + 1, stop - oldest, mask=held)
    tl.store(at + 2, oldest, mask=held)
    tl.store(at + 3, row, mask=held)
