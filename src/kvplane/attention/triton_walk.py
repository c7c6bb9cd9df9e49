"""How a program walks its keys, and where it finds them: what both Triton kernels share.

Positions are absolute, rows come from a cursor: the origin row holds the origin position, past the
seam a ring goes on at row 0. Keys from `chunk_first` on are read from the step's own tensors, not
from the plane. Scores stay in the units of the product until the exponent, so that masked and
unmasked blocks do the same arithmetic.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803, ANN001, ANN201, ANN202 - sizes known at compile time are in capitals, as in Triton's own
# ruff: noqa: PLR0915, C901, PLR0912 - one kernel is one function

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_size_of(tile_stop, WINDOW: tl.constexpr, SPLIT: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Keys of a split: fixed for a window, else so that NUM_SPLITS reach `tile_stop`."""
    if WINDOW:
        return tl.full((), SPLIT, tl.int64)
    else:  # noqa: RET505 - both branches are compiled apart
        return SPLIT * ((tile_stop + SPLIT * NUM_SPLITS - 1) // (SPLIT * NUM_SPLITS))


@triton.jit
def first_split_of(tile_first, size, WINDOW: tl.constexpr):
    """The split that holds the oldest key which the tile's first query can see."""
    if WINDOW:
        return tl.maximum(tile_first - (WINDOW - 1), 0) // size
    else:  # noqa: RET505
        return tile_first * 0


@triton.jit
def cursor_of(cursors, sequence, first_query, first_key, origin_row, seam, DEVICE: tl.constexpr):
    """(first_query, first_key, origin_row, seam), from the device's table or as given."""
    if DEVICE:
        at = cursors + sequence * 4
        capacity = tl.load(at)
        length = tl.load(at + 1)
        origin = tl.load(at + 2)
        row = tl.load(at + 3)
        return origin + length, origin, row, capacity
    else:  # noqa: RET505
        query = first_query.to(tl.int64)
        return query, first_key.to(tl.int64), origin_row.to(tl.int64), seam.to(tl.int64)


@triton.jit
def _capped(scores, scale, softcap):
    """The scores bent by `softcap * tanh(scores * scale / softcap)`, by the exponential."""
    x = scores * (scale / softcap)
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    bent = (1.0 - e) / (1.0 + e)
    return softcap * tl.where(x < 0, -bent, bent)


@triton.jit
def walk(
    m,
    z,
    o,
    query,
    query_position,
    walk_first,
    num_keys,
    low,
    high,
    key_at,
    value_at,
    key_row,
    value_row,
    chunk_key_at,
    chunk_value_at,
    chunk_key_token,
    chunk_value_token,
    chunk_first,
    origin_position,
    origin_row,
    seam,
    new_row,
    new_position,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PHYSICAL: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Sums over `num_keys` keys from `walk_first` on; seen are those in [low, high)."""
    dim = tl.arange(0, DIM_PAD)
    value_dim = tl.arange(0, VALUE_DIM_PAD)
    factor = LOG2_E if HAS_SOFTCAP else scale * LOG2_E
    # 32 bits are enough between two positions of one walk
    query_place = (query_position - (low if PHYSICAL else walk_first)).to(tl.int32)
    for offset in range(0, num_keys, BLOCK):
        step = offset + tl.arange(0, BLOCK)
        if PHYSICAL:
            row = walk_first + step
            back = row - origin_row
            position = origin_position + back + tl.where(back < 0, seam, 0)
            # the row of the new token may still be known as that of the one it replaces
            position = tl.where(row == new_row, new_position, position)
            place = (position - low).to(tl.int32)
            there = (position >= low) & (position < high) & (row < seam)
        else:
            position = walk_first + step
            row = origin_row + (position - origin_position)
            row -= tl.where(row >= seam, seam, 0)
            place = step
            there = (position >= low) & (position < high)
        keys = key_at + row * key_row
        values = value_at + row * value_row
        if HAS_CHUNK:
            fresh = position >= chunk_first
            token = position - chunk_first
            keys = tl.where(fresh, chunk_key_at + token * chunk_key_token, keys)
            values = tl.where(fresh, chunk_value_at + token * chunk_value_token, values)
            if ALIGNED:
                # a choice of pointers forgets that both are aligned: loads would be narrow
                keys = tl.multiple_of(keys, [16])
                values = tl.multiple_of(values, [16])
        keys = keys[:, None] + dim[None, :]
        values = values[:, None] + value_dim[None, :]
        if MASKED:
            key_mask = there[:, None] & (dim < DIM)[None, :]
            key = tl.load(keys, mask=key_mask, other=0.0)
        elif DIM < DIM_PAD:
            key = tl.load(keys, mask=(dim < DIM)[None, :], other=0.0)
        else:
            key = tl.load(keys)
        if INTERPRETED:
            # the interpreter multiplies bfloat16 as integers
            scores = tl.dot(query.to(tl.float32), tl.trans(key).to(tl.float32))
        else:
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if HAS_SOFTCAP:
            scores = _capped(scores, scale, softcap)
        if MASKED:
            seen = there[None, :] & (place[None, :] <= query_place[:, None])
            if WINDOW:
                seen &= place[None, :] > (query_place - WINDOW)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(m, tl.max(scores, 1))
        # a query that has seen nothing yet keeps m = -inf and sums of zero
        floor = tl.where(peak == float("-inf"), 0.0, peak) * factor
        weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, -floor[:, None]))
        shrink = tl.exp2(m * factor - floor)
        z = z * shrink + tl.sum(weights, 1)
        o = o * shrink[:, None]
        if MASKED:
            value_mask = there[:, None] & (value_dim < VALUE_DIM)[None, :]
            value = tl.load(values, mask=value_mask, other=0.0)
        elif VALUE_DIM < VALUE_DIM_PAD:
            value = tl.load(values, mask=(value_dim < VALUE_DIM)[None, :], other=0.0)
        else:
            value = tl.load(values)
        if INTERPRETED:
            o = tl.dot(weights.to(value.dtype).to(tl.float32), value.to(tl.float32), o)
        else:
            o = tl.dot(weights.to(value.dtype), value, o, input_precision=PRECISION)
        m = peak
    return m, z, o
