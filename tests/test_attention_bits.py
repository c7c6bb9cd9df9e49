import itertools
import random
from unittest import mock

import pytest
import torch

from histories import decode, in_chunks, make_history, prefill, ring_of
from kvplane.attention import blocked, blocks, physical
from row_planes import LAYOUTS, same_bits

W = 2048
EDGES = (2047, 2048, 2049, 2559, 2560, 2561, 4097)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def decoded(history, first, stop, *, window, **rule):
    """Every position alone, one decode call each: what all other ways must equal."""
    parts = [
        decode(blocked.attend, history, position, window=window, **rule)
        for position in range(first, stop)
    ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("window", [1, 4, 9, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_rotation_and_layout_of_a_ring_gives_the_same_bits(window, dtype):
    history = make_history(70, heads=2, dtype=dtype)
    for position in (window - 1, 69):
        outs = [
            decode(blocked.attend, history, position, window=window, rotation=row, layout=layout)
            for row, layout in itertools.product(range(window), LAYOUTS)
        ]

        assert all(same_bits(outs[0], out) for out in outs)


@pytest.mark.parametrize("position", EDGES)
def test_a_long_window_gives_the_same_bits_at_any_rotation(position):
    history = make_history(position + 1, first=max(0, position - W), heads=2, groups=4)
    outs = [
        decode(blocked.attend, history, position, window=W, rotation=row, layout=layout)
        for row in (0, 1, 777, 2047)
        for layout in LAYOUTS
    ]

    assert all(same_bits(outs[0], out) for out in outs)


@pytest.mark.parametrize("stop", [255, 256, 257, 511, 512, 513])
@pytest.mark.parametrize("window", [64, 128, 129, 513, None])
def test_a_prompt_gives_the_same_bits_whole_and_one_token_at_a_time(stop, window):
    history = make_history(stop, dtype=torch.bfloat16)
    first = stop - 40
    whole = prefill(blocked.attend, history, 0, stop, window=window)

    assert same_bits(decoded(history, first, stop, window=window), whole[:, first:])


@pytest.mark.parametrize("window", [1, 4, 32, 64, None])
def test_chunks_of_any_length_give_the_same_bits(window):
    history = make_history(300, heads=2)
    whole = prefill(blocked.attend, history, 0, 300, window=window)
    for length in range(1, 18):
        edges = [*range(200, 300, length), 300]
        parts = in_chunks(blocked.attend, history, edges, window=window, rotation=length)

        assert same_bits(whole[:, 200:], parts), length


@pytest.mark.parametrize("seed", range(6))
def test_odd_splits_give_the_same_bits(seed):
    draw = random.Random(seed)
    history = make_history(700, groups=3, seed=seed)
    window = draw.choice([5, 100, 257, None])
    edges = sorted({0, 700, *(draw.randrange(700) for _ in range(9))})
    parts = in_chunks(blocked.attend, history, edges, window=window, layout=LAYOUTS[seed % 2])

    assert same_bits(prefill(blocked.attend, history, 0, 700, window=window), parts)


@pytest.mark.parametrize("position", EDGES)
def test_the_end_of_a_chunk_over_a_long_window_equals_a_decode_step(position):
    history = make_history(position + 1, first=max(0, position - W - 20), heads=2)
    out = prefill(blocked.attend, history, position - 16, position + 1, window=W, rotation=99)

    assert same_bits(decode(blocked.attend, history, position, window=W, rotation=5), out[:, -1:])


def test_a_stored_chunk_and_one_beside_the_rows_give_the_same_bits():
    history = make_history(60)
    beside = prefill(blocked.attend, history, 40, 60, window=32)
    plane, runs = ring_of(history, 9, 60, capacity=64, rotation=50)
    placed = {"first_key": 9, "first_query": 40, "window": 32, "scale": 0.25}
    stored = blocked.attend(plane, runs, history.queries(40, 60), None, None, **placed)

    assert same_bits(beside, stored)


def test_spans_of_blocks_close_at_absolute_positions():
    # a span is 8,192 positions; the chunk's first query sees a block that later ones do not
    assert 8192 == blocks.SPAN * 256
    history = make_history(8560, dims=(8, 8))
    whole = prefill(blocked.attend, history, 8100, 8560, window=8200)
    for position in (8191, 8192, 8193, 8467, 8559):
        alone = decode(blocked.attend, history, position, window=8200, rotation=position)

        assert same_bits(alone[:, 0], whole[:, position - 8100])


def test_a_query_that_sees_nothing_of_a_span_needs_no_second_look():
    history = make_history(8230, first=8100)
    with mock.patch.object(blocks, "_attended", wraps=blocks._attended) as computed:
        out = prefill(blocked.attend, history, 8180, 8230, window=16)

    assert 1 == computed.call_count
    assert same_bits(decoded(history, 8180, 8230, window=16), out)


SHAPES = [
    *((dims, 2) for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (80, 80))),
    *(((32, 32), groups) for groups in (1, 3, 4, 5, 6, 7, 8, 12, 16)),
]


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize(("dims", "groups"), SHAPES, ids=str)
def test_every_shape_gives_the_same_bits_in_chunks_and_alone(dims, groups, heads, threads):
    history = make_history(290, heads=heads, groups=groups, dims=dims, dtype=torch.bfloat16)
    alone = [
        decode(blocked.attend, history, position, window=100, rotation=3 * position)
        for position in range(250, 262)
    ]
    # 2 and 7 threads were seen to share a product in ways that show; 7 do not wait by spinning
    threads(7)
    whole = prefill(blocked.attend, history, 231, 290, window=100, rotation=11)

    assert same_bits(torch.cat(alone, dim=1), whole[:, 19:31])


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize(("heads", "groups"), [(1, 3), (2, 4)])
def test_the_number_of_threads_changes_no_bit(count, heads, groups, threads):
    history = make_history(610, heads=heads, groups=groups, dims=(128, 128))
    sinks = torch.linspace(-1, 1, heads * groups)
    rule = {"window": 512, "softcap": 20.0, "sinks": sinks}
    threads(1)
    one = prefill(blocked.attend, history, 606, 610, **rule)
    single = decode(blocked.attend, history, 609, **rule)
    threads(count)

    assert same_bits(one, prefill(blocked.attend, history, 606, 610, **rule))
    assert same_bits(single, decode(blocked.attend, history, 609, **rule))


def test_how_many_tiles_go_together_changes_no_bit():
    history = make_history(600, groups=2)
    wide = prefill(blocked.attend, history, 100, 600, window=300)
    with mock.patch.object(blocks, "NUM_SCORES", 1):
        narrow = prefill(blocked.attend, history, 100, 600, window=300)

    assert same_bits(wide, narrow)


def test_a_sequence_alone_and_in_a_batch_gives_the_same_bits():
    histories = [make_history(60, heads=2, seed=seed) for seed in range(3)]
    histories[1].value[40] = torch.nan
    planes = [ring_of(one, 9, 40, capacity=31, rotation=7) for one in histories]
    plane, runs = planes[0]
    plane.key = torch.cat([one.key for one, _ in planes])
    plane.value = torch.cat([one.value for one, _ in planes])
    chunks = [one.rows(40, 60) for one in histories]
    together = blocked.attend(
        plane,
        runs,
        torch.cat([one.queries(40, 60) for one in histories]),
        torch.cat([key for key, _ in chunks]),
        torch.cat([value for _, value in chunks]),
        first_key=9,
        first_query=40,
        window=32,
        scale=0.25,
    )
    for place in (0, 2):
        alone = prefill(blocked.attend, histories[place], 40, 60, window=32)

        assert same_bits(alone[0], together[place])


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("part", ["key", "value", "query"])
def test_what_a_query_does_not_see_may_be_infinite_or_nan(part, bad):
    history = make_history(300, groups=2)
    sound = prefill(blocked.attend, history, 240, 300, window=20)
    getattr(history, part)[270] = bad
    whole = prefill(blocked.attend, history, 240, 300, window=20)
    alone = decoded(history, 240, 300, window=20)
    reached = range(270, 271) if part == "query" else range(270, 290)
    others = [place for place in range(60) if place + 240 not in reached]

    assert same_bits(sound[:, others], whole[:, others])
    assert same_bits(alone[:, others], whole[:, others])
    assert torch.equal(alone.isfinite(), whole.isfinite())


def test_a_zero_has_no_sign_that_could_tell_what_was_added_to_it():
    history = make_history(3, groups=1, dtype=torch.float32)
    history.key[:] = 0.0
    history.value[:] = 0.0
    # a third of the smallest number there is
    history.value[1] = -(2.0**-149)
    out = decode(blocked.attend, history, 2, window=None)

    assert torch.all(out == 0)
    assert not out.signbit().any()


@pytest.mark.parametrize("dims", [(5, 7), (1, 3), (16, 16)])
@pytest.mark.parametrize("heads", [1, 3])
def test_every_tile_lies_on_a_whole_cache_line(dims, heads):
    grid = blocks.grid_of(heads, heads)
    rows = blocks._tiled(torch.randn(40, heads, dims[0]), 0, 5, grid)

    assert [0] * 5 == [tile.data_ptr() % 64 for tile in rows]


@pytest.mark.parametrize("window", [4, 32, 300])
def test_physical_bits_are_equal_at_the_same_rotation_and_differ_at_another(window):
    history = make_history(700, heads=2)

    def at(rotation, position):
        return decode(physical.attend, history, position, window=window, rotation=rotation)

    steps = range(600, 664)

    assert all(same_bits(at(3, position), at(3, position)) for position in steps[:4])
    assert any(not same_bits(at(3, position), at(0, position)) for position in steps)


def test_physical_order_is_blocked_order_where_rows_are_positions():
    history = make_history(600)
    for position in (0, 255, 256, 599):
        outs = [
            decode(attend, history, position, window=None)
            for attend in (blocked.attend, physical.attend)
        ]

        assert same_bits(*outs)


def test_physical_order_does_not_see_that_a_ring_is_shown_twice():
    history = make_history(400)
    plane, runs = ring_of(history, 100, 400, capacity=300, rotation=220)
    rule = {"first_key": 100, "first_query": 399, "window": 300, "scale": 0.25}
    query = history.queries(399, 400)
    once = physical.attend(plane, runs, query, None, None, **rule)
    plane.key = torch.cat([plane.key, plane.key], dim=1)
    plane.value = torch.cat([plane.value, plane.value], dim=1)
    plane.unrolled = True

    assert same_bits(once, physical.attend(plane, [range(220, 520)], query, None, None, **rule))
