"""Places to return to, and rows recorded so that a rewind can go back over several steps."""

import gc

import pytest
import torch

import tiny
from kvplane.errors import (
    CheckpointLost,
    LimitReached,
    MemoryUnavailable,
    PositionError,
    WindowLost,
)
from kvplane.journal import Saved
from kvplane.undo import Undo

pytestmark = pytest.mark.usefixtures("memory")

ROW = 2 * 2 * 4


def test_a_checkpoint_is_returned_to_however_far_the_rings_have_turned(memory):
    session = tiny.filled(tiny.store(3, 5, None, memory=memory).open([]), 8)
    rows = {layer: tiny.in_rows(session, layer) for layer in (0, 1)}
    kept = session.checkpoint()
    tiny.put_each(session, range(100, 130))
    session.return_to(kept)

    assert 8 == session.position
    assert list(range(8)) == session.tokens
    assert rows == {layer: tiny.in_rows(session, layer) for layer in (0, 1)}
    assert list(range(8)) == tiny.held(session, 2)
    tiny.put(session, [8])

    assert [4, 5, 6, 7, 8] == tiny.held(session, 1)


def test_a_checkpoint_is_good_for_many_returns(memory):
    session = tiny.filled(tiny.store(3, None, memory=memory).open(), 8)
    kept = session.checkpoint()
    for branch in (200, 300, 400):
        tiny.put_each(session, range(branch, branch + 7))
        session.return_to(kept)

        assert [5, 6, 7] == tiny.held(session, 0)
        assert list(range(8)) == tiny.held(session, 1)


def test_on_the_heap_a_rewind_below_a_checkpoint_loses_it():
    session = tiny.filled(tiny.store(3, None, slack=4, memory="heap").open(), 8)
    lower = session.checkpoint()
    tiny.put(session, [8])
    kept = session.checkpoint()
    session.rewind(8)
    tiny.put_each(session, range(50, 56))
    before = tiny.state(session)
    with pytest.raises(CheckpointLost) as refused:
        session.return_to(kept)

    assert (9, 8) == (refused.value.position, refused.value.rewound_to)
    assert tiny.same(before, tiny.state(session))
    # a rewind to a checkpoint's own position leaves it whole
    session.return_to(lower)

    assert list(range(8)) == tiny.held(session, 1)


def test_on_the_heap_a_return_below_a_checkpoint_loses_it_too():
    session = tiny.filled(tiny.store(3, None, memory="heap").open(), 4)
    lower = session.checkpoint()
    tiny.filled(session, 9)
    upper = session.checkpoint()
    session.return_to(lower)
    tiny.put_each(session, range(50, 60))
    with pytest.raises(CheckpointLost):
        session.return_to(upper)

    assert [0, 1, 2, 3, *range(50, 60)] == tiny.held(session, 1)


def test_where_pages_are_shared_a_checkpoint_outlives_a_rewind_below_it():
    session = tiny.filled(tiny.store(3, None, slack=6, memory="mapped").open([]), 8)
    kept = session.checkpoint()
    session.rewind(5)
    tiny.put_each(session, range(50, 56))
    session.rewind(6)
    session.return_to(kept)

    assert list(range(8)) == tiny.held(session, 1) == session.tokens
    assert [5, 6, 7] == tiny.held(session, 0)[-3:]


def test_a_return_above_the_position_takes_its_full_rows_from_the_limit():
    store = tiny.store(3, None, slack=6, memory="mapped", limit=(9 + 20) * ROW)
    session = tiny.filled(store.open(), 12)
    kept = session.checkpoint()
    session.rewind(8)

    assert (9 + 8) * ROW == store.account.held

    other = tiny.filled(tiny.store(3, None).open(), 1)
    other.close()
    store.account.change(10 * ROW)
    before = tiny.state(session)
    with pytest.raises(LimitReached):
        session.return_to(kept)

    assert tiny.same(before, tiny.state(session))
    store.account.change(-10 * ROW)
    session.return_to(kept)

    assert (9 + 12) * ROW == store.account.held
    assert list(range(12)) == tiny.held(session, 1)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_return_whose_pages_cannot_be_had_changes_nothing(failing):
    session = tiny.filled(tiny.store(3, None, None, slack=6, memory="mapped").open(), 8)
    kept = session.checkpoint()
    session.rewind(5)
    tiny.put_each(session, [50])
    before = tiny.state(session)
    show = type(session.planes[1].span).show
    calls = 0

    def fails(span, hold):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise MemoryUnavailable(hold)
        show(span, hold)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(session.planes[1].span), "show", fails)
        with pytest.raises(MemoryUnavailable):
            session.return_to(kept)

    assert tiny.same(before, tiny.state(session))
    session.return_to(kept)

    assert list(range(8)) == tiny.held(session, 1) == tiny.held(session, 2)


def test_another_sessions_checkpoint_is_refused():
    store = tiny.store(3, None)
    session, other = tiny.filled(store.open(), 4), tiny.filled(store.open(), 6)
    kept = other.checkpoint()
    before = tiny.state(session)
    with pytest.raises(PositionError, match="another session's") as refused:
        session.return_to(kept)

    assert 6 == refused.value.position
    assert tiny.same(before, tiny.state(session))
    with pytest.raises(PositionError, match="another session's"):
        other.fork().return_to(kept)


def test_a_reset_loses_every_checkpoint(memory):
    session = tiny.filled(tiny.store(3, None, memory=memory).open(), 4)
    kept = session.checkpoint()
    session.reset()
    with pytest.raises(CheckpointLost) as refused:
        session.return_to(kept)

    assert 0 == refused.value.rewound_to


def test_a_checkpoint_costs_the_rings_rows_for_as_long_as_it_lives():
    store = tiny.store(3, 5, None)
    session = tiny.filled(store.open(), 9)
    kept = session.checkpoint()

    assert (3 + 5) * ROW == kept.nbytes == store.memory().checkpoints

    del kept
    gc.collect()

    assert 0 == store.memory().checkpoints


def test_a_checkpoint_brings_the_ids_and_provenance_of_its_branch_back():
    session = tiny.store(3, None).open([])
    tiny.put(session, [1, 2, 3])
    kept = session.checkpoint()
    tiny.put(session, [4, 5])
    session.return_to(kept)

    assert [1, 2, 3] == session.tokens
    assert [3] == [stop for stop, _ in session.ledger.numerics]
    assert kept.ledger is not session.ledger


# recording


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("start", [2, 6, 11])
def test_while_recording_a_window_of_tokens_can_be_taken_back(tokens, start):
    session = tiny.filled(tiny.store(5, 9, None).open(), start)
    session.record()
    for first in range(start, start + 4, tokens):
        tiny.put(session, range(100 + first, 100 + first + tokens))
    session.rewind(start)

    assert list(range(max(0, start - 4), start)) == tiny.held(session, 0)[-4:]
    assert list(range(max(0, start - 8), start)) == tiny.held(session, 1)[-8:]
    assert list(range(start)) == tiny.held(session, 2)
    tiny.filled(session, start + 12)

    assert list(range(start + 7, start + 12)) == tiny.held(session, 0)


def test_a_recording_session_can_go_back_again_and_again():
    session = tiny.filled(tiny.store(5, None).open(), 11)
    session.record()
    for branch in range(3):
        tiny.put_each(session, [100 + branch, 200 + branch, 300 + branch])
        session.rewind(12)
        tiny.put_each(session, [50 + branch])
        session.rewind(11)

        assert [7, 8, 9, 10] == tiny.held(session, 0)[-4:]


def test_recorded_rows_are_counted_and_at_most_a_window_of_them():
    store = tiny.store(5, None)
    session = tiny.filled(store.open(), 5)

    assert 0 == store.memory().recorded

    session.record()
    tiny.filled(session, 7)

    assert 2 * ROW == store.memory().recorded

    tiny.filled(session, 40)

    assert 4 * ROW == store.memory().recorded

    session.forget_recorded()

    assert 0 == store.memory().recorded
    with pytest.raises(WindowLost):
        session.rewind(38)


def test_when_recording_ends_a_rewind_is_refused_as_ever():
    session = tiny.filled(tiny.store(5, None).open(), 11)
    session.record()
    tiny.put_each(session, [11, 12, 13])
    session.record(on=False)
    session.forget_recorded()
    with pytest.raises(WindowLost):
        session.rewind(11)

    assert 0 == session.store.memory().recorded


def test_a_return_or_reset_forgets_what_was_recorded():
    session = tiny.filled(tiny.store(5, None).open(), 11)
    kept = session.checkpoint()
    session.record()
    for back in (lambda: session.return_to(kept), session.reset):
        tiny.put_each(session, range(60, 64))
        back()

        assert 0 == session.store.memory().recorded


def test_a_recording_session_takes_back_a_part_of_a_step():
    session = tiny.filled(tiny.store(5, None).open(), 11)
    session.record()
    tiny.put(session, range(100, 108), accepted=2, speculative=True)

    assert [*range(8, 11), 100, 101] == tiny.held(session, 0)
    tiny.put(session, [102])
    session.rewind(11)

    assert [7, 8, 9, 10] == tiny.held(session, 0)[-4:]


def test_rows_below_a_gap_are_not_counted_as_recorded():
    group = tiny.geometry(9).groups[0]
    undo = Undo()
    for first in (2, 3, 5):
        undo.add(0, [Saved(first, *(rows[None] for rows in tiny.rows(group, 0, [first])))], group)

    assert 5 == undo.oldest(0, 6)
    assert 2 == undo.oldest(0, 4)
    assert 9 == undo.oldest(0, 9)
    assert 9 == undo.oldest(1, 9)


def test_recorded_rows_of_one_branch_never_come_back_in_another():
    session = tiny.filled(tiny.store(4, None).open(), 9)
    session.record()
    tiny.put_each(session, [100, 101, 102])
    session.rewind(10)
    tiny.put_each(session, [201, 202])
    session.rewind(10)

    assert [7, 8, 100] == tiny.held(session, 0)[-3:]
    assert torch.isfinite(session.planes[0].key).all()
