"""The link simulator against sums that can be done by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import ArgumentError
from kvplane.geometry import ModelGeometry
from kvplane.transfer.schedule import CHAPTER, NAMES, STREAMED, Schedule
from kvplane.transfer.simulate import (
    GIGABIT,
    Reader,
    Wire,
    local_s,
    overlap,
    schedule_of,
    simulated,
    smallest_link,
)
from small_models import small

MUSE = ModelGeometry.preset("muse-glimmer-30b")
# a sliding layer and a full one, 16 bytes a row each
TWO = small(8)
NEVER = Wire(bytes_per_s=1e18)


def two(position, name=STREAMED, chunk=256):
    return Schedule(geometry=TWO, position=position, name=name, chunk=chunk)


def close(expected, got):
    assert pytest.approx(expected, rel=1e-9) == got


def test_rows_are_final_when_their_layers_chunk_is_done():
    # 256 tokens a second: a chunk takes one second, half of it a layer
    line = simulated(two(512), Reader(tokens_per_s=256), NEVER)
    full, last, sliding = (
        line.sendings[0],
        line.sendings[-1],
        next(each for each in line.sendings if each.segment.group.is_sliding),
    )

    assert 2.0 == line.read_s
    assert (256, 1.0) == (full.segment.stop, full.final_s)
    assert 1.5 == sliding.final_s
    assert 2.0 == last.final_s


def test_the_chapter_reads_layer_by_layer_and_holds_full_layers_back():
    line = simulated(two(512, CHAPTER), Reader(tokens_per_s=256), NEVER)

    assert [True, False] == [each.segment.group.is_sliding for each in line.sendings]
    assert [1.0, 2.0] == [each.final_s for each in line.sendings]


def test_a_link_carries_one_segment_at_a_time():
    # 512 tokens: 4,096 bytes a chunk of the full layer, 128 of the ring
    line = simulated(two(512), Reader(tokens_per_s=256), Wire(bytes_per_s=1024, latency_s=0.5))
    begins = [each.begin_s for each in line.sendings]

    close([1.0, 5.0, 5.125], begins)
    close(5.125 + 4 + 0.5, line.first_token_s)
    close((2 * 4096 + 128) / 1024, line.busy_s)


def test_a_link_that_sleeps_loses_a_bursts_beginning_and_it_goes_out_again():
    wire = Wire(bytes_per_s=1e9, sleep_after_s=0.2, wake_s=0.125, retry_s=0.25)
    line = simulated(two(512), Reader(tokens_per_s=256), wire)

    # the second went out an eighth of a second after the first one's retry: it was awake
    assert [True, False, True] == [each.lost for each in line.sendings]
    assert 2 == line.num_lost
    close(1.0 + 0.375, line.sendings[0].begin_s)
    awake = Wire(bytes_per_s=1e9, wake_s=0.125, retry_s=0.25)
    assert 0 == simulated(two(512), Reader(tokens_per_s=256), awake).num_lost


def test_tokens_may_cost_more_the_further_they_are():
    reader = Reader(tokens_per_s=100, doubling=1000)

    close(1 * (1 + 50 / 1000), reader.seconds(0, 100))
    close(1 * (1 + 1050 / 1000), reader.seconds(1000, 1100))


def test_local_reading_takes_its_chunks():
    close(1000 / 250, local_s(Reader(tokens_per_s=250), 1000))
    close(488 / 250, local_s(Reader(tokens_per_s=250), 1000, cut=512))


@pytest.mark.parametrize("gigabits", [10, 25, 100, 200])
def test_streaming_hides_the_chapters_bulk_at_130815_tokens(gigabits):
    reader = Reader(tokens_per_s=10_000)
    wire = Wire(bytes_per_s=gigabits * GIGABIT)
    streamed, chapter = (
        simulated(schedule_of(MUSE, 130_815, name=name), reader, wire)
        for name in (STREAMED, CHAPTER)
    )
    bulk_s = 1_741_395_968 / wire.bytes_per_s

    assert chapter.first_token_s >= chapter.read_s + bulk_s * 0.999
    assert streamed.first_token_s < streamed.read_s + bulk_s / 10
    assert overlap([streamed])[0] > 0.95
    assert overlap([chapter])[0] < 0.05


def test_the_smallest_link_is_where_a_handoff_just_wins():
    facts = {"prefill": Reader(tokens_per_s=10_000), "local": Reader(tokens_per_s=2_000)}
    wire = Wire(bytes_per_s=1, latency_s=0.001)
    for name in NAMES:
        least = smallest_link(MUSE, 8_192, wire=wire, name=name, **facts)
        schedule = schedule_of(MUSE, 8_192, name=name)
        limit = local_s(facts["local"], 8_192)
        just, under = (
            simulated(schedule, facts["prefill"], Wire(bytes_per_s=rate, latency_s=0.001))
            for rate in (least, least * 0.999)
        )

        assert just.first_token_s <= limit < under.first_token_s


def test_no_link_beats_a_machine_that_reads_faster():
    slow, quick = Reader(tokens_per_s=100), Reader(tokens_per_s=200)

    assert smallest_link(MUSE, 8_192, prefill=slow, local=quick, wire=NEVER) is None


@given(
    position=st.integers(1, 3_000),
    rate=st.floats(1, 1e6),
    bytes_per_s=st.floats(1e3, 1e9),
    name=st.sampled_from(NAMES),
)
def test_nothing_is_sent_before_it_is_final_or_two_at_once(position, rate, bytes_per_s, name):
    line = simulated(two(position, name), Reader(tokens_per_s=rate), Wire(bytes_per_s=bytes_per_s))
    free = 0.0
    for each in line.sendings:
        assert each.begin_s >= max(free, each.final_s)
        free = each.end_s

    assert line.first_token_s >= max(free, line.read_s)
    assert list(line.schedule.segments) == [each.segment for each in line.sendings]


@pytest.mark.parametrize(
    ("made", "facts"),
    [
        (Reader, {"tokens_per_s": 0}),
        (Reader, {"tokens_per_s": 1, "doubling": 0}),
        (Reader, {"tokens_per_s": 1, "chunk": 0}),
        (Wire, {"bytes_per_s": 0}),
        (Wire, {"bytes_per_s": 1, "latency_s": -1}),
        (Wire, {"bytes_per_s": 1, "sleep_after_s": -1}),
    ],
    ids=str,
)
def test_what_no_machine_is_is_refused(made, facts):
    with pytest.raises(ArgumentError):
        made(**facts)
