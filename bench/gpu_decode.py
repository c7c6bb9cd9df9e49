"""Decode on a GPU: one token over a ring or a full plane, against SDPA on gathered tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from gpu_timing import Timed, copies_needed, measured
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvplane.attention import triton_blocked, triton_launch
from kvplane.attention.triton_cursors import cursor_table
from kvplane.attention.triton_table import Sizes
from kvplane.kernels.triton_rows import store_rows
from kvplane.plane import Layout
from kvplane.ring import RingCursor

HEADS, KV_HEADS, DIM = 32, 2, 128


@dataclass(frozen=True)
class Decode:
    """One row of a table."""

    name: str
    rows: int
    batch: int
    window: int | None
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM
    sinks: bool = False
    dtype: torch.dtype = torch.float16

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that a call must read."""
        return self.batch * self.rows * self.kv_heads * self.dim * 4

    @property
    def sink_logits(self) -> Tensor | None:
        """A logit a head, or None."""
        return torch.randn(self.heads, device="cuda") if self.sinks else None


class Rows:
    """A plane's tensors, random."""

    def __init__(self, case: Decode, layout: Layout) -> None:
        sizes = (case.batch, case.kv_heads, case.rows, case.dim)
        if layout is Layout.TOKEN_MAJOR:
            # one row is one span: key heads, then value heads
            width = (case.rows, case.batch, 2 * case.kv_heads, case.dim)
            both = torch.randn(width, dtype=case.dtype, device="cuda").transpose(0, 1)
            self.key, self.value = both[:, :, : case.kv_heads], both[:, :, case.kv_heads :]
        else:
            self.key, self.value = (
                torch.randn(sizes, dtype=case.dtype, device="cuda").transpose(1, 2)
                for _ in range(2)
            )


def cursors(case: Decode) -> Tensor:
    """A ring wrapped at an odd row, or a plane with one row left."""
    if case.window is None:
        cursor = RingCursor(case.rows, length=case.rows - 1)
    else:
        cursor = RingCursor(
            case.rows,
            length=case.rows,
            origin_logical=3 * case.rows + 5,
            origin_physical=case.rows // 3,
        )
    return cursor_table([cursor] * case.batch, "cuda")


def token(case: Decode) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of one token a sequence."""
    query, key, value = (
        torch.randn(case.batch, 1, heads, case.dim, dtype=case.dtype, device="cuda")
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return query, key, value


def ours(
    case: Decode, planes: list[Rows], *, sizes: Sizes | None = None, physical: bool = False
) -> list[Callable[[], object]]:
    """Store and attend, one call a plane."""
    rule = triton_launch.Rule(window=case.window, scale=case.dim**-0.5, sinks=case.sink_logits)
    call = triton_launch.Call(rule=rule, stores=True, physical=physical, sizes=sizes)
    table, rows = cursors(case), token(case)
    return [partial(triton_launch.run, plane, table, *rows, call=call) for plane in planes]


def apart(case: Decode, planes: list[Rows]) -> list[Callable[[], object]]:
    """The store as a launch of its own, then attention over the plane alone."""
    query, key, value = token(case)
    row = torch.tensor([case.rows // 3], device="cuda")
    cursor = triton_blocked.Cursor(
        first_query=4 * case.rows + 5,
        first_key=3 * case.rows + 6,
        origin_row=case.rows // 3 + 1,
        seam=case.rows,
    )
    rule = triton_launch.Rule(window=case.window, scale=case.dim**-0.5)

    def call(plane: Rows) -> None:
        store_rows(plane, row, key, value)
        triton_launch.run(plane, cursor, query, None, None, call=triton_launch.Call(rule=rule))

    return [partial(call, plane) for plane in planes]


def gathered(case: Decode, copies: int) -> list[Callable[[], object]]:
    """SDPA on contiguous tensors that somebody gathered before."""
    sizes = (case.batch, case.kv_heads, case.rows, case.dim)
    query = token(case)[0].transpose(1, 2)
    calls = []
    for _ in range(copies):
        key, value = (torch.randn(sizes, dtype=case.dtype, device="cuda") for _ in range(2))
        calls.append(partial(sdpa, query, key, value, enable_gqa=True))
    return calls


def staged(case: Decode, planes: list[Rows]) -> list[Callable[[], object]]:
    """A wrapped ring copied into logical order, then SDPA: what a staging engine does."""
    query, key, value = token(case)
    seam = case.rows // 3

    def call(plane: Rows) -> None:
        plane.key[:, seam : seam + 1] = key
        plane.value[:, seam : seam + 1] = value
        keys = torch.cat([plane.key[:, seam + 1 :], plane.key[:, : seam + 1]], 1)
        values = torch.cat([plane.value[:, seam + 1 :], plane.value[:, : seam + 1]], 1)
        args = (part.transpose(1, 2) for part in (query, keys, values))
        sdpa(*args, enable_gqa=True)

    return [partial(call, plane) for plane in planes]


def timed(case: Decode, *, extras: bool = False) -> dict[str, Timed]:
    """Both layouts and SDPA; with `extras` also what else an engine could do."""
    copies = copies_needed(case.nbytes)
    token_major = [Rows(case, Layout.TOKEN_MAJOR) for _ in range(copies)]
    head_major = [Rows(case, Layout.HEAD_MAJOR) for _ in range(copies)]
    variants = {
        "token-major": ours(case, token_major),
        "head-major": ours(case, head_major),
        "SDPA, gathered before": gathered(case, copies),
    }
    if extras:
        variants["physical order"] = ours(case, token_major, physical=True)
        variants["store apart"] = apart(case, token_major)
        variants["staged copy, SDPA"] = staged(case, token_major)
    times = measured(variants)
    del variants, token_major, head_major
    torch.cuda.empty_cache()
    return times
