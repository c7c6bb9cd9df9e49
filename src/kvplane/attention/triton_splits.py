"""The Triton kernels for one query or a few: sums of splits beside each other, then their tree.

    positions    | split | split | split | split | ...       edges at fixed multiples
    quad         ((s0 + s1) + s2) + s3                       four splits, in their order
    sixteen      ((q0 + q1) + q2) + q3                       four quads, in their order
    total        the sixteens, in one reduction of fixed shape

A program holds 1, 4 or 16 splits (GRAIN) and adds what it holds in this tree; `combine` adds the
rest in the same tree (`triton_combine`). How many programs share a sequence may thus depend on the
batch: no bit does. Lane 0 is the first split that a tile's first query can see.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803, ANN001, ANN201, ANN202 - sizes known at compile time are in capitals
# ruff: noqa: PLR0915, PLR0912, C901 - one kernel is one function
# ruff: noqa: SIM102 - what is compiled apart, then what is asked at run time

import triton
import triton.language as tl

from kvplane.attention.triton_walk import (
    block_added,
    cursor_of,
    merged,
    plane_of,
    row_stored,
    splits_of,
)


@triton.jit
def _nothing(ROWS: tl.constexpr, DIMS: tl.constexpr):
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    return m, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DIMS), tl.float32)


@triton.jit(do_not_specialize=["first_query", "num_tokens", "first_key", "origin_row", "seam"])
def attend_splits(
    query,
    chunk_key,
    chunk_value,
    plane_key,
    plane_value,
    sums,
    peaks,
    bases,
    cursors,
    first_query,
    num_tokens,
    first_key,
    origin_row,
    seam,
    scale,
    softcap,
    query_batch,
    query_token,
    query_head,
    chunk_key_batch,
    chunk_key_token,
    chunk_key_head,
    chunk_value_batch,
    chunk_value_token,
    chunk_value_head,
    key_batch,
    key_row,
    key_head,
    value_batch,
    value_row,
    value_head,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    GRAIN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    WRAPS: tl.constexpr,
    STORES: tl.constexpr,
    DEVICE_CURSOR: tl.constexpr,
    DEVICE_BASES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PHYSICAL: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sums of one tile of queries over GRAIN splits.

    Grid (tiles * PROGRAMS, kv heads, sequences). Rows are (token, head of the group).
    """
    if EARLY:
        # launched before the one before has ended: nothing of its memory is touched until then
        tl.extra.cuda.gdc_wait()
        # the combining kernel may be launched now; it waits for this one's memory by itself
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) - tile * PROGRAMS
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, ROWS)
    member = rows % GROUP_PAD
    token = tile + rows // GROUP_PAD
    real = (rows < TOKENS * GROUP_PAD) & (member < GROUP)
    dim = tl.arange(0, DIM_PAD)
    query_at = query + sequence * query_batch + (head * GROUP + member) * query_head
    if TOKENS == 1:
        # asked for before the cursor has arrived: one wait for both
        real &= token < num_tokens
        queries = tl.load(
            (query_at + token * query_token)[:, None] + dim[None, :],
            mask=real[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
    first_query, origin, origin_row, seam = cursor_of(
        cursors, sequence, first_query, first_key, origin_row, seam, DEVICE_CURSOR
    )
    tile_first = (first_query // TOKENS + tile) * TOKENS
    if TOKENS > 1:
        token = (tile_first - first_query).to(tl.int32) + rows // GROUP_PAD
        real &= (token >= 0) & (token < num_tokens)
        queries = tl.load(
            (query_at + token.to(tl.int64) * query_token)[:, None] + dim[None, :],
            mask=real[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
    queries = queries.to(plane_key.dtype.element_ty)
    # queries of the tile that exist, and keys that any of them sees
    first = tl.maximum(tile_first, first_query)
    high = tl.minimum(tile_first + TOKENS, first_query + num_tokens)
    if first >= high:
        return
    low = origin
    if WINDOW:
        low = tl.maximum(low, first - (WINDOW - 1))
    size, first_split = splits_of(tile_first, tile_first + TOKENS, WINDOW, SPLIT, NUM_SPLITS)
    # the part of the keys that is this program's, in positions or in rows
    if PHYSICAL:
        begin = program * GRAIN * size
        walk_first = begin
        walk_stop = tl.minimum(begin + GRAIN * size, seam)
    else:
        begin = (first_split + program * GRAIN) * size
        walk_first = tl.maximum(begin, low)
        walk_stop = tl.minimum(begin + GRAIN * size, high)
    if walk_first >= walk_stop:
        return
    plane = plane_of(
        plane_key,
        plane_value,
        bases,
        sequence,
        head,
        (key_batch, key_row, key_head, value_batch, value_row, value_head),
        DEVICE_BASES,
    )
    chunk = (
        chunk_key + sequence * chunk_key_batch + head * chunk_key_head,
        chunk_value + sequence * chunk_value_batch + head * chunk_value_head,
        chunk_key_token,
        chunk_value_token,
        first_query,
    )
    new_position = first_query + num_tokens - 1
    new_row = origin_row + (new_position - origin)
    if WRAPS or PHYSICAL:
        new_row -= tl.where(new_row >= seam, seam, 0)

    if STORES:
        # one query, whose own row no other program reads: it is read back like the others
        mine = (new_position >= walk_first) & (new_position < walk_stop)
        if PHYSICAL:
            mine = (new_row >= walk_first) & (new_row < walk_stop)
        if mine:
            row_stored(plane, chunk, new_row, DIM, DIM_PAD, VALUE_DIM, VALUE_DIM_PAD)
        tl.debug_barrier()

    block_first = (walk_first // BLOCK) * BLOCK
    base = block_first
    if PHYSICAL:
        base = low
    # 32 bits are enough between two positions of one walk
    query_place = (first_query + token - base).to(tl.int32)
    lane = ((block_first - begin) // size).to(tl.int32)
    blocks = (size // BLOCK).to(tl.int32)
    left = blocks * (lane + 1) - ((block_first - begin) // BLOCK).to(tl.int32)
    m, z, o = _nothing(ROWS, VALUE_DIM_PAD)
    # of a split, z is summed key by key over its blocks, and once over the keys at its end
    keys_z = tl.zeros((ROWS, BLOCK), tl.float32)
    quad_m, quad_z, quad_o = _nothing(ROWS, VALUE_DIM_PAD)
    sixteen_m, sixteen_z, sixteen_o = _nothing(ROWS, VALUE_DIM_PAD)
    for offset in range(0, (walk_stop - block_first).to(tl.int32), BLOCK):
        m, keys_z, o = block_added(
            (m, keys_z, o),
            (queries, query_place),
            (block_first, low if PHYSICAL else walk_first, high if PHYSICAL else walk_stop),
            offset,
            plane,
            chunk,
            (origin, origin_row, seam, new_row, new_position),
            (scale, softcap),
            WINDOW,
            DIM,
            DIM_PAD,
            VALUE_DIM,
            VALUE_DIM_PAD,
            BLOCK,
            HAS_CHUNK,
            ALIGNED,
            WRAPS,
            HAS_SOFTCAP,
            PHYSICAL,
            True,  # noqa: FBT003 - masked
            True,  # noqa: FBT003 - z key by key
            PRECISION,
            INTERPRETED,
        )
        if GRAIN > 1:
            left -= 1
            if left == 0:
                z = tl.sum(keys_z, 1)
                quad_m, quad_z, quad_o = merged(quad_m, quad_z, quad_o, m, z, o)
                m, z, o = _nothing(ROWS, VALUE_DIM_PAD)
                keys_z = tl.zeros((ROWS, BLOCK), tl.float32)
                if GRAIN > 4:  # noqa: PLR2004 - a quad
                    if lane % 4 == 3:  # noqa: PLR2004 - its last
                        sixteen_m, sixteen_z, sixteen_o = merged(
                            sixteen_m, sixteen_z, sixteen_o, quad_m, quad_z, quad_o
                        )
                        quad_m, quad_z, quad_o = _nothing(ROWS, VALUE_DIM_PAD)
                lane += 1
                left = blocks
    # what has begun and not ended; nothing is neutral
    z = tl.sum(keys_z, 1)
    if GRAIN > 1:
        m, z, o = merged(quad_m, quad_z, quad_o, m, z, o)
    if GRAIN > 4:  # noqa: PLR2004
        m, z, o = merged(sixteen_m, sixteen_z, sixteen_o, m, z, o)

    tiles = tl.num_programs(0) // PROGRAMS
    at = (sequence * tl.num_programs(1) + head) * tiles + tile
    at = (at * PROGRAMS + program) * ROWS + rows
    tl.store(peaks + at * 2, m, mask=real)
    tl.store(peaks + at * 2 + 1, z, mask=real)
    value_dim = tl.arange(0, VALUE_DIM_PAD)
    tl.store(
        sums + at[:, None] * VALUE_DIM_PAD + value_dim[None, :],
        o,
        mask=real[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
