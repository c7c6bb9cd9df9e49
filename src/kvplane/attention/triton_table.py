"""Chosen sizes of the Triton kernels, by shape; nothing is tuned while a model runs.

A size that changes the order of summation (block, split, splits, tokens, warps) belongs to TABLE:
a new choice for a shape is another table, and the table's number is part of a store's numerics.
Table 1 was chosen on one H200 with `bench/gpu.py --tune`: docs/benchmarks/gpu_sizes.md.
"""

from dataclasses import dataclass

import torch
import triton

# a change of any size below, or of the kernels' arithmetic, is another table
TABLE = 1

# more queries than this walk their keys without splits
FEW = 64
# bytes of a row of one head from which on fewer rows are held at once
WIDE = 256
# one query over a window no longer than this walks it in one program: a second launch costs more
WHOLE = 128
# programs that fill a device: two on each of an H200's 132 multiprocessors, but for a few
ENOUGH = 256
# of a decode over a full plane: splits grow with the position, in steps of `split`
FULL_SPLITS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How one call is cut.

    Args:
        tokens: queries of a program; tiles begin at multiples of it.
        block: keys of one turn of the loop.
        split: keys of a split at least, at multiples of `split`; a multiple of block.
        num_splits: splits of the keys, a power of two from 32 on; 1 walks them all in one program.
        used: of these, how many a long sequence has.
        num_warps: of a program.
        num_stages: loads in flight.
        dims: value dimensions of a program that combines.
        grain: splits of a program, 1, 4 or 16; None: what fills the device. No bit depends on it.
        early: whether a decode's kernels are launched before what they follow has ended, to wait by
            themselves. No bit depends on it.
    """

    tokens: int
    block: int
    split: int
    num_splits: int
    used: int = 0
    num_warps: int
    num_stages: int
    dims: int = 64
    grain: int | None = None
    early: bool = True


def sizes_of(
    count: int, *, group: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> Sizes:
    """For `count` queries of a sequence; one, few and many are three kinds of call."""
    if count > FEW:
        return prefill_sizes(group=group, head_dim=head_dim, dtype=dtype)
    if count == 1 and window is not None and window <= WHOLE:
        wide = head_dim * dtype.itemsize > WIDE
        return Sizes(
            tokens=1,
            block=32 if wide else 64,
            split=0,
            num_splits=1,
            num_warps=4,
            num_stages=2 if wide else 3,
        )
    # a program holds about 64 rows: some tokens of every head of the group
    tokens = 1 if count == 1 else max(1, min(16, 64 // triton.next_power_of_2(group)))
    return decode_sizes(tokens=tokens, group=group, head_dim=head_dim, dtype=dtype, window=window)


def decode_sizes(
    *, tokens: int, group: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> Sizes:
    """For up to `tokens` queries of one sequence (a power of two), over keys in splits."""
    wide = head_dim * dtype.itemsize > WIDE
    block = 32 if wide else 64
    split, num_splits, used = block, FULL_SPLITS, FULL_SPLITS
    if window is not None:
        # about 64 splits of a long window; short ones get a block each
        split = block * max(1, triton.next_power_of_2(triton.cdiv(window, 64 * block)))
        used = (window + tokens - 2) // split + 2
        num_splits = max(32, triton.next_power_of_2(used))
    rows = tokens * triton.next_power_of_2(group)
    return Sizes(
        tokens=tokens,
        block=block,
        split=split,
        num_splits=num_splits,
        used=used,
        num_warps=4,
        num_stages=2 if wide or rows > 64 or window is not None else 3,  # noqa: PLR2004
    )


def grain_of(pairs: int, used: int) -> int:
    """Splits of a program: as many as leave enough programs for `pairs` of sequence and head."""
    for grain in (16, 4):
        if pairs * used >= grain * ENOUGH:
            return grain
    return 1


def prefill_sizes(*, group: int, head_dim: int, dtype: torch.dtype) -> Sizes:
    """For many queries, each tile over its keys in one walk."""
    padded = triton.next_power_of_2(group)
    wide = head_dim * dtype.itemsize > WIDE
    rows = 64 if dtype.itemsize > 2 else 128  # noqa: PLR2004
    return Sizes(
        tokens=max(1, rows // padded),
        block=32 if dtype.itemsize > 2 else 64,  # noqa: PLR2004
        split=0,
        num_splits=1,
        num_warps=8 if wide or rows > 64 else 4,  # noqa: PLR2004
        num_stages=2 if wide else 3,
    )
