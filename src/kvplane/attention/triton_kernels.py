"""The two Triton kernels of attention: partial sums over keys, then their combination.

positions     | split s | split s+1 | ...            edges at fixed multiples
program       walks its split block by block, keeps m, z and o (see `partials`)
combine       adds the splits' sums, always in the same tree: lane 0 is a query's first split
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803, ANN001, ANN201 - sizes known at compile time are in capitals, as in Triton's own
# ruff: noqa: PLR0915, C901, PLR0912 - one kernel is one function

import triton
import triton.language as tl

from kvplane.attention.triton_walk import LOG2_E, cursor_of, first_split_of, split_size_of, walk


@triton.jit(do_not_specialize=["first_query", "num_tokens", "first_key", "origin_row", "seam"])
def attend(
    query,
    chunk_key,
    chunk_value,
    plane_key,
    plane_value,
    out,
    sums,
    peaks,
    sinks,
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
    out_batch,
    out_token,
    out_head,
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
    HAS_CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    STORES: tl.constexpr,
    DEVICE_CURSOR: tl.constexpr,
    DEVICE_BASES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PHYSICAL: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sums of one tile of queries over one split, or the output when there is one split.

    Grid (tiles * NUM_SPLITS, kv heads, sequences). Rows of a tile are (token, head of the group).
    """
    if EARLY:
        # the combining kernel may be launched now; it waits for this one's memory by itself
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) // NUM_SPLITS
    split = tl.program_id(0) - tile * NUM_SPLITS
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
    walk_first = low
    walk_stop = high
    if PHYSICAL:
        size = split_size_of(tile_first + TOKENS, WINDOW, SPLIT, NUM_SPLITS)
        walk_first = split * size
        walk_stop = tl.minimum(walk_first + size, seam)
        if walk_first >= walk_stop:
            return
    elif NUM_SPLITS > 1:
        size = split_size_of(tile_first + TOKENS, WINDOW, SPLIT, NUM_SPLITS)
        begin = (first_split_of(tile_first, size, WINDOW) + split) * size
        walk_first = tl.maximum(begin, low)
        walk_stop = tl.minimum(begin + size, high)
        if walk_first >= walk_stop:
            return
        low = walk_first
        high = walk_stop
    if DEVICE_BASES:
        kind = plane_key.dtype.element_ty
        key_address = tl.multiple_of(tl.load(bases + sequence * 2), 16)
        value_address = tl.multiple_of(tl.load(bases + sequence * 2 + 1), 16)
        key_at = key_address.to(tl.pointer_type(kind))
        value_at = value_address.to(tl.pointer_type(kind))
    else:
        key_at = plane_key + sequence * key_batch
        value_at = plane_value + sequence * value_batch
    key_at += head * key_head
    value_at += head * value_head
    chunk_key_at = chunk_key
    chunk_value_at = chunk_value
    if HAS_CHUNK:
        chunk_key_at += sequence * chunk_key_batch + head * chunk_key_head
        chunk_value_at += sequence * chunk_value_batch + head * chunk_value_head

    query_position = first_query + token
    new_position = first_query + num_tokens - 1
    new_row = origin_row + (new_position - origin)
    new_row -= tl.where(new_row >= seam, seam, 0)

    m = tl.full((ROWS,), float("-inf"), tl.float32)
    z = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, VALUE_DIM_PAD), tl.float32)
    # blocks that every query sees whole need no masks: [bare_first, bare_stop)
    block_first = (walk_first // BLOCK) * BLOCK
    bare_first = walk_stop
    bare_stop = walk_stop
    if NUM_SPLITS == 1 and not PHYSICAL:
        seen_first = low
        if WINDOW:
            seen_first = tl.maximum(low, high - WINDOW)
        bare_first = ((seen_first + BLOCK - 1) // BLOCK) * BLOCK
        bare_stop = ((first + 1) // BLOCK) * BLOCK
        bare_first = tl.minimum(bare_first, walk_stop)
        bare_stop = tl.maximum(bare_stop, bare_first)
    for part in tl.static_range(3):
        if part == 0:
            part_first = block_first
            part_stop = bare_first
        elif part == 1:
            part_first = bare_first
            part_stop = bare_stop
        else:
            part_first = bare_stop
            part_stop = walk_stop
        if NUM_SPLITS == 1 or part == 0:
            m, z, o = walk(
                m,
                z,
                o,
                queries,
                query_position,
                part_first,
                (part_stop - part_first).to(tl.int32),
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
                first_query,
                origin,
                origin_row,
                seam,
                new_row,
                new_position,
                scale,
                softcap,
                WINDOW,
                DIM,
                DIM_PAD,
                VALUE_DIM,
                VALUE_DIM_PAD,
                BLOCK,
                HAS_CHUNK,
                ALIGNED,
                HAS_SOFTCAP,
                PHYSICAL,
                part != 1,
                PRECISION,
                INTERPRETED,
            )

    if STORES:
        # one query, whose own row no other program reads
        mine = (new_position >= walk_first) & (new_position < walk_stop)
        if PHYSICAL:
            mine = (new_row >= walk_first) & (new_row < walk_stop)
        if mine:
            kept = tl.load(chunk_key_at + dim, mask=dim < DIM)
            tl.store(key_at + new_row * key_row + dim, kept, mask=dim < DIM)
            width = tl.arange(0, VALUE_DIM_PAD)
            kept = tl.load(chunk_value_at + width, mask=width < VALUE_DIM)
            tl.store(value_at + new_row * value_row + width, kept, mask=width < VALUE_DIM)

    value_dim = tl.arange(0, VALUE_DIM_PAD)
    factor = LOG2_E if HAS_SOFTCAP else scale * LOG2_E
    if NUM_SPLITS > 1:
        tiles = tl.num_programs(0) // NUM_SPLITS
        at = (sequence * tl.num_programs(1) + head) * tiles + tile
        at = (at * NUM_SPLITS + split) * ROWS + rows
        tl.store(peaks + at * 2, m * factor)
        tl.store(peaks + at * 2 + 1, z)
        tl.store(sums + at[:, None] * VALUE_DIM_PAD + value_dim[None, :], o)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head * GROUP + member, mask=real, other=0.0)
            sink = sink.to(tl.float32) * LOG2_E
            top = tl.maximum(m * factor, sink)
            share = tl.exp2(m * factor - top)
            z = z * share + tl.exp2(sink - top)
            o = o * share[:, None]
        out_at = out + sequence * out_batch + token * out_token + (head * GROUP + member) * out_head
        mask = real[:, None] & (value_dim < VALUE_DIM)[None, :]
        o = o / tl.where(real, z, 1.0)[:, None]
        tl.store(out_at[:, None] + value_dim[None, :], o.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_query", "num_tokens", "first_key", "origin_row", "seam"])
def combine(
    out,
    sums,
    peaks,
    sinks,
    cursors,
    first_query,
    num_tokens,
    first_key,
    origin_row,
    seam,
    tiles,
    out_batch,
    out_token,
    out_head,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PAD: tl.constexpr,
    DIMS: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DEVICE_CURSOR: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PHYSICAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The output of one query head, `DIMS` dimensions of it, from the sums of its splits.

    Grid (tokens * chunks of DIMS, heads, sequences).
    """
    chunks: tl.constexpr = (VALUE_DIM + DIMS - 1) // DIMS
    token = tl.program_id(0) // chunks
    value_dim = (tl.program_id(0) - token * chunks) * DIMS + tl.arange(0, DIMS)
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    first_query, origin, origin_row, seam = cursor_of(
        cursors, sequence, first_query, first_key, origin_row, seam, DEVICE_CURSOR
    )
    position = first_query + token
    tile = position // TOKENS - first_query // TOKENS
    tile_first = (position // TOKENS) * TOKENS
    low = origin
    if WINDOW:
        low = tl.maximum(low, tl.maximum(tile_first, first_query) - (WINDOW - 1))
    high = tl.minimum(tile_first + TOKENS, first_query + num_tokens)
    size = split_size_of(tile_first + TOKENS, WINDOW, SPLIT, NUM_SPLITS)
    lane = tl.arange(0, NUM_SPLITS)
    if PHYSICAL:
        begin = lane * size
        there = begin < seam
    else:
        begin = (first_split_of(tile_first, size, WINDOW) + lane) * size
        there = tl.maximum(begin, low) < tl.minimum(begin + size, high)
    row = (position - tile_first) * GROUP_PAD + head % GROUP
    at = (sequence * (tl.num_programs(1) // GROUP) + head // GROUP) * tiles + tile
    at = (at * NUM_SPLITS + lane) * ROWS + row
    if EARLY:
        tl.extra.cuda.gdc_wait()
    peak = tl.load(peaks + at * 2, mask=there, other=float("-inf"))
    z = tl.load(peaks + at * 2 + 1, mask=there, other=0.0)
    mask = there[:, None] & (value_dim < VALUE_DIM)[None, :]
    o = tl.load(sums + at[:, None] * VALUE_DIM_PAD + value_dim[None, :], mask=mask, other=0.0)
    top = tl.max(peak, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    share = tl.exp2(peak - top)
    total = tl.sum(z * share, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    result = tl.sum(o * share[:, None], 0) / total
    out_at = out + sequence * out_batch + token * out_token + head * out_head + value_dim
    tl.store(out_at, result.to(out.dtype.element_ty), mask=value_dim < VALUE_DIM)
