"""Launches the kernels of attention over tensors: shapes, strides and sizes."""

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from kvplane.attention.triton_combine import combine
from kvplane.attention.triton_splits import attend_splits
from kvplane.attention.triton_table import WHOLE, Sizes, grain_of, sizes_of
from kvplane.attention.triton_tiles import attend_tiles
from kvplane.errors import ArgumentError
from kvplane.kernels.vectorized import RowPlane

# the seam of rows that follow each other to the end
NO_SEAM = 2**62
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a launch does beside attending.

    Args:
        rule: what is seen, and what scores go through.
        stores: the chunk is one token whose row is written in the same pass.
        physical: rows are summed in buffer order; for the contrast only.
        bases: addresses of planes, one a sequence, in place of the plane's batch axis.
        unrolled: the planes show every row a second time, a capacity further.
        sizes: other than the table's; for tuning.
    """

    rule: Rule
    stores: bool = False
    physical: bool = False
    bases: Tensor | None = None
    unrolled: bool = False
    sizes: Sizes | None = None


def run(
    plane: RowPlane,
    cursor: Cursor | Tensor,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    call: Call,
) -> Tensor:
    """Attention of `query` over a plane's rows and a chunk, `[batch, tokens, heads, value_dim]`."""
    rule = call.rule
    batch, count, heads, dim = query.shape
    kv_heads, value_dim = plane.key.shape[2], plane.value.shape[-1]
    group = heads // kv_heads
    sizes = call.sizes or sizes_of(
        count,
        group=group,
        head_dim=max(dim, value_dim),
        dtype=plane.key.dtype,
        # in buffer order every row of the plane is walked
        window=max(plane.key.shape[1], WHOLE + 1) if call.physical and rule.window else rule.window,
    )
    group_pad = triton.next_power_of_2(group)
    rows = max(16, sizes.tokens * group_pad)
    value_pad = max(16, triton.next_power_of_2(value_dim))
    # tiles begin at multiples of their size: one more may be touched than are filled
    tiles = 1 if count == 1 else triton.cdiv(count + sizes.tokens - 1, sizes.tokens)
    query = _dense(query)
    out = query.new_empty((batch, count, heads, value_dim))
    # what a call does not need is never read: any tensor stands in for it
    chunk_key, chunk_value = plane.key, plane.value
    if key is not None and value is not None:
        chunk_key, chunk_value = _dense(key), _dense(value)
    sinks = query if rule.sinks is None else rule.sinks
    bases = query if call.bases is None else call.bases
    cursors, numbers = query, (0, 0, 0, 0)
    if isinstance(cursor, Tensor):
        cursors = cursor
    else:
        numbers = (cursor.first_key, cursor.origin_row, cursor.seam, cursor.first_query)
    first_key, origin_row, seam, first_query = numbers
    place = (cursors, first_query, count, first_key, origin_row, seam)
    shared = {
        "WINDOW": rule.window or 0,
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "TOKENS": sizes.tokens,
        "ROWS": rows,
        "VALUE_DIM": value_dim,
        "VALUE_DIM_PAD": value_pad,
        "DEVICE_CURSOR": isinstance(cursor, Tensor),
    }
    # a row that is stored is read back from the plane
    from_chunk = key is not None and not call.stores
    sources = (query, chunk_key, chunk_value, plane.key, plane.value)
    strides = [stride for source in sources for stride in source.stride()[:3]]
    walk = {
        **shared,
        "DIM": dim,
        "DIM_PAD": max(16, triton.next_power_of_2(dim)),
        "BLOCK": sizes.block,
        "HAS_CHUNK": from_chunk,
        "ALIGNED": (from_chunk or call.bases is not None) and all(map(_aligned, sources[1:])),
        "WRAPS": not call.unrolled and _wraps(cursor, rule),
        "STORES": call.stores,
        "DEVICE_BASES": call.bases is not None,
        "HAS_SOFTCAP": rule.softcap is not None,
        "PRECISION": "ieee" if plane.key.dtype is torch.float32 else "tf32",
        "INTERPRETED": INTERPRETED,
        "num_warps": sizes.num_warps,
        "num_stages": sizes.num_stages,
    }
    early = sizes.early and count == 1 and launches_early(query.device)
    ahead = {"EARLY": early, **({"launch_pdl": True} if early else {})}
    if sizes.num_splits == 1:
        attend_tiles[(tiles, kv_heads, batch)](
            *sources,
            out,
            sinks,
            bases,
            *place,
            rule.scale,
            rule.softcap or 0.0,
            *strides,
            *out.stride()[:3],
            HAS_SINKS=rule.sinks is not None,
            **walk,
            **ahead,
        )
        return out
    grain = sizes.grain or grain_of(batch * kv_heads * tiles, sizes.used)
    programs = triton.cdiv(sizes.used, grain)
    lead = (batch, kv_heads, tiles, programs, rows)
    sums = query.new_empty((*lead, value_pad), dtype=torch.float32)
    peaks = query.new_empty((*lead, 2), dtype=torch.float32)
    shared = {
        **shared,
        "SPLIT": sizes.split,
        "NUM_SPLITS": sizes.num_splits,
        "GRAIN": grain,
        "PROGRAMS": programs,
        "PHYSICAL": call.physical,
    }
    attend_splits[(tiles * programs, kv_heads, batch)](
        *sources,
        sums,
        peaks,
        bases,
        *place,
        rule.scale,
        rule.softcap or 0.0,
        *strides,
        **walk,
        **{name: size for name, size in shared.items() if name not in walk},
        **ahead,
    )
    combine[(count * triton.cdiv(value_dim, sizes.dims), heads, batch)](
        out,
        sums,
        peaks,
        sinks,
        *place,
        tiles,
        *out.stride()[:3],
        DIMS=sizes.dims,
        HAS_SINKS=rule.sinks is not None,
        num_warps=4,
        **shared,
        **ahead,
    )
    return out


@cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one it depends on has ended: from Hopper on."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def _wraps(cursor: Cursor | Tensor, rule: Rule) -> bool:
    """Whether rows may go on at row 0: a ring's do, a growing plane's never."""
    return rule.window is not None if isinstance(cursor, Tensor) else cursor.seam < NO_SEAM


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with its last axis dense."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _aligned(rows: Tensor) -> bool:
    """Whether every row of every head begins at a multiple of 16 bytes."""
    strides = [stride * rows.element_size() for stride in rows.stride()[:3]]
    return all(number & 15 == 0 for number in (rows.data_ptr(), *strides))
