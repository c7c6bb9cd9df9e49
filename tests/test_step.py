"""A step: all layers or none, in any order, taken back at any point."""

import pytest
import torch

import tiny
from kvplane.errors import (
    ArgumentError,
    ContextFull,
    LayerRepeated,
    PositionError,
    SessionClosed,
    SessionReadOnly,
    StepClosed,
    StepIncomplete,
    StepOpen,
    TensorMismatch,
)

pytestmark = pytest.mark.usefixtures("memory")


def window_of(step, session, layer):
    """First position and tokens of a layer's view."""
    view = step.view(layer)
    return view.first, tiny.tokens_of(session, layer, view.spans)


def test_leaving_a_step_commits_all_layers():
    session = tiny.store(4, 6, None).open()
    tiny.put(session, range(5))
    tiny.put(session, [5])

    assert 6 == session.position
    assert [2, 3, 4, 5] == tiny.held(session, 0)
    assert [0, 1, 2, 3, 4, 5] == tiny.held(session, 1)
    assert [0, 1, 2, 3, 4, 5] == tiny.held(session, 2)


def test_the_position_moves_only_at_the_commit():
    session = tiny.store(4, None).open()
    with session.step(3) as step:
        assert (0, 3) == (step.first, step.stop)
        assert step.is_open
        tiny.write(step, session, range(3))

        assert 0 == session.position
        assert range(0) == session.live(0)

    assert 3 == session.position
    assert not step.is_open


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_layers_are_written_in_any_order(order, tokens):
    session = tiny.filled(tiny.store(4, 6, None).open(), 5)
    with session.step(tokens) as step:
        tiny.write(step, session, range(5, 5 + tokens), layers=order)

    for layer, window in enumerate((4, 6, 64)):
        assert list(range(max(0, 5 + tokens - window), 5 + tokens)) == tiny.held(session, layer)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("written", [(), (0,), (1,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 9])
def test_an_exception_takes_the_step_back(error, written, tokens, memory):
    session = tiny.filled(tiny.store(4, 6, None, memory=memory).open(), 11)
    rows = {layer: tiny.in_rows(session, layer) for layer in range(3)}
    with pytest.raises(error), session.step(tokens) as step:  # noqa: PT012
        tiny.write(step, session, range(100, 100 + tokens), layers=written)
        raise error

    assert 11 == session.position
    assert step is not session.open_step
    # what the next token needs lies in the same rows as before; the rest may be gone
    for layer, window in ((0, 4), (1, 6)):
        needed = range(11 - (window - 1), 11)
        live = session.live(layer)

        assert live.start <= needed.start
        assert list(live) == tiny.held(session, layer)
        assert [rows[layer].index(position) for position in live] == [
            tiny.in_rows(session, layer).index(position) for position in live
        ]
    assert list(range(11)) == tiny.held(session, 2)


@pytest.mark.parametrize("slack", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 11])
def test_the_journal_holds_the_needed_rows_that_are_overwritten_and_no_more(slack, tokens):
    session = tiny.filled(tiny.store(5, None, slack=slack).open(), 20)
    name = session.groups[0].id
    with session.step(tokens) as step:
        assert min(max(0, tokens - 1 - slack), 4) == step.journal_rows(name)
        assert 0 == step.journal_rows(session.groups[1].id)
        step.abort()
    with session.step(tokens, speculative=True) as step:
        unstored = max(0, tokens - 5 - slack)
        assert min(max(0, tokens - 1 - slack), 4) + unstored == step.journal_rows(name)
        step.abort()

    assert 0 == step.journal_rows(name)


def test_a_decode_token_needs_no_journal_and_no_slack():
    session = tiny.filled(tiny.store(5).open(), 20)
    with session.step(1) as step:
        assert 0 == step.journal_rows(session.groups[0].id)
        tiny.write(step, session, [99])
        step.abort()

    assert [16, 17, 18, 19] == tiny.held(session, 0)


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 7, 12])
@pytest.mark.parametrize("start", [0, 2, 5, 13])
def test_a_part_of_a_speculative_step_is_kept_as_if_only_it_had_been_taken(tokens, start, memory):
    for accepted in range(tokens + 1):
        session = tiny.filled(tiny.store(4, 6, None, memory=memory).open(), start)
        tiny.put(session, range(start, start + tokens), accepted=accepted, speculative=True)
        stop = start + accepted

        assert stop == session.position
        for layer, window in ((0, 4), (1, 6), (2, 64)):
            live = session.live(layer)

            assert stop == live.stop
            assert live.start <= max(0, stop - (window - 1))
            assert list(live) == tiny.held(session, layer)

        tiny.put_each(session, range(stop, stop + 8))

        assert list(range(stop + 4, stop + 8)) == tiny.held(session, 0)
        assert list(range(stop + 8)) == tiny.held(session, 2)


def test_a_step_that_was_committed_or_aborted_is_closed():
    session = tiny.store(4, None).open()
    with session.step(1) as step:
        tiny.write(step, session, [0])
        step.commit()
        for use in (
            step.commit,
            lambda: step.check_commit(None),
            lambda: step.view(0),
            lambda: tiny.write(step, session, [0]),
            lambda: step.attend(0, torch.zeros(1, 1, 2)),
            step.__enter__,
        ):
            with pytest.raises(StepClosed) as refused:
                use()

            assert (0, 1, "committed") == (
                refused.value.first,
                refused.value.stop,
                refused.value.state,
            )
        step.abort()

    assert 1 == session.position


def test_a_step_that_was_never_entered_changes_nothing():
    session = tiny.store(4, None).open()
    step = session.step(2)
    with pytest.raises(StepClosed) as refused:
        tiny.write(step, session, [0, 1])

    assert "not entered" == refused.value.state
    step.abort()
    step.__exit__(None, None, None)
    tiny.put(session, [0])
    # a step is where its session is when it is entered, not when it was made
    with step:
        assert (1, 3) == (step.first, step.stop)
        tiny.write(step, session, [1, 2])

    assert [0, 1, 2] == tiny.held(session, 0)


def test_abort_is_idempotent_and_leaving_after_it_does_nothing():
    session = tiny.store(4, None).open()
    with session.step(1) as step:
        tiny.write(step, session, [0])
        step.abort()
        step.abort()

    assert 0 == session.position
    assert [] == tiny.held(session, 0)


def test_a_layer_left_out_takes_the_step_back_and_is_named():
    session = tiny.store(4, 6, None).open()
    with pytest.raises(StepIncomplete) as refused, session.step(1) as step:
        tiny.write(step, session, [0], layers=[1])

    assert (0, 2) == refused.value.layers
    assert refused.value.aborted
    assert 0 == session.position
    assert session.open_step is None


def test_a_layer_is_written_once():
    session = tiny.store(4, None).open()
    with session.step(1) as step:
        tiny.write(step, session, [0])
        with pytest.raises(LayerRepeated) as refused:
            tiny.write(step, session, [7], layers=[1])

    assert 1 == refused.value.layer
    assert [0] == tiny.held(session, 1)


def test_a_layer_that_reads_anothers_rows_takes_none():
    session = tiny.store(4, 4, None, shares={1: 0}).open()
    key = torch.zeros(1, 1, 2)
    with session.step(1) as step:
        with pytest.raises(TensorMismatch, match="shares the rows of layer 0"):
            step.write(1, key, key)
        with pytest.raises(StepIncomplete) as refused:
            step.view(1)
        assert ((0,), False) == (refused.value.layers, refused.value.aborted)
        tiny.write(step, session, [0])

        assert (0, [0]) == window_of(step, session, 1)


def test_a_second_step_is_refused_while_one_is_open():
    session = tiny.store(4, None).open()
    with session.step(2) as step:
        with pytest.raises(StepOpen) as refused, session.step(1):
            pass
        tiny.write(step, session, [0, 1])

    assert (0, 2) == (refused.value.first, refused.value.stop)
    assert 2 == session.position


def test_max_context_refuses_the_whole_step():
    session = tiny.filled(tiny.store(4, None, max_context=8).open(), 7)
    before = tiny.state(session)
    with pytest.raises(ContextFull) as refused, session.step(2):
        pass

    assert (7, 2, 8) == (
        refused.value.position,
        refused.value.num_tokens,
        refused.value.max_context,
    )
    assert tiny.same(before, tiny.state(session))
    tiny.put(session, [7])

    assert 8 == session.position


def test_a_closed_or_read_only_session_takes_no_step():
    session = tiny.store(4, None).open()
    session.freeze()
    with pytest.raises(SessionReadOnly, match="a step"), session.step(1):
        pass
    session.close()
    with pytest.raises(SessionClosed), session.step(1):
        pass


def test_closing_a_session_aborts_its_step():
    session = tiny.store(4, None).open()
    with session.step(1) as step:
        tiny.write(step, session, [0])
        session.close()

        assert not step.is_open

    assert 0 == session.position


def test_only_a_speculative_step_is_kept_in_part():
    session = tiny.store(4, None).open()
    with session.step(3) as step:
        tiny.write(step, session, [0, 1, 2])
        for accepted in (0, 2):
            with pytest.raises(PositionError, match="speculative"):
                step.commit(accepted)
        for accepted in (-1, 4):
            with pytest.raises(PositionError, match=r"outside \[0, 3\]"):
                step.commit(accepted)
        for accepted in (True, 1.0, "1"):
            with pytest.raises(ArgumentError):
                step.commit(accepted)

        assert step.is_open
        step.commit(3)

    assert 3 == session.position
