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

# block, split, warps, stages, dims, early, grain
RING = {
    1: [
        (32, 32, 4, 2, 64, 0, 1),
        (32, 32, 4, 2, 32, 1, 1),
        (32, 32, 4, 2, 64, 1, 1),
        (32, 32, 4, 2, 128, 1, 1),
        (32, 32, 4, 1, 64, 1, 1),
        (32, 32, 2, 2, 64, 1, 1),
        (64, 64, 4, 2, 64, 1, 1),
        (64, 64, 4, 1, 64, 1, 1),
    ],
    4: [
        (32, 32, 4, 2, 64, 1, 1),
        (32, 32, 4, 2, 64, 1, 4),
        (64, 64, 4, 2, 64, 1, 1),
    ],
    16: [
        (32, 32, 4, 2, 64, 1, 4),
        (32, 32, 2, 2, 64, 1, 4),
        (32, 32, 1, 2, 64, 1, 4),
        (32, 32, 4, 4, 64, 1, 4),
        (32, 64, 4, 3, 64, 1, 4),
        (64, 64, 4, 2, 64, 1, 4),
        (64, 64, 2, 2, 64, 1, 4),
        (64, 64, 4, 2, 64, 1, 1),
    ],
}
# block, splits, warps, stages, dims, early, grain
FULL = {
    (32768, 1): [
        (64, 128, 4, 3, 32, 1, 1),
        (64, 128, 4, 3, 64, 1, 1),
        (64, 128, 4, 3, 128, 1, 1),
        (64, 128, 2, 3, 64, 1, 1),
        (32, 128, 2, 4, 64, 1, 1),
        (64, 64, 4, 4, 64, 1, 1),
    ],
    (131072, 1): [
        (64, 128, 4, 3, 64, 1, 1),
        (64, 128, 2, 3, 64, 1, 1),
        (32, 128, 2, 4, 64, 1, 1),
    ],
    (131072, 16): [
        (64, 128, 4, 3, 64, 1, 16),
        (64, 128, 4, 4, 64, 1, 16),
        (64, 128, 2, 3, 64, 1, 16),
    ],
}
MANY = (
    # tokens, block, warps, stages
    (8, 64, 8, 3),
    (8, 128, 8, 3),
    (4, 64, 4, 3),
)


def tune() -> dict[str, dict[str, float]]:
    """Microseconds of each choice, by case."""
    found = {}
    for batch, choices in RING.items():
        case = Decode("ring", 2048, batch, 2048)
        found[f"ring 2048 x {batch}"] = _tried(case, choices)
    for (rows, batch), choices in FULL.items():
        found[f"full {rows} x {batch}"] = _tried(Decode("full", rows, batch, None), choices)
    case = Decode("ring", 2048, 1, 2048)
    found["chunk over ring 2048"] = _tried_chunk(case, 2048)
    found["chunk over 32768"] = _tried_chunk(Decode("full", 32768 + CHUNK, 1, None), None)
    return found


def _tried(case: Decode, choices: Iterable[tuple[int, ...]]) -> dict[str, float]:
    planes = [Rows(case, Layout.TOKEN_MAJOR) for _ in range(copies_needed(case.nbytes))]
    variants = {}
    for block, number, warps, stages, dims, early, grain in choices:
        # of a ring the size of a split is chosen, of a full plane how many there are
        split, lanes = block, number
        if case.window is not None:
            split, lanes = number, max(32, 1 << (2047 // number + 1).bit_length())
        sizes = Sizes(
            tokens=1,
            block=block,
            split=split,
            num_splits=lanes,
            used=2047 // number + 2 if case.window else lanes,
            num_warps=warps,
            num_stages=stages,
            dims=dims,
            early=bool(early),
            grain=grain,
        )
        name = f"block {block} split {number}" if case.window else f"block {block} of {number}"
        name += f" warps {warps} stages {stages} dims {dims} early {early} grain {grain}"
        variants[name] = ours(case, planes, sizes=sizes)
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
