"""Going back: rewinds by an exact rule, checkpoints, recording; all layers or none."""

import pytest

import tiny
from kvplane.errors import (
    ArgumentError,
    PositionError,
    SessionReadOnly,
    StepOpen,
    WindowLost,
)

pytestmark = pytest.mark.usefixtures("memory")

ROW = 2 * 2 * 4


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
