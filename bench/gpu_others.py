"""What else an engine could do, priced: block tables, free splits, layouts, launches."""

import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_decode import DIM, HEADS, KV_HEADS, Decode, Rows, ours, token
from gpu_timing import Timed, copies_needed, measured
from torch import Tensor

from kvplane.attention.triton_table import sizes_of
from kvplane.plane import Layout

BLOCK_TABLE = 16
SPLITS = 64


@triton.jit
def _split(
    query,
    plane,
    table,
    out,
    rows,
    origin,
    seam,
    KIND: tl.constexpr,  # noqa: N803 - Triton's capitals
    GROUP: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    PAGE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One split's sums over token-major rows: by growing span (0), ring (1) or block table (2)."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    share = tl.cdiv(rows, tl.num_programs(0) * BLOCK) * BLOCK
    dim = tl.arange(0, DIM)
    member = tl.arange(0, GROUP)
    queries = tl.load(query + (head * GROUP + member)[:, None] * DIM + dim[None, :])
    m = tl.full((GROUP,), float("-inf"), tl.float32)
    z = tl.zeros((GROUP,), tl.float32)
    o = tl.zeros((GROUP, DIM), tl.float32)
    for first in range(split * share, tl.minimum(split * share + share, rows), BLOCK):
        position = first + tl.arange(0, BLOCK)
        there = position < rows
        row = position.to(tl.int64)
        if KIND == 1:
            row = origin + row
            row -= tl.where(row >= seam, seam, 0)
        if KIND == 2:
            row = tl.load(table + position // PAGE, mask=there, other=0) * PAGE + position % PAGE
        at = plane + row[:, None] * (2 * HEADS * DIM) + head * DIM + dim[None, :]
        key = tl.load(at, mask=there[:, None], other=0.0)
        value = tl.load(at + HEADS * DIM, mask=there[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(key)) * 0.1
        scores = tl.where(there[None, :], scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        bend = tl.exp2(m - top)
        z = z * bend + tl.sum(weights, 1)
        o = tl.dot(weights.to(value.dtype), value, o * bend[:, None])
        m = top
    at = out + ((head * tl.num_programs(0) + split) * GROUP + member)[:, None] * DIM + dim[None, :]
    tl.store(at, o / z[:, None])


def block_tables() -> dict[str, dict[str, Timed]]:
    """The same sums over a growing span, a wrapped ring and a 16-token block table."""
    found = {}
    for rows in (2048, 32_768, 131_072):
        nbytes = rows * KV_HEADS * DIM * 4
        planes = [_plane(rows) for _ in range(copies_needed(nbytes))]
        table = torch.randperm(rows // BLOCK_TABLE, device="cuda")
        query = torch.randn(HEADS, DIM, dtype=torch.float16, device="cuda")
        out = torch.empty(HEADS * SPLITS * DIM, dtype=torch.float32, device="cuda")
        names = ("growing span", "wrapped ring", f"table of {BLOCK_TABLE} tokens")
        found[f"{rows:,} rows"] = measured(
            {
                name: [partial(_call, query, plane, table, out, rows, kind) for plane in planes]
                for kind, name in enumerate(names)
            }
        )
        del planes
        torch.cuda.empty_cache()
    return found


def _plane(rows: int) -> Tensor:
    return torch.randn(rows, 2 * KV_HEADS, DIM, dtype=torch.float16, device="cuda")


def _call(query: Tensor, plane: Tensor, table: Tensor, out: Tensor, rows: int, kind: int) -> None:
    _split[(min(SPLITS, rows // 64), KV_HEADS)](
        query,
        plane,
        table,
        out,
        rows,
        rows // 3,
        rows,
        KIND=kind,
        GROUP=HEADS // KV_HEADS,
        HEADS=KV_HEADS,
        DIM=DIM,
        PAGE=BLOCK_TABLE,
        BLOCK=64,
        num_warps=4,
        num_stages=3,
    )


def free_splits() -> dict[str, dict[str, Timed]]:
    """The table's fixed order against the same kernel with splits chosen by length."""
    found = {}
    for rows in (2048, 8192, 32_768, 131_072):
        window = 2048 if rows == 2048 else None
        case = Decode("free", rows, 1, window)
        planes = [Rows(case, Layout.TOKEN_MAJOR) for _ in range(copies_needed(case.nbytes))]
        fixed = sizes_of(
            1, group=HEADS // KV_HEADS, head_dim=DIM, dtype=torch.float16, window=window
        )
        variants = {"fixed order": ours(case, planes)}
        for number in (32, 64, 128, 256):
            if window is None:
                sizes = replace(fixed, num_splits=number, used=number)
            else:
                split = max(64, 4096 // number)
                used = 2047 // split + 2
                lanes = max(32, triton.next_power_of_2(used))
                sizes = replace(fixed, split=split, used=used, num_splits=lanes, grain=1)
            variants[f"{number} splits"] = ours(case, planes, sizes=sizes)
        found[f"{rows:,} rows"] = measured(variants)
        del planes, variants
        torch.cuda.empty_cache()
    return found


def layouts(rows: int = 32_768) -> dict[str, Any]:
    """All 52 layers' attention of one token, in the four pairings of layout and kind."""
    kinds = {"ring": Decode("ring", 2048, 1, 2048), "full": Decode("full", rows, 1, None)}
    graphs = {}
    kept = []
    for ring in Layout:
        for full in Layout:
            calls = []
            for number in range(52):
                name, layout = ("full", full) if number % 4 == 3 else ("ring", ring)
                calls += ours(kinds[name], [Rows(kinds[name], layout)])
            kept.append(calls)
            whole = partial(_each, calls)
            graphs[f"rings {ring.value}, full {full.value}"] = [whole]
    times = measured(graphs)
    four = [times[name].median for name in graphs]
    return {"times": times, "multiplicative": four[0] * four[3] / (four[1] * four[2])}


def _each(calls: list[Any]) -> None:
    for call in calls:
        call()


def batches() -> dict[str, Any]:
    """Sessions of other lengths in one launch, against one launch each."""
    lengths = [100, 2000, 4000, 8000, 16_000, 32_000, 64_000, 131_000]
    case = Decode("one", 131_072, 1, None)
    planes = [Rows(case, Layout.TOKEN_MAJOR) for _ in lengths]
    from kvplane.attention.triton_blocked import decode, decode_batch, plane_bases  # noqa: PLC0415
    from kvplane.attention.triton_cursors import cursor_table  # noqa: PLC0415
    from kvplane.ring import RingCursor  # noqa: PLC0415

    held = [RingCursor(131_072, length=length) for length in lengths]
    tables = [cursor_table([cursor], "cuda") for cursor in held]
    rows = token(Decode("all", 131_072, len(lengths), None))
    rule = {"window": None, "scale": DIM**-0.5}

    def apart() -> None:
        for number, plane in enumerate(planes):
            part = [each[number : number + 1] for each in rows]
            decode(plane, tables[number], *part, **rule)

    bases, table = plane_bases(planes), cursor_table(held, "cuda")
    together = partial(decode_batch, planes, table, *rows, bases=bases, **rule)
    return {"eight lengths": measured({"one launch": [together], "one each": [apart]})}


def launches(step: Any) -> dict[str, int]:
    """Kernels of one step, by what they are."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    counts: dict[str, int] = {"all": 0}
    for event in profile.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if not on_device or "Memcpy" in event.name or "Memset" in event.name:
            continue
        counts["all"] += 1
        for name in ("attend_splits", "attend_tiles", "combine", "_advance", "_move"):
            if name in event.name:
                counts[name] = counts.get(name, 0) + 1
    return counts


def spread(times: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}
