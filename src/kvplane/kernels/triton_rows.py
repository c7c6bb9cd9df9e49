"""Rows in and out on a GPU, any strides, in one launch each.

    store_rows    key, value [batch, tokens, kv_head, dim] into rows
    gather_rows   rows as fresh token-major tensors, in the order asked

Input of the plane's dtype is copied; float32 is rounded to nearest even in the kernel, infinities
included. Which rows are meant is the caller's: two source rows never aim at one row.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803, ANN001, ANN202 - sizes known at compile time are in capitals, as in Triton's own

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvplane.errors import ArgumentError, TensorMismatch
from kvplane.kernels.checks import RowPlane, check_source

TOKENS = 16


def store_rows(plane: RowPlane, rows: Tensor, key: Tensor, value: Tensor) -> None:
    """Copy or round `[batch, tokens, kv_head, dim]` into `rows`, int64 [tokens].

    The caller sees to it that rows are distinct and in the plane: a look would wait for the device.

    Raises:
        TensorMismatch: shape, dtype or device. Nothing was written.
    """
    _check_rows(plane, rows)
    check_source(plane, rows.shape[0], key, value)
    _launch(plane, key, value, rows=rows, first_row=0, seam=0, stores=True)


def store_runs(plane: RowPlane, runs: Sequence[range], key: Tensor, value: Tensor) -> None:
    """The same at consecutive rows, in at most two runs of which the second begins at row 0.

    Raises:
        TensorMismatch: as above. Nothing was written.
        ArgumentError: other runs. Nothing was written.
    """
    seam = seam_of(runs)
    held = sum(len(run) for run in runs)
    check_source(plane, held, key, value)
    if held:
        _launch(plane, key, value, rows=None, first_row=runs[0].start, seam=seam, stores=True)


def gather_rows(plane: RowPlane, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value of `rows`, int64 [tokens], as fresh `[batch, tokens, kv_head, dim]`.

    Raises:
        TensorMismatch: rows of another dtype, shape or device.
    """
    _check_rows(plane, rows)
    batch, _, heads, _ = plane.key.shape
    key, value = (
        part.new_empty((batch, rows.shape[0], heads, part.shape[-1]))
        for part in (plane.key, plane.value)
    )
    if rows.shape[0]:
        _launch(plane, key, value, rows=rows, first_row=0, seam=0, stores=False)
    return key, value


def seam_of(runs: Sequence[range]) -> int:
    """The row at which rows go on at row 0; 2^62 when one run holds them all.

    Raises:
        ArgumentError: no run, more than two, or a second that begins elsewhere.
    """
    if len(runs) == 1 or (len(runs) == 2 and not runs[1].start):  # noqa: PLR2004 - a ring's two
        return runs[0].stop if len(runs) > 1 else 2**62
    raise ArgumentError(argument="runs", expected="one, or two with the second from 0", got=runs)


def _check_rows(plane: RowPlane, rows: Tensor) -> None:
    device = plane.key.device
    if rows.dtype is not torch.int64 or rows.ndim != 1 or rows.device != device:
        got = f"{rows.dtype} {list(rows.shape)} on {rows.device}"
        expected = f"int64 [tokens] on {device}"
        raise TensorMismatch(layer=None, what="rows", expected=expected, got=got)


def _launch(
    plane: RowPlane,
    key: Tensor,
    value: Tensor,
    *,
    rows: Tensor | None,
    first_row: int,
    seam: int,
    stores: bool,
) -> None:
    """Move key and value, between the plane's rows and `[batch, tokens, kv_head, dim]`."""
    batch, count, heads, dim = key.shape
    if not count:
        return
    _move[(triton.cdiv(count, TOKENS), 2 * heads, batch)](
        key,
        value,
        plane.key,
        plane.value,
        rows,
        first_row,
        seam,
        count,
        *key.stride(),
        *value.stride(),
        *plane.key.stride(),
        *plane.value.stride(),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        VALUE_DIM=value.shape[-1],
        VALUE_DIM_PAD=triton.next_power_of_2(value.shape[-1]),
        TOKENS=TOKENS,
        HAS_ROWS=rows is not None,
        STORES=stores,
    )


@triton.jit
def _moved(
    tokens,
    plane,
    row,
    token,
    held,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    STORES: tl.constexpr,
):
    token_at, token_stride, token_dim = tokens
    plane_at, row_stride, plane_dim = plane
    dim = tl.arange(0, DIM_PAD).to(tl.int64)
    mask = held[:, None] & (dim < DIM)[None, :]
    token_at += token[:, None] * token_stride + dim[None, :] * token_dim
    plane_at += row[:, None] * row_stride + dim[None, :] * plane_dim
    if STORES:
        tl.store(plane_at, tl.load(token_at, mask=mask).to(plane_at.dtype.element_ty), mask=mask)
    else:
        tl.store(token_at, tl.load(plane_at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["first_row", "seam", "count"])
def _move(
    key,
    value,
    plane_key,
    plane_value,
    rows,
    first_row,
    seam,
    count,
    k_batch,
    k_token,
    k_head,
    k_dim,
    v_batch,
    v_token,
    v_head,
    v_dim,
    pk_batch,
    pk_row,
    pk_head,
    pk_dim,
    pv_batch,
    pv_row,
    pv_head,
    pv_dim,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    STORES: tl.constexpr,
):
    """Grid (tokens / TOKENS, heads of keys then heads of values, sequences)."""
    heads = tl.num_programs(1) // 2
    head = tl.program_id(1)
    is_key = head < heads
    head = (head - tl.where(is_key, 0, heads)).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    held = token < count
    if HAS_ROWS:
        row = tl.load(rows + token, mask=held, other=0)
    else:
        row = first_row + token
        row -= tl.where(row >= seam, seam, 0)
    if is_key:
        source = (key + sequence * k_batch + head * k_head, k_token, k_dim)
        target = (plane_key + sequence * pk_batch + head * pk_head, pk_row, pk_dim)
        _moved(source, target, row, token, held, DIM, DIM_PAD, STORES)
    else:
        source = (value + sequence * v_batch + head * v_head, v_token, v_dim)
        target = (plane_value + sequence * pv_batch + head * pv_head, pv_row, pv_dim)
        _moved(source, target, row, token, held, VALUE_DIM, VALUE_DIM_PAD, STORES)
