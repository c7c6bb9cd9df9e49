"""Which rows go where: cuts, blocks that divide nothing, heads of several workers."""

import pytest

from kvplane.errors import ArgumentError
from kvplane.integrations.vllm.planning import (
    PagedGroup,
    Part,
    gathered_heads,
    half_filled,
    local_heads,
    parts,
    wished_cuts,
)


def sliding(window, block_size):
    return PagedGroup(layers=(0,), block_size=block_size, sliding_window=window)


@pytest.mark.parametrize("block_size", [16, 32, 48, 128, 384])
def test_each_position_is_in_the_slot_of_its_block(block_size):
    table = [7, 3, 9, *range(20, 60)]
    found = {}
    for part in parts(table, block_size, 5, 600):
        for row in range(part.num_rows):
            found[part.first + row] = (part.block, part.offset + row)
    assert found == {
        position: (table[position // block_size], position % block_size)
        for position in range(5, 600)
    }


def test_dead_and_missing_blocks_are_refused():
    assert list(parts([0, 4], 16, 16, 18)) == [Part(4, 0, 16, 2)]
    for first, stop in ((15, 17), (16, 40)):
        with pytest.raises(ArgumentError):
            list(parts([0, 4], 16, first, stop))


def test_a_window_of_4096_in_blocks_of_32_needs_129_at_most():
    group = sliding(4096, 32)
    assert group.num_blocks(98_012) == 129
    assert max(map(group.num_blocks, range(97_000, 99_000))) == -(-4095 // 32) + 1


@pytest.mark.parametrize(
    ("window", "block_size"), [(1, 16), (7, 16), (16, 16), (17, 16), (100, 48)]
)
def test_live_blocks_are_those_that_hold_the_window(window, block_size):
    group = sliding(window, block_size)
    for position in range(1, 500):
        rows = range(max(0, position - (window - 1)), position)
        blocks = {row // block_size for row in rows}
        if blocks:
            assert group.num_blocks(position) == len(blocks)


def test_a_block_that_a_load_fills_in_part_is_named():
    group = sliding(100, 128)
    table = [0, 11, 12]
    # rows [201, 300): block 11 lacks those from 128 to 200
    assert half_filled(group, table, 0, 300) == 11
    # the engine holds the rows below 256 itself
    assert half_filled(group, table, 256, 300) is None
    # the window begins on a block's edge
    assert half_filled(group, table, 0, 256 + 99) is None
    assert half_filled(sliding(None, 128), [5, 6, 7], 0, 300) is None


def test_cuts_are_wished_at_the_end_and_at_edges_before_the_last_token():
    assert wished_cuts(700, [100, None], [128], step=0) == [512, 640, 700]
    # the same prompt goes on from its last edge before the last token
    assert wished_cuts(512, [100, None], [128], step=0) == [256, 384, 512]
    assert wished_cuts(100, [None], [128], step=None) == [100]
    assert wished_cuts(5000, [100, None], [128], step=None) == [2048, 4096, 4864, 4992, 5000]
    assert wished_cuts(9000, [1024], [128], step=None) == [4096, 8192, 8960, 9000]


def test_heads_are_sliced_or_replicated():
    assert [list(local_heads(4, rank, 2)) for rank in (0, 1)] == [[0, 1], [2, 3]]
    assert [list(local_heads(1, rank, 2)) for rank in (0, 1)] == [[0], [0]]
    assert list(local_heads(4, 0, 1)) == [0, 1, 2, 3]
    with pytest.raises(ArgumentError):
        local_heads(3, 0, 2)


@pytest.mark.parametrize(("heads", "size"), [(4, 2), (1, 2), (2, 2), (8, 1), (2, 4)])
def test_gathered_heads_are_the_models_in_order(heads, size):
    held = [head for rank in range(size) for head in local_heads(heads, rank, size)]
    assert [held[place] for place in gathered_heads(heads, size)] == list(range(heads))
