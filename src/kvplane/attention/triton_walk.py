"""What the Triton kernels of attention share: where keys lie, one block of them, sums added up.

Positions are absolute, rows come from a cursor: the origin row holds the origin position, past the
seam a ring goes on at row 0. Keys from the chunk's first position on are read from the step's own
tensors, not from the plane.

    m   the largest score so far, in units of log 2; -inf where nothing was seen
    z   the sum of 2^(score - m)
    o   the sum of 2^(score - m) * value

Products that are added up are written as fma, so that no compiler decides about their rounding:
the same block gives the same bits in every kernel and size of program that holds it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803, ANN001, ANN201, ANN202, D417 - sizes known at compile time are in capitals
# ruff: noqa: PLR0915, PLR0912, C901 - a block is one function

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


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
    else:  # noqa: RET505 - both branches are compiled apart
        query = first_query.to(tl.int64)
        return query, first_key.to(tl.int64), origin_row.to(tl.int64), seam.to(tl.int64)


@triton.jit
def splits_of(tile_first, tile_stop, WINDOW: tl.constexpr, SPLIT: tl.constexpr, NUM: tl.constexpr):
    """Keys of a split and the number of the first one, functions of the tile's position alone."""
    if WINDOW:
        first = tl.maximum(tile_first - (WINDOW - 1), 0)
        return tile_first * 0 + SPLIT, first // SPLIT
    else:  # noqa: RET505 - both branches are compiled apart
        # splits grow with the position, so that NUM of them reach it
        return SPLIT * ((tile_stop + SPLIT * NUM - 1) // (SPLIT * NUM)), tile_first * 0


@triton.jit
def plane_of(
    plane_key,
    plane_value,
    bases,
    sequence,
    head,
    strides,
    DEVICE: tl.constexpr,
):
    """Pointers to a head's keys and values in one sequence's plane, and the strides of a row."""
    key_batch, key_row, key_head, value_batch, value_row, value_head = strides
    if DEVICE:
        kind = plane_key.dtype.element_ty
        key_address = tl.multiple_of(tl.load(bases + sequence * 2), 16)
        value_address = tl.multiple_of(tl.load(bases + sequence * 2 + 1), 16)
        key_at = key_address.to(tl.pointer_type(kind))
        value_at = value_address.to(tl.pointer_type(kind))
    else:
        key_at = plane_key + sequence * key_batch
        value_at = plane_value + sequence * value_batch
    return key_at + head * key_head, value_at + head * value_head, key_row, value_row


@triton.jit
def row_stored(
    plane,
    chunk,
    row,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PAD: tl.constexpr,
):
    """Copy the chunk's first token into a row of the plane."""
    dim = tl.arange(0, DIM_PAD)
    value_dim = tl.arange(0, VALUE_DIM_PAD)
    kept = tl.load(chunk[0] + dim, mask=dim < DIM)
    tl.store(plane[0] + row * plane[2] + dim, kept, mask=dim < DIM)
    kept = tl.load(chunk[1] + value_dim, mask=value_dim < VALUE_DIM)
    tl.store(plane[1] + row * plane[3] + value_dim, kept, mask=value_dim < VALUE_DIM)


@triton.jit
def merged(m, z, o, more_m, more_z, more_o):
    """Two sums as one; nothing seen is neutral."""
    top = tl.maximum(m, more_m)
    floor = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp2(m - floor)
    more = tl.exp2(more_m - floor)
    z = tl.fma(more_z, more, z * share)
    o = tl.fma(more_o, tl.broadcast_to(more[:, None], more_o.shape), o * share[:, None])
    return top, z, o


@triton.jit
def _capped(scores, scale, softcap):
    """The scores bent by `softcap * tanh(scores * scale / softcap)`, by the exponential."""
    x = scores * (scale / softcap)
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    bent = (1.0 - e) / (1.0 + e)
    return softcap * tl.where(x < 0, -bent, bent)


@triton.jit
def block_added(
    sums,
    queries,
    walk,
    offset,
    plane,
    chunk,
    place,
    rule,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    WRAPS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PHYSICAL: tl.constexpr,
    MASKED: tl.constexpr,
    BY_KEY: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Sums (m, z, o) with one block of keys more.

    Args:
        sums: so far; z for each key of a block when BY_KEY.
        queries: the tile's, and their places: positions after `walk`'s base.
        walk: first position (or row, in physical order) of the walk, and the positions that
            anything is read of, [low, high).
        offset: of the block in the walk.
        plane: pointers to a head's keys and values, strides of a row.
        chunk: the same of the step's own tensors, strides of a token, its first position.
        place: (position, row, seam) of the cursor, then row and position of the last query.
        rule: scale and softcap.
    """
    m, z, o = sums
    query, query_place = queries
    walk_first, low, high = walk
    key_at, value_at, key_row, value_row = plane
    origin_position, origin_row, seam, new_row, new_position = place
    scale, softcap = rule
    dim = tl.arange(0, DIM_PAD)
    value_dim = tl.arange(0, VALUE_DIM_PAD)
    step = offset + tl.arange(0, BLOCK)
    if PHYSICAL:
        row = walk_first + step
        back = row - origin_row
        position = origin_position + back + tl.where(back < 0, seam, 0)
        # the row of the new token may still be known as that of the one it replaces
        position = tl.where(row == new_row, new_position, position)
        key_place = (position - low).to(tl.int32)
        there = (position >= low) & (position < high) & (row < seam)
    else:
        position = walk_first + step
        row = origin_row + (position - origin_position)
        if WRAPS:
            # a choice for every row costs an eighth of the time of a long plane
            row -= tl.where(row >= seam, seam, 0)
        key_place = step
        there = (position >= low) & (position < high)
    keys = key_at + row * key_row
    values = value_at + row * value_row
    if HAS_CHUNK:
        chunk_key_at, chunk_value_at, chunk_key_token, chunk_value_token, chunk_first = chunk
        fresh = position >= chunk_first
        token = position - chunk_first
        keys = tl.where(fresh, chunk_key_at + token * chunk_key_token, keys)
        values = tl.where(fresh, chunk_value_at + token * chunk_value_token, values)
    if ALIGNED:
        # a choice of pointers, or an address from a table, forgets it: loads would be narrow
        keys = tl.multiple_of(keys, [16])
        values = tl.multiple_of(values, [16])
    keys = keys[:, None] + dim[None, :]
    values = values[:, None] + value_dim[None, :]
    if MASKED:
        key = tl.load(keys, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
    elif DIM < DIM_PAD:
        key = tl.load(keys, mask=(dim < DIM)[None, :], other=0.0)
    else:
        key = tl.load(keys)
    if INTERPRETED:
        # the interpreter multiplies bfloat16 as integers
        scores = tl.dot(query.to(tl.float32), tl.trans(key).to(tl.float32))
    else:
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    factor = scale * LOG2_E
    if HAS_SOFTCAP:
        scores = _capped(scores, scale, softcap)
        factor = LOG2_E
    if MASKED:
        seen = there[None, :] & (key_place[None, :] <= query_place[:, None])
        if WINDOW:
            seen &= key_place[None, :] > (query_place - WINDOW)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1) * factor)
    # a query that has seen nothing yet keeps m = -inf and sums of zero
    floor = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, -floor[:, None]))
    share = tl.exp2(m - floor)
    if BY_KEY:
        z = tl.fma(z, tl.broadcast_to(share[:, None], z.shape), weights)
    else:
        z = tl.fma(z, share, tl.sum(weights, 1))
    o = o * share[:, None]
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
    return top, z, o
