"""The Triton kernel that adds up the sums of `triton_splits`, in the tree drawn there."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803, ANN001, ANN201, ANN202 - sizes known at compile time are in capitals
# ruff: noqa: N806, PLR0915, C901 - and so is what follows from them; one kernel is one function

import triton
import triton.language as tl

from kvplane.attention.triton_walk import LOG2_E, cursor_of, merged, splits_of


@triton.jit
def _sum_of(at, offset: tl.constexpr, there, inside, DIM_PAD: tl.constexpr):
    """(m, z, o) of one program for each lane; nothing where no program wrote."""
    peaks, sums = at
    m = tl.load(peaks + offset * 2, mask=there, other=float("-inf"))
    z = tl.load(peaks + offset * 2 + 1, mask=there, other=0.0)
    o = tl.load(sums + offset * DIM_PAD, mask=there[:, None] & inside[None, :], other=0.0)
    return m, z, o


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
    GRAIN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DEVICE_CURSOR: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PHYSICAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The output of one query head, DIMS dimensions of it.

    Grid (tokens * chunks of DIMS, heads, sequences).
    """
    CHUNKS: tl.constexpr = (VALUE_DIM + DIMS - 1) // DIMS
    LANES: tl.constexpr = NUM_SPLITS // 16
    PER_LANE: tl.constexpr = 16 // GRAIN
    token = tl.program_id(0) // CHUNKS
    value_dim = (tl.program_id(0) - token * CHUNKS) * DIMS + tl.arange(0, DIMS)
    inside = value_dim < VALUE_DIM
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    first_query, origin, origin_row, seam = cursor_of(
        cursors, sequence, first_query, first_key, origin_row, seam, DEVICE_CURSOR
    )
    position = first_query + token
    tile_first = (position // TOKENS) * TOKENS
    tile = position // TOKENS - first_query // TOKENS
    low = origin
    if WINDOW:
        low = tl.maximum(low, tl.maximum(tile_first, first_query) - (WINDOW - 1))
    high = tl.minimum(tile_first + TOKENS, first_query + num_tokens)
    size, first_split = splits_of(tile_first, tile_first + TOKENS, WINDOW, SPLIT, NUM_SPLITS)
    if PHYSICAL:
        first_split = first_split * 0
        low = low * 0
        high = seam
    row = (position - tile_first) * GROUP_PAD + head % GROUP
    at = (sequence * (tl.num_programs(1) // GROUP) + head // GROUP) * tiles + tile
    lane = tl.arange(0, LANES).to(tl.int64)
    at = (at * PROGRAMS + lane * PER_LANE) * ROWS + row
    # pointers to the first program of each lane; the others are at fixed distances
    firsts = (peaks + at * 2, sums + at[:, None] * VALUE_DIM_PAD + value_dim[None, :])
    step = GRAIN * size
    begin = (first_split + lane * (PER_LANE * GRAIN)) * size
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m, z, o = _sum_of(firsts, 0, (begin < high) & (begin + step > low), inside, VALUE_DIM_PAD)
    quad_m, quad_z, quad_o = m, z, o
    for number in tl.static_range(1, PER_LANE):
        begin += step
        there = (begin < high) & (begin + step > low)
        part_m, part_z, part_o = _sum_of(firsts, number * ROWS, there, inside, VALUE_DIM_PAD)
        if GRAIN > 1:
            m, z, o = merged(m, z, o, part_m, part_z, part_o)
        elif number % 4 == 0:
            quad_m, quad_z, quad_o = part_m, part_z, part_o
        else:
            quad_m, quad_z, quad_o = merged(quad_m, quad_z, quad_o, part_m, part_z, part_o)
            if number == 3:  # noqa: PLR2004 - the end of the first quad
                m, z, o = quad_m, quad_z, quad_o
            elif number % 4 == 3:  # noqa: PLR2004
                m, z, o = merged(m, z, o, quad_m, quad_z, quad_o)
    top = tl.max(m, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    share = tl.exp2(m - top)
    total = tl.sum(z * share, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    # a zero is positive however many empty sums were added
    result = tl.sum(o * share[:, None], 0) / total + 0.0
    out_at = out + sequence * out_batch + token * out_token + head * out_head + value_dim
    tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)
