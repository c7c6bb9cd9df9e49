"""Table B, and what every schedule keeps to: each row once, in the order rows become final."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import ArgumentError
from kvplane.geometry import ModelGeometry
from kvplane.payload import handoff
from kvplane.transfer.schedule import CHAPTER, NAMES, STREAMED, Schedule
from small_models import small

MUSE = ModelGeometry.preset("muse-glimmer-30b")


def of_prompt(num_tokens, **facts):
    """The receiver runs the last prompt token itself."""
    return Schedule(geometry=MUSE, position=num_tokens - 1, **facts)


def sent(schedule):
    """(full, sliding) bytes of the segments, counted one by one."""
    totals = [0, 0]
    for segment in schedule.segments:
        totals[segment.group.is_sliding] += segment.nbytes
    return tuple(totals)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("num_tokens", "cut", "full", "sliding"),
    [
        (130_815, 0, 1_741_395_968, 81_788_928),
        (65_536, 0, 872_401_920, 81_788_928),
        (65_536, 32_768, 436_194_304, 81_788_928),
        (2_048, 0, 108_998_656 // 4, 108_998_656 // 4 * 3),
        (2_048, 1_024, 54_472_704 // 4, 54_472_704 // 4 * 3),
        (258, 256, 13_312, 39_936),
    ],
)
def test_table_b_is_what_the_segments_add_up_to(name, num_tokens, cut, full, sliding):
    schedule = of_prompt(num_tokens, cut=cut, name=name)

    assert (full, sliding) == sent(schedule)
    assert (full, sliding) == (schedule.payload.full, schedule.payload.sliding)
    assert schedule.num_segments == len(schedule.segments)


def test_b2_most_of_it_is_full_layers():
    full, sliding = sent(of_prompt(130_815))

    assert (95.514, 4.486) == (
        round(100 * full / (full + sliding), 3),
        round(100 * sliding / (full + sliding), 3),
    )


@pytest.mark.parametrize(
    ("position", "cut"), [(2_049, 2_049), (2_049, 4_096), (2_049, 128), (0, 0), (256, 256)]
)
def test_b6_illegal_cuts_are_refused(position, cut):
    with pytest.raises(ArgumentError):
        Schedule(geometry=MUSE, position=position, cut=cut)


def test_the_chapters_order_is_three_sliding_groups_then_the_bulk_in_tiles():
    schedule = of_prompt(130_815, name=CHAPTER)
    sliding = [segment for segment in schedule.segments if segment.group.is_sliding]
    bulk = schedule.segments[len(sliding) :]
    groups = list(dict.fromkeys(segment.layers for segment in sliding))

    assert [13, 13, 13] == [len(layers) for layers in groups]
    assert 2_048 * 13_312 == sum(s.nbytes for s in sliding if s.layers == groups[0])
    assert {(3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51)} == {s.layers for s in bulk}
    assert {512 * 13_312} == {segment.nbytes for segment in bulk[:-1]}
    assert 81_788_928 == sum(segment.nbytes for segment in sliding)


def test_streamed_full_layers_go_out_with_their_chunk_and_sliding_ones_at_the_end():
    schedule = of_prompt(8_193, chunk=512)
    first = [segment.layers[0] for segment in schedule.segments[:13]]
    last = schedule.segments[-52:]

    assert list(range(3, 52, 4)) == first
    assert list(range(52)) == [segment.layers[0] for segment in last]
    assert all(512 == segment.num_rows for segment in schedule.segments)
    assert 6_144 == min(s.first for s in schedule.segments if s.group.is_sliding)


GEOMETRIES = [
    small(600),
    small(8),
    ModelGeometry(
        layers=small(300).layers + small(40, row=32, num_sliding=2).layers, dtype="float16"
    ),
]


@given(
    geometry=st.sampled_from(GEOMETRIES),
    position=st.integers(1, 3_000),
    block=st.integers(0, 11),
    name=st.sampled_from(NAMES),
    chunk=st.sampled_from([256, 512, 2_048]),
)
def test_every_row_the_receiver_lacks_is_in_one_segment(geometry, position, block, name, chunk):
    cut = min(block * 256, (position - 1) // 256 * 256)
    schedule = Schedule(geometry=geometry, position=position, cut=cut, name=name, chunk=chunk)
    rows = [
        (layer, row)
        for segment in schedule.segments
        for layer in segment.layers
        for row in range(segment.first, segment.stop)
    ]
    wanted = {
        (layer, row)
        for group in geometry.groups
        for layer in group.layers
        for row in range(max(cut, position - (group.sliding_window or position)), position)
    }

    assert wanted == set(rows)
    assert len(wanted) == len(rows)
    assert list(range(len(schedule.segments))) == [s.number for s in schedule.segments]
    assert schedule.num_segments == len(schedule.segments)
    assert handoff(geometry, position, cut=cut) == schedule.payload


@given(position=st.integers(1, 3_000), chunk=st.sampled_from([256, 512]))
def test_streamed_segments_become_final_in_their_order(position, chunk):
    schedule = Schedule(geometry=GEOMETRIES[2], position=position, chunk=chunk)
    order = [(segment.stop, segment.layers) for segment in schedule.segments]

    assert sorted(order) == order
    assert all(s.first // chunk == (s.stop - 1) // chunk for s in schedule.segments)


def test_a_ring_that_holds_less_than_a_window_sends_what_the_next_token_needs():
    geometry = small(600)
    name = geometry.groups[0].id
    schedule = Schedule(geometry=geometry, position=1_000, held={name: 401})

    assert range(401, 1_000) == schedule.rows(geometry.groups[0])
    with pytest.raises(ArgumentError, match=r"rows of s600\.1x4x4\.f16 from 401 on, got 402"):
        Schedule(geometry=geometry, position=1_000, held={name: 402})


def test_a_ring_short_of_rows_below_the_cut_sends_what_is_above_it():
    geometry = small(600)
    schedule = Schedule(
        geometry=geometry, position=1_000, cut=768, held={geometry.groups[0].id: 700}
    )

    assert range(768, 1_000) == schedule.rows(geometry.groups[0])


def test_a_session_that_began_later_sends_its_rows_from_there():
    geometry = small(8)
    schedule = Schedule(geometry=geometry, position=105, first_position=100)

    assert [range(100, 105), range(100, 105)] == [schedule.rows(g) for g in geometry.groups]
    assert 5 * 32 == schedule.payload.total


@pytest.mark.parametrize(
    "facts",
    [
        {"name": "other"},
        {"chunk": 0},
        {"chunk": 100},
        {"chunk": 1 << 16},
        {"chunk": 256.0},
        {"first_position": 1_000},
        {"first_position": -1},
        {"first_position": 1, "cut": 256},
        {"position": 1 << 40},
    ],
    ids=lambda facts: " ".join(f"{name} {value}" for name, value in facts.items()),
)
def test_what_no_schedule_can_be_is_refused(facts):
    with pytest.raises(ArgumentError):
        Schedule(**{"geometry": small(8), "position": 1_000, "name": STREAMED} | facts)
