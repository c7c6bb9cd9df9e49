import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from kvplane.footprint import footprint, journal_nbytes
from kvplane.geometry import SLIDING, ModelGeometry
from small_models import small

MUSE = ModelGeometry.preset("muse-glimmer-30b")


# journals


def journal_by_hand(window, capacity, first, num_tokens, *, speculative):
    """Rows that are lost and needed, from plain sets of positions."""
    held = set(range(first))
    for position in range(first, first + num_tokens):
        held.add(position)
        held = set(sorted(held)[-capacity:])
    before = set(sorted(range(first))[-capacity:])
    needed = set(range(max(0, first - (window - 1)), first))
    rows = len((before & needed) - held)
    if speculative:
        rows += len(set(range(first, first + num_tokens)) - held)
    return rows


@given(st.integers(1, 7), st.integers(0, 4), st.integers(0, 20), st.integers(0, 20), st.booleans())
def test_a_journal_holds_what_a_step_overwrites_and_its_session_needs(
    window, slack, first, num_tokens, speculative
):
    ring, plane = small(window, num_sliding=3).groups
    capacity = window + slack
    rows = journal_by_hand(window, capacity, first, num_tokens, speculative=speculative)
    arguments = {"capacity": capacity, "speculative": speculative}

    assert 3 * 16 * rows == journal_nbytes(ring, num_tokens, first=first, **arguments)
    assert 0 == journal_nbytes(plane, num_tokens, first=first, **arguments)


@given(st.integers(1, 7), st.integers(0, 4), st.integers(0, 20), st.booleans())
def test_on_a_full_ring_a_journal_is_the_formula_of_the_store(
    window, slack, num_tokens, speculative
):
    ring, _ = small(window).groups
    capacity = window + slack
    unstored = max(0, num_tokens - capacity) if speculative else 0
    rows = min(max(num_tokens - 1 - slack, 0), window - 1) + unstored

    assert 16 * rows == journal_nbytes(ring, num_tokens, capacity=capacity, speculative=speculative)


def test_a_step_is_not_speculative_unless_said():
    ring, _ = small(8).groups

    assert 7 * 16 == journal_nbytes(ring, 20, capacity=8)
    assert 7 * 16 == footprint(small(8), context=50, step=20).session.journal


def test_a_decode_token_needs_no_journal():
    assert 0 == footprint(MUSE, context=131_072, speculative=True).session.scratch


def test_a_ring_that_never_fills_needs_no_journal():
    assert 0 == footprint(small(100), context=50, step=40, speculative=True).session.journal
    assert 0 == footprint(small(8), context=8, step=8).session.journal


def test_a_step_is_never_longer_than_the_session():
    short = footprint(small(8), context=20, step=20, speculative=True)

    assert short == footprint(small(8), context=20, step=999, speculative=True)
    assert 12 * 16 == short.session.journal


@given(st.integers(1, 7), st.integers(0, 3), st.integers(1, 30), st.integers(1, 30), st.booleans())
def test_no_earlier_step_takes_more_scratch_than_the_plan_says(
    window, slack, context, step, speculative
):
    geometry = small(window)
    now = footprint(geometry, context=context, slack=slack, step=step, speculative=speculative)
    capacity = now.groups[0].capacity
    step = min(step, context)
    rows = max(
        journal_by_hand(window, capacity, first, step, speculative=speculative)
        for first in range(context - step + 1)
    )

    assert 16 * rows == now.kind(SLIDING).journal


# other scratch


def test_a_capture_keeps_a_window_less_one_of_every_sliding_layer_for_each_cut_inside_a_step():
    rows = 39 * 1024 * 2047

    assert [0, rows, 2 * rows] == [
        footprint(MUSE, context=9_000, step=512, cuts=cuts).session.capture for cuts in (0, 1, 2)
    ]
    assert 39 * 1024 * 99 == footprint(MUSE, context=100, step=64, cuts=1).session.capture
    assert 0 == footprint(MUSE, context=9_000, cuts=1).session.capture
    assert 2 * rows == footprint(MUSE, context=9_000, step=3, cuts=9).session.capture
    assert 0 == footprint(MUSE, context=0, cuts=1).session.capture


def test_a_gathered_view_is_one_layers_window_and_step():
    assert (2047 + 512) * 1024 == footprint(
        MUSE, context=9_000, step=512, gather=True
    ).session.gather
    assert (100 + 512) * 1024 == footprint(MUSE, context=612, step=512, gather=True).session.gather
    assert 0 == footprint(MUSE, context=9_000, step=512).session.gather


def test_of_several_gathered_views_the_largest_counts():
    geometry = ModelGeometry(
        layers=small(8).layers + small(4, row=32).layers + small(2).layers, dtype="float16"
    )
    now = footprint(geometry, context=100, gather=True)

    assert [8 * 16, 0, 4 * 32, 0, 2 * 16] == [plan.nbytes.gather for plan in now.groups]
    assert 128 == now.session.gather == now.session.scratch


def test_a_chunk_that_overwrites_its_window_waits_with_a_layers_rows():
    geometry = small(8, num_sliding=3)

    assert 0 == footprint(geometry, context=50).session.waiting
    assert 5 * 16 == footprint(geometry, context=50, step=5).session.waiting
    assert 0 == footprint(geometry, context=50, step=5, slack=4).session.waiting
    assert 9 * 16 == footprint(geometry, context=9, step=9).session.waiting
    assert 0 == footprint(geometry, context=9, step=9).session.journal
    assert 0 == footprint(geometry, context=8, step=8).session.waiting


def test_rows_that_other_layers_read_wait_beside_the_layer_at_hand():
    layers = small(8, num_sliding=3).layers[:3]
    sharing = [dataclasses.replace(layers[0], shares_kv_with=owner) for owner in (0, 1, 2)]

    def waiting(*more):
        return footprint(
            ModelGeometry(layers=(*layers, *more), dtype="float16"), context=50, step=5
        ).session.waiting

    assert [5 * 16 * count for count in (1, 2, 3, 3)] == [
        waiting(),
        waiting(sharing[0]),
        waiting(*sharing[:2]),
        waiting(*sharing),
    ]
