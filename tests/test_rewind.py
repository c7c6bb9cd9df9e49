"""Going back: rewinds by an exact rule, checkpoints, recording; all layers or none."""

import gc

import pytest
import torch

import tiny
from kvplane.errors import (
    ArgumentError,
    CheckpointLost,
    LimitReached,
    PositionError,
    SessionReadOnly,
    StepOpen,
    WindowLost,
)

ROW = 2 * 2 * 4


@pytest.fixture(params=["heap", "mapped"])
def memory(request):
    return request.param


@pytest.mark.parametrize("slack", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("taken", [3, 6, 7, 8, 20])
def test_a_rewind_is_lossless_as_deep_as_the_slack_and_one_more(slack, taken):
    for back in range(1, taken + 1):
        session = tiny.filled(tiny.store(6, None, slack=slack).open(), taken)
        # until the ring has wrapped nothing is lost
        lossless = taken <= 6 + slack or back <= 1 + slack
        if lossless or back == taken:
            session.rewind(taken - back)

            assert taken - back == session.position
            assert set(range(max(0, taken - back - 5), taken - back)) <= set(session.live(0))
            assert list(session.live(0)) == tiny.held(session, 0)
            assert list(range(taken - back)) == tiny.held(session, 1)
        else:
            before = tiny.state(session)
            with pytest.raises(WindowLost) as refused:
                session.rewind(taken - back)

            assert max(0, taken - back - 5) == refused.value.first
            assert min(taken - back, taken - 6 - slack) == refused.value.stop
            assert session.groups[0].id == refused.value.group
            assert tiny.same(before, tiny.state(session))


def test_what_was_rewound_is_gone_and_the_next_token_takes_its_row():
    session = tiny.filled(tiny.store(6, None, slack=3).open(), 14)
    rows = tiny.in_rows(session, 0)
    session.rewind(11)
    tiny.put(session, [111])

    assert [5, 6, 7, 8, 9, 10, 111] == tiny.held(session, 0)
    assert rows.index(11) == tiny.in_rows(session, 0).index(111)
    assert [*range(11), 111] == tiny.held(session, 1)


def test_the_smallest_window_decides_only_for_itself():
    # a window of one needs no row at all, a full layer none that could be lost
    session = tiny.filled(tiny.store(1, None).open(), 9)
    session.rewind(3)
    tiny.put(session, [33])

    assert [33] == tiny.held(session, 0)
    assert [0, 1, 2, 33] == tiny.held(session, 1)


def test_all_layers_go_back_or_none_whichever_is_asked_first():
    for windows in ((None, 9, 3), (3, None, 9), (9, 3, None)):
        session = tiny.filled(tiny.store(*windows).open(), 12)
        before = tiny.state(session)
        with pytest.raises(WindowLost):
            session.rewind(10)

        assert tiny.same(before, tiny.state(session))
        session.rewind(11)

        assert {11} == {session.live(layer).stop for layer in range(3)}


def test_a_rewind_to_where_the_session_is_changes_nothing():
    session = tiny.filled(tiny.store(3, None).open(), 7)
    before = tiny.state(session)
    session.rewind(7)

    assert tiny.same(before, tiny.state(session))


@pytest.mark.parametrize("position", [-1, 8, 10**30])
def test_a_position_outside_the_session_is_refused(position):
    session = tiny.filled(tiny.store(3, None).open(), 7)
    before = tiny.state(session)
    with pytest.raises(PositionError, match=r"outside \[0, 7\]") as refused:
        session.rewind(position)

    assert position == refused.value.position
    assert tiny.same(before, tiny.state(session))


def test_a_session_goes_back_to_its_first_position_and_no_further():
    session = tiny.filled(tiny.store(3, None).open(first_position=5), 12)
    with pytest.raises(PositionError, match=r"outside \[5, 12\]"):
        session.rewind(4)
    session.rewind(5)
    tiny.put(session, [55])

    assert range(5, 6) == session.live(0) == session.live(1)


def test_near_its_first_position_a_session_needs_nothing_older():
    session = tiny.filled(tiny.store(6, None).open(first_position=5), 10)
    session.rewind(7)

    assert [5, 6] == tiny.held(session, 0)


@pytest.mark.parametrize("position", [True, 1.0, "1", None])
def test_a_position_is_a_whole_number(position):
    session = tiny.filled(tiny.store(3, None).open(), 2)
    with pytest.raises(ArgumentError):
        session.rewind(position)

    assert 2 == session.position


def test_nothing_goes_back_while_a_step_is_open_or_when_read_only():
    session = tiny.filled(tiny.store(3, None).open(), 5)
    kept = session.checkpoint()
    with session.step(1) as step:
        for use in (
            lambda: session.rewind(4),
            lambda: session.return_to(kept),
            session.checkpoint,
            session.fork,
            session.snapshot,
            session.reset,
            session.freeze,
            session.mark,
            session.record,
        ):
            with pytest.raises(StepOpen) as refused:
                use()

            assert (5, 6) == (refused.value.first, refused.value.stop)
        step.abort()
    session.freeze()
    for use in (
        lambda: session.rewind(4),
        lambda: session.return_to(kept),
        session.reset,
        session.record,
    ):
        with pytest.raises(SessionReadOnly):
            use()

    assert [2, 3, 4] == tiny.held(session, 0)


def test_a_rewind_gives_full_rows_back_to_the_limit():
    store = tiny.store(3, None, limit=100 * ROW)
    session = tiny.filled(store.open(), 9)

    assert (3 + 9) * ROW == store.account.held

    session.rewind(8)

    assert (3 + 8) * ROW == store.account.held


def test_a_rewind_cuts_ids_marks_captures_and_provenance():
    session = tiny.store(3, None, slack=9).open([])
    for first in (0, 3):
        with session.step([first, first + 1, first + 2], capture=(first + 3,)) as step:
            tiny.write(step, session, range(first, first + 3))
        session.mark()
    session.rewind(4)

    assert [0, 1, 2, 3] == session.tokens
    assert {3} == session.marks
    assert [3] == sorted(session.captures)
    assert [4] == [stop for stop, _ in session.ledger.numerics]
    tiny.put(session, [40])

    assert [0, 1, 2, 3, 40] == session.tokens


# checkpoints


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
    session = tiny.filled(tiny.store(3, None, slack=4).open(), 8)
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


def test_a_return_below_a_checkpoint_loses_it_too():
    session = tiny.filled(tiny.store(3, None).open(), 4)
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


def test_recorded_rows_of_one_branch_never_come_back_in_another():
    session = tiny.filled(tiny.store(4, None).open(), 9)
    session.record()
    tiny.put_each(session, [100, 101, 102])
    session.rewind(10)
    tiny.put_each(session, [201, 202])
    session.rewind(10)

    assert [7, 8, 100] == tiny.held(session, 0)[-3:]
    assert torch.isfinite(session.planes[0].key).all()
