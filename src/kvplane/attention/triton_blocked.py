"""Attention on a GPU over blocks of absolute positions: the order of `blocked` in two launches.

    attend          the contract of `reference.attend`: rows in runs, the step's chunk beside them
    decode          one token a sequence: stores its row and attends in the same pass
    decode_batch    the same for sessions of different lengths, planes and cursors in device tables
    prefill         attends over the old window and the rounded chunk, then stores the chunk

Bits depend on a query's position, its window and the kind of call (one token, up to 64, more):
not on rotation, layout, growth, batch or neighbours. See `triton_kernels` for the arithmetic.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvplane.attention import triton_kernels as kernels
from kvplane.attention.triton_table import TABLE, Sizes, decode_sizes, prefill_sizes
from kvplane.errors import ArgumentError
from kvplane.kernels.triton_rows import seam_of, store_runs
from kvplane.kernels.vectorized import RowPlane

__all__ = ["TABLE", "Cursor", "attend", "decode", "decode_batch", "prefill"]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# more queries than this walk their keys without splits
FEW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where the keys of one call lie: `origin_row` holds `first_key`, at `seam` rows restart at 0.

    Args:
        first_query: position of the first query.
        first_key: oldest position that is there.
        origin_row: its row.
        seam: the row after which row 0 follows.
    """

    first_query: int
    first_key: int
    origin_row: int
    seam: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is seen, and what scores go through."""

    window: int | None
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.scale > 0 or (self.softcap is not None and not self.softcap > 0):
            got = (self.scale, self.softcap)
            raise ArgumentError(argument="scale and softcap", expected="above 0", got=got)


def attend(
    plane: RowPlane,
    runs: Sequence[range],
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    first_key: int,
    first_query: int,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.attend`, in blocks of absolute positions.

    Raises:
        ArgumentError: a query has no key of its own position, rows in more runs than a ring has,
            a scale or softcap that is not above 0.
    """
    held = sum(len(run) for run in runs)
    stop = first_key + held + (0 if key is None else key.shape[1])
    if not first_key <= first_query or stop < first_query + query.shape[1]:
        raise ArgumentError(
            argument="first_query",
            expected=f"queries within [{first_key}, {stop})",
            got=(first_query, first_query + query.shape[1]),
        )
    if key is not None and first_key + held != first_query:
        raise ArgumentError(argument="first_query", expected=str(first_key + held), got=first_query)
    cursor = Cursor(
        first_query=first_query,
        first_key=first_key,
        origin_row=runs[0].start if runs else 0,
        seam=seam_of(runs) if runs else 2**62,
    )
    rule = Rule(window=window, scale=scale, softcap=softcap, sinks=sinks)
    return _run(plane, query, key, value, cursor=cursor, rule=rule)


def decode(
    plane: RowPlane,
    cursor: Cursor | Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    physical: bool = False,
) -> Tensor:
    """Store one token's row and attend over it and the rows before: `[batch, 1, heads, dim]`.

    Args:
        plane: rows; the new one is written.
        cursor: before the token, numbers or a device table (see `triton_cursors`).
        query: [batch, 1, heads, head_dim].
        key: [batch, 1, kv_heads, head_dim] in the plane's dtype.
        value: [batch, 1, kv_heads, value_dim], likewise.
        window: keys the query sees, its own included; None: all.
        scale: factor on the scores.
        softcap: as in `attend`.
        sinks: as in `attend`.
        physical: sum rows in buffer order, as the chapter's engine does; for the contrast only.
    """
    rule = Rule(window=window, scale=scale, softcap=softcap, sinks=sinks)
    return _run(plane, query, key, value, cursor=cursor, rule=rule, stores=True, physical=physical)


def decode_batch(
    planes: Sequence[RowPlane],
    cursors: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bases: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`decode` for sessions of different lengths, each with a plane of its own, in one launch.

    Args:
        planes: one a session, all with the same strides.
        cursors: int64 [sessions, 4] on the device, before the token.
        query: [sessions, 1, heads, head_dim].
        key: as in `decode`, [sessions, ...].
        value: likewise.
        bases: addresses of the planes, from `plane_bases`.
        window: as in `decode`.
        scale: as in `decode`.
        softcap: as in `decode`.
        sinks: as in `decode`.
    """
    rule = Rule(window=window, scale=scale, softcap=softcap, sinks=sinks)
    return _run(planes[0], query, key, value, cursor=cursors, rule=rule, stores=True, bases=bases)


def prefill(
    plane: RowPlane,
    cursor: Cursor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    runs: Sequence[range],
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over the old rows and a chunk, then store the chunk's last rows into `runs`.

    Two launches on one stream: in one, a program could overwrite rows that another still reads.
    """
    rule = Rule(window=window, scale=scale, softcap=softcap, sinks=sinks)
    out = _run(plane, query, key, value, cursor=cursor, rule=rule)
    count = sum(len(run) for run in runs)
    store_runs(plane, runs, key[:, key.shape[1] - count :], value[:, value.shape[1] - count :])
    return out


def plane_bases(planes: Sequence[RowPlane]) -> Tensor:
    """Addresses of sessions' planes for `decode_batch`: int64 [sessions, 2] on their device.

    Raises:
        ArgumentError: planes of different strides or dtypes, or not aligned to 16 bytes.
    """
    kinds = {
        (plane.key.stride()[1:], plane.value.stride()[1:], plane.key.dtype) for plane in planes
    }
    addresses = [[plane.key.data_ptr(), plane.value.data_ptr()] for plane in planes]
    if len(kinds) != 1 or any(address & 15 for pair in addresses for address in pair):
        raise ArgumentError(argument="planes", expected="equal strides, 16 bytes", got=kinds)
    return torch.tensor(addresses, dtype=torch.int64, device=planes[0].key.device)


def _run(
    plane: RowPlane,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    cursor: Cursor | Tensor,
    rule: Rule,
    stores: bool = False,
    physical: bool = False,
    bases: Tensor | None = None,
    sizes: Sizes | None = None,
) -> Tensor:
    """Launch `attend`, and `combine` when keys are in splits."""
    batch, count, heads, dim = query.shape
    kv_heads, value_dim = plane.key.shape[2], plane.value.shape[-1]
    group = heads // kv_heads
    sizes = sizes or _sizes(plane, count, group, rule.window)
    group_pad = triton.next_power_of_2(group)
    rows = max(16, triton.next_power_of_2(sizes.tokens * group_pad))
    value_pad = max(16, triton.next_power_of_2(value_dim))
    tiles = 1 if count == 1 else triton.cdiv(count + sizes.tokens - 1, sizes.tokens)
    query = _dense(query)
    out = query.new_empty((batch, count, heads, value_dim))
    sums, peaks = query, query
    if sizes.num_splits > 1:
        lead = (batch, kv_heads, tiles, sizes.num_splits, rows)
        sums = query.new_empty((*lead, value_pad), dtype=torch.float32)
        peaks = query.new_empty((*lead, 2), dtype=torch.float32)
    chunk_key, chunk_value = (
        (query, query)
        if key is None or value is None
        else (
            _dense(key),
            _dense(value),
        )
    )
    on_device = isinstance(cursor, Tensor)
    numbers = (
        (0, 0, 0, 0)
        if isinstance(cursor, Tensor)
        else (
            cursor.first_query,
            cursor.first_key,
            cursor.origin_row,
            cursor.seam,
        )
    )
    first_query, first_key, origin_row, seam = numbers
    sinks = query if rule.sinks is None else rule.sinks
    cursors = cursor if isinstance(cursor, Tensor) else query
    shared = {
        "WINDOW": rule.window or 0,
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "TOKENS": sizes.tokens,
        "ROWS": rows,
        "VALUE_DIM": value_dim,
        "VALUE_DIM_PAD": value_pad,
        "SPLIT": sizes.split,
        "NUM_SPLITS": sizes.num_splits,
        "DEVICE_CURSOR": on_device,
        "HAS_SINKS": rule.sinks is not None,
        "PHYSICAL": physical,
    }
    kernels.attend[(tiles * sizes.num_splits, kv_heads, batch)](
        query,
        chunk_key,
        chunk_value,
        plane.key,
        plane.value,
        out,
        sums,
        peaks,
        sinks,
        cursors,
        cursors if bases is None else bases,
        first_query,
        count,
        first_key,
        origin_row,
        seam,
        rule.scale,
        rule.softcap or 0.0,
        *query.stride()[:3],
        *chunk_key.stride()[:3],
        *chunk_value.stride()[:3],
        *plane.key.stride()[:3],
        *plane.value.stride()[:3],
        *out.stride()[:3],
        DIM=dim,
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        BLOCK=sizes.block,
        HAS_CHUNK=key is not None,
        STORES=stores,
        DEVICE_BASES=bases is not None,
        HAS_SOFTCAP=rule.softcap is not None,
        PRECISION="ieee" if plane.key.dtype is torch.float32 else "tf32",
        INTERPRETED=INTERPRETED,
        EARLY=sizes.early,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        **shared,
    )
    if sizes.num_splits > 1:
        chunks = triton.cdiv(value_dim, sizes.dims)
        kernels.combine[(count * chunks, heads, batch)](
            out,
            sums,
            peaks,
            sinks,
            cursors,
            first_query,
            count,
            first_key,
            origin_row,
            seam,
            tiles,
            *out.stride()[:3],
            DIMS=sizes.dims,
            EARLY=sizes.early,
            num_warps=4,
            **({"launch_pdl": True} if sizes.early else {}),
            **shared,
        )
    return out


def _sizes(plane: RowPlane, count: int, group: int, window: int | None) -> Sizes:
    dim, dtype = max(plane.key.shape[-1], plane.value.shape[-1]), plane.key.dtype
    if count > FEW:
        return prefill_sizes(group=group, head_dim=dim, dtype=dtype)
    # a program holds at most 64 rows: some tokens of every head of the group
    tokens = 1 if count == 1 else max(1, min(16, 64 // triton.next_power_of_2(group)))
    return decode_sizes(tokens=tokens, group=group, head_dim=dim, dtype=dtype, window=window)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with its last axis dense."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
