"""The Triton kernel for many queries, or a short window: one program walks a tile's keys.

    keys     | old window in the ring ............. | chunk ........ |
    tile                  low [ masked | every query sees it | masked ] high

Blocks that every query of the tile sees whole need no masks; the arithmetic is the same.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803, ANN001, ANN201 - sizes known at compile time are in capitals
# ruff: noqa: PLR0915, C901 - one kernel is one function

import triton
import triton.language as tl

from kvplane.attention.triton_walk import LOG2_E, block_added, cursor_of, plane_of, row_stored


@triton.jit(do_not_specialize=["first_query", "num_tokens", "first_key", "origin_row", "seam"])
def attend_tiles(
    query,
    chunk_key,
    chunk_value,
    plane_key,
    plane_value,
    out,
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
    HAS_CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    WRAPS: tl.constexpr,
    STORES: tl.constexpr,
    DEVICE_CURSOR: tl.constexpr,
    DEVICE_BASES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (tiles, kv heads, sequences). Rows of a tile are (token, head of the group)."""
    if EARLY:
        # launched before the one before has ended: nothing of its memory is touched until then
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    first_query, origin, origin_row, seam = cursor_of(
        cursors, sequence, first_query, first_key, origin_row, seam, DEVICE_CURSOR
    )
    tile_first = (first_query // TOKENS + tl.program_id(0)) * TOKENS
    # queries of the tile that exist, and keys that any of them sees
    first = tl.maximum(tile_first, first_query)
    high = tl.minimum(tile_first + TOKENS, first_query + num_tokens)
    if first >= high:
        return
    low = origin
    if WINDOW:
        low = tl.maximum(low, first - (WINDOW - 1))
    rows = tl.arange(0, ROWS)
    member = rows % GROUP_PAD
    token = tile_first - first_query + rows // GROUP_PAD
    real = (rows < TOKENS * GROUP_PAD) & (member < GROUP) & (token >= 0) & (token < num_tokens)
    dim = tl.arange(0, DIM_PAD)
    query_at = query + sequence * query_batch + token * query_token
    query_at += (head * GROUP + member) * query_head
    queries = tl.load(
        query_at[:, None] + dim[None, :], mask=real[:, None] & (dim < DIM)[None, :], other=0.0
    )
    queries = queries.to(plane_key.dtype.element_ty)
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
    if STORES:
        # one query, whose own row is then read like the others
        row = origin_row + (first_query - origin)
        if WRAPS:
            row -= tl.where(row >= seam, seam, 0)
        row_stored(plane, chunk, row, DIM, DIM_PAD, VALUE_DIM, VALUE_DIM_PAD)
        tl.debug_barrier()
    seen_first = low
    if WINDOW:
        seen_first = tl.maximum(low, high - WINDOW)
    bare_first = tl.minimum(((seen_first + BLOCK - 1) // BLOCK) * BLOCK, high)
    bare_stop = tl.maximum(((first + 1) // BLOCK) * BLOCK, bare_first)
    if TOKENS == 1:
        # one short loop with masks is sooner done than three
        bare_first = high
        bare_stop = high
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    z = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, VALUE_DIM_PAD), tl.float32)
    for part in tl.static_range(3):
        part_first = (low // BLOCK) * BLOCK
        part_stop = bare_first
        if part == 1:
            part_first = bare_first
            part_stop = bare_stop
        if part == 2:  # noqa: PLR2004 - of three
            part_first = bare_stop
            part_stop = high
        # 32 bits are enough between two positions of one walk
        query_place = (first_query + token - part_first).to(tl.int32)
        for offset in range(0, (part_stop - part_first).to(tl.int32), BLOCK):
            m, z, o = block_added(
                (m, z, o),
                (queries, query_place),
                (part_first, low, high),
                offset,
                plane,
                chunk,
                (origin, origin_row, seam, origin_row, origin),
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
                False,  # noqa: FBT003 - logical order
                part != 1,
                False,  # noqa: FBT003 - z of whole blocks
                PRECISION,
                INTERPRETED,
            )
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + member, mask=real, other=0.0)
        sink = sink.to(tl.float32) * LOG2_E
        top = tl.maximum(m, sink)
        share = tl.exp2(m - top)
        z = tl.fma(z, share, tl.exp2(sink - top))
        o = o * share[:, None]
    o = o / tl.where(real, z, 1.0)[:, None]
    value_dim = tl.arange(0, VALUE_DIM_PAD)
    out_at = out + sequence * out_batch + token * out_token + (head * GROUP + member) * out_head
    tl.store(
        out_at[:, None] + value_dim[None, :],
        o.to(out.dtype.element_ty),
        mask=real[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
