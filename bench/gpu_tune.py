"""Sizes of the decode and prefill kernels tried one by one: what `triton_table` is chosen from."""

from collections.abc import Iterable
from functools import partial

import torch
from gpu_decode import DIM, Decode, Rows, ours
from gpu_prefill import CHUNK, chunk
from gpu_timing import copies_needed, measured

from kvplane.attention import triton_launch
from kvplane.attention.triton_table import Sizes
from kvplane.plane import Layout

RING = (
    # block, split, warps, stages, dims, early
    (32, 32, 4, 2, 32, False),
    (32, 32, 4, 2, 32, True),
    (32, 32, 4, 1, 32, True),
    (32, 32, 2, 2, 32, True),
    (32, 32, 4, 2, 16, True),
    (32, 32, 4, 2, 64, True),
    (32, 32, 4, 2, 128, True),
    (32, 64, 4, 2, 32, True),
    (64, 64, 4, 2, 32, True),
    (64, 64, 8, 2, 32, True),
    (16, 16, 2, 1, 32, True),
    (16, 32, 4, 2, 32, True),
)
FULL = (
    # block, splits, warps, stages, dims, early
    (64, 128, 4, 3, 32, False),
    (64, 128, 4, 3, 32, True),
    (64, 128, 4, 2, 32, True),
    (64, 128, 4, 4, 32, True),
    (64, 64, 4, 4, 32, True),
    (64, 64, 8, 4, 32, True),
    (128, 64, 4, 2, 32, True),
    (128, 64, 8, 3, 32, True),
    (128, 128, 4, 2, 32, True),
    (32, 128, 4, 4, 32, True),
    (64, 256, 4, 2, 32, True),
    (64, 256, 4, 3, 32, True),
)
MANY = (
    # tokens, block, warps, stages
    (8, 64, 8, 2),
    (8, 64, 8, 3),
    (8, 128, 8, 2),
    (8, 128, 8, 3),
    (4, 64, 4, 2),
    (4, 64, 4, 3),
    (4, 128, 4, 2),
    (8, 64, 4, 2),
)


def tune() -> dict[str, dict[str, float]]:
    """Microseconds of each choice, by case."""
    found = {}
    for batch in (1, 16):
        case = Decode("ring", 2048, batch, 2048)
        found[f"ring 2048 x {batch}"] = _tried(case, _ring_sizes())
    for rows, batch in ((32768, 1), (131072, 1), (131072, 4)):
        case = Decode("full", rows, batch, None)
        found[f"full {rows} x {batch}"] = _tried(case, _full_sizes())
    case = Decode("ring", 2048, 1, 2048)
    found["chunk over ring 2048"] = _tried_chunk(case, 2048)
    found["chunk over 32768"] = _tried_chunk(Decode("full", 32768 + CHUNK, 1, None), None)
    return found


def _ring_sizes() -> Iterable[tuple[str, Sizes]]:
    for block, split, warps, stages, dims, early in RING:
        lanes = 1 << (2047 // split + 2 - 1).bit_length()
        yield (
            f"block {block} split {split} warps {warps} stages {stages} dims {dims} early {early}",
            Sizes(
                tokens=1,
                block=block,
                split=split,
                num_splits=lanes,
                num_warps=warps,
                num_stages=stages,
                dims=dims,
                early=early,
            ),
        )


def _full_sizes() -> Iterable[tuple[str, Sizes]]:
    for block, splits, warps, stages, dims, early in FULL:
        yield (
            f"block {block} splits {splits} warps {warps} stages {stages} early {early}",
            Sizes(
                tokens=1,
                block=block,
                split=block,
                num_splits=splits,
                num_warps=warps,
                num_stages=stages,
                dims=dims,
                early=early,
            ),
        )


def _tried(case: Decode, choices: Iterable[tuple[str, Sizes]]) -> dict[str, float]:
    planes = [Rows(case, Layout.TOKEN_MAJOR) for _ in range(copies_needed(case.nbytes))]
    variants = {name: ours(case, planes, sizes=sizes) for name, sizes in choices}
    times = measured(variants)
    torch.cuda.empty_cache()
    return {name: time.median for name, time in times.items()}


def _tried_chunk(case: Decode, window: int | None) -> dict[str, float]:
    planes = [Rows(case, Layout.TOKEN_MAJOR) for _ in range(copies_needed(case.nbytes))]
    rows = chunk(case, CHUNK)
    held = case.rows - CHUNK if window is None else window - 1
    cursor = triton_launch.Cursor(
        first_query=held + (window or 0), first_key=window or 0, origin_row=0, seam=case.rows
    )
    variants = {}
    for tokens, block, warps, stages in MANY:
        sizes = Sizes(
            tokens=tokens,
            block=block,
            split=0,
            num_splits=1,
            num_warps=warps,
            num_stages=stages,
        )
        rule = triton_launch.Rule(window=window, scale=DIM**-0.5)
        call = triton_launch.Call(rule=rule, sizes=sizes)
        variants[f"tokens {tokens} block {block} warps {warps} stages {stages}"] = [
            partial(triton_launch.run, plane, cursor, *rows, call=call) for plane in planes
        ]
    return {name: time.median for name, time in measured(variants).items()}
