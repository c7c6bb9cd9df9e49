"""Prefill on a GPU: a chunk over a wrapped ring and over a full plane, and stores by themselves."""

from functools import partial

import torch
from gpu_decode import DIM, HEADS, KV_HEADS, Decode, Rows
from gpu_timing import Timed, copies_needed, measured
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvplane.attention import triton_blocked
from kvplane.kernels import vectorized
from kvplane.kernels.triton_rows import store_runs
from kvplane.plane import Layout

CHUNK = 512


def chunk(case: Decode, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of `count` tokens."""
    query, key, value = (
        torch.randn(1, count, heads, DIM, dtype=case.dtype, device="cuda")
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return query, key, value


def ring(window: int) -> dict[str, Timed]:
    """A chunk over a wrapped ring: attended in place and stored, or gathered, masked and SDPA."""
    case = Decode("ring", window, 1, window)
    planes = [Rows(case, Layout.TOKEN_MAJOR) for _ in range(copies_needed(case.nbytes))]
    query, key, value = chunk(case, CHUNK)
    seam = window // 3
    first = 4 * window + 5
    # the oldest row is at the seam; a chunk takes the rows from there on
    cursor = triton_blocked.Cursor(
        first_query=first, first_key=first - window + 1, origin_row=seam + 1, seam=window
    )
    runs = [range(seam, min(window, seam + CHUNK))]
    if seam + CHUNK > window:
        runs.append(range(seam + CHUNK - window))

    def ours(plane: Rows) -> None:
        triton_blocked.prefill(
            plane, cursor, query, key, value, runs=runs, window=window, scale=DIM**-0.5
        )

    held = window - 1
    rows = torch.arange(held + CHUNK, device="cuda")
    at = torch.arange(CHUNK, device="cuda")[:, None] + held
    mask = (rows <= at) & (rows > at - window)

    def stock(plane: Rows, *, repeat: bool) -> None:
        keys = torch.cat([plane.key[:, seam + 1 :], plane.key[:, :seam], key], 1)
        values = torch.cat([plane.value[:, seam + 1 :], plane.value[:, :seam], value], 1)
        if repeat:
            # a masked kernel may know no groups: then heads are repeated, as transformers does
            keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 2) for part in (keys, values))
        args = (part.transpose(1, 2) for part in (query, keys, values))
        sdpa(*args, attn_mask=mask, enable_gqa=not repeat)
        for run in runs:
            part = slice(run.start - seam, run.stop - seam)
            vectorized.store_run(plane, run, key[:, part], value[:, part])

    return measured(
        {
            "in place, then stored": [partial(ours, plane) for plane in planes],
            "gather, mask, SDPA, store": [partial(stock, plane, repeat=False) for plane in planes],
            "the same, heads repeated": [partial(stock, plane, repeat=True) for plane in planes],
        }
    )


def full(rows: int) -> dict[str, Timed]:
    """A chunk over a full plane of `rows` before it, against SDPA's causal kernel, contiguous."""
    case = Decode("full", rows + CHUNK, 1, None)
    copies = copies_needed(case.nbytes)
    query, key, value = chunk(case, CHUNK)
    cursor = triton_blocked.Cursor(first_query=rows, first_key=0, origin_row=0, seam=2**62)
    variants = {}
    for layout in Layout:
        planes = [Rows(case, layout) for _ in range(copies)]

        def ours(plane: Rows) -> None:
            triton_blocked.prefill(
                plane,
                cursor,
                query,
                key,
                value,
                runs=[range(rows, rows + CHUNK)],
                window=None,
                scale=DIM**-0.5,
            )

        variants[layout.name.lower().replace("_", "-")] = [partial(ours, plane) for plane in planes]
    # the operator behind SDPA with `causal_lower_right`, which knows groups of heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
    sizes = (1, KV_HEADS, rows + CHUNK, DIM)
    calls = []
    for _ in range(copies):
        keys, values = (torch.randn(sizes, dtype=case.dtype, device="cuda") for _ in range(2))
        calls.append(partial(flash, query.transpose(1, 2), keys, values, 0.0, is_causal=True))
    variants["flash SDPA, contiguous"] = calls
    return measured(variants)


def stores() -> dict[str, dict[str, Timed]]:
    """Stores by themselves, of one token and of a chunk that wraps."""
    case = Decode("ring", 2048, 1, 2048)
    found = {}
    for count in (1, CHUNK):
        _, key, value = chunk(case, count)
        first = 2048 - count // 2
        runs = [range(first, min(2048, first + count))]
        if first + count > 2048:
            runs.append(range(first + count - 2048))
        variants = {}
        for layout in Layout:
            planes = [Rows(case, layout) for _ in range(copies_needed(case.nbytes))]
            name = layout.name.lower().replace("_", "-")

            def stock(plane: Rows, runs=runs, key=key, value=value) -> None:
                done = 0
                for run in runs:
                    part = slice(done, done + len(run))
                    vectorized.store_run(plane, run, key[:, part], value[:, part])
                    done += len(run)

            variants[f"Triton, {name}"] = [
                partial(store_runs, plane, runs, key, value) for plane in planes
            ]
            variants[f"copies, {name}"] = [partial(stock, plane) for plane in planes]
        found[f"{count} tokens"] = measured(variants)
    return found
