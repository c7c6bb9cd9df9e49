"""Every public function of steps and batches refuses what makes no sense; nothing has changed."""

import threading

import pytest
import torch

import tiny
from kvplane.batch import BatchStep
from kvplane.errors import (
    ArgumentError,
    ContextFull,
    LayerRepeated,
    PositionError,
    SessionBusy,
    StepIncomplete,
    StepOpen,
    TensorMismatch,
)

pytestmark = pytest.mark.usefixtures("memory")

HUGE = 10**30


@pytest.fixture
def session():
    """Five tokens in a ring of four and a full layer, and a layer that reads the ring's rows."""
    store = tiny.store(4, None, 4, heads=2, head_dim=4, shares={2: 0})
    return tiny.filled(store.open(), 5)


ROWS = (2, 2, 4)


def good(dtype=torch.float32):
    return torch.zeros(ROWS, dtype=dtype)


BAD_ROWS = {
    "one token": torch.zeros(1, 2, 4),
    "three tokens": torch.zeros(3, 2, 4),
    "one head": torch.zeros(2, 1, 4),
    "heads first": torch.zeros(2, 4, 2),
    "short heads": torch.zeros(2, 2, 3),
    "a batch axis": torch.zeros(1, 2, 2, 4),
    "flat": torch.zeros(16),
    "a number": torch.zeros(()),
    "f16 in an f32 plane": good(torch.float16),
    "bf16 in an f32 plane": good(torch.bfloat16),
    "f64": good(torch.float64),
    "whole numbers": good(torch.int32),
    "elsewhere": torch.zeros(ROWS, device="meta"),
    "no tensor": [[0.0]],
    "nothing": None,
}


@pytest.mark.parametrize("rows", BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize("layer", [0, 1])
def test_rows_that_are_not_the_planes_are_refused_and_the_step_goes_on(session, rows, layer):
    before = tiny.state(session)
    with session.step(2) as step:
        for call in (
            lambda: step.write(layer, rows, good()),
            lambda: step.write(layer, good(), rows),
            lambda: step.attend(layer, good(), rows, good()),
            lambda: step.attend(layer, good(), good(), rows),
        ):
            with pytest.raises((TensorMismatch, ArgumentError)):
                call()

        assert set() == step.written
        step.abort()

    assert tiny.same(before, tiny.state(session))


BAD_QUERIES = {
    **{name: rows for name, rows in BAD_ROWS.items() if " plane" not in name and name != "f64"},
    "three heads of two": torch.zeros(2, 3, 4),
    "no heads": torch.zeros(2, 0, 4),
}


@pytest.mark.parametrize("query", BAD_QUERIES.values(), ids=BAD_QUERIES)
def test_queries_that_do_not_fit_are_refused_before_any_row_is_written(session, query):
    with session.step(2) as step:
        with pytest.raises(TensorMismatch):
            step.attend(0, query, good(), good())

        assert set() == step.written
        step.abort()


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("scale", ["1", True, float("nan"), float("inf"), 10**400, torch.tensor(1.0), [1.0]]),
        ("softcap", [0.0, -1.0, "1", True, float("nan"), float("inf")]),
        ("sinks", [1.0, torch.zeros(3), torch.zeros(2, 2), torch.zeros(2, device="meta"), "x"]),
    ],
)
def test_arguments_of_attention_that_mean_nothing_are_refused(session, argument, values):
    for value in values:
        with session.step(2) as step:
            with pytest.raises((ArgumentError, TensorMismatch)) as refused:
                step.attend(0, good(), good(), good(), **{argument: value})

            assert argument in str(refused.value)
            assert set() == step.written
            step.abort()


def test_sinks_are_of_a_float_dtype_and_then_taken(session):
    with session.step(2) as step:
        with pytest.raises(TensorMismatch, match="sinks dtype"):
            step.attend(0, good(), good(), good(), sinks=torch.zeros(2, dtype=torch.int64))

        assert set() == step.written

        ones = torch.ones(ROWS)
        sinks = torch.nn.Parameter(torch.full((2,), 1e30))
        out = step.attend(1, ones, ones, ones, sinks=sinks)
        step.abort()

    # all weight is in the sinks, and nothing asks for a gradient
    assert not out.any()
    assert not out.requires_grad


def test_key_and_value_come_together(session):
    with session.step(2) as step:
        for pair in ((good(), None), (None, good())):
            with pytest.raises(ArgumentError):
                step.attend(0, good(), *pair)
        with pytest.raises(StepIncomplete) as refused:
            step.attend(0, good())

        assert (0,) == refused.value.layers
        step.abort()


def test_layers_in_any_order_but_each_once(session):
    with session.step(2) as step:
        step.write(1, good(), good())
        step.write(0, good(), good())
        for layer in (0, 1):
            with pytest.raises(LayerRepeated):
                step.write(layer, good(), good())
            with pytest.raises(LayerRepeated):
                step.attend(layer, good(), good(), good())
        with pytest.raises(TensorMismatch, match="shares"):
            step.write(2, good(), good())

        assert {0, 1} == step.written

    assert 7 == session.position


# batches


def test_a_batch_is_of_distinct_open_sessions_of_this_store(session):
    store = session.store
    other = tiny.store(4, None, 4, heads=2, head_dim=4, shares={2: 0}).open()
    lockstep = store.open(batch=2)
    for sessions in ([], [session, session], [session, other], [lockstep], None, [None], [3]):
        with pytest.raises(ArgumentError):
            store.batch(sessions)
    for tokens in ([1, 1], [], [0], [True], ["1"], 3, [HUGE]):
        with pytest.raises(ArgumentError):
            store.batch([session], tokens)

    assert 5 == session.position


def test_one_session_that_refuses_refuses_the_batch(session):
    store = session.store
    other = store.open()
    before = tiny.state(session)
    with other.step(1) as step:
        with pytest.raises(StepOpen), store.batch([session, other]):
            pass
        step.abort()
    with pytest.raises(ContextFull), store.batch([other, session], [1, 60]):
        pass

    assert tiny.same(before, tiny.state(session))
    assert other.open_step is None


def test_rows_of_a_batch_are_all_sessions_rows(session):
    store = session.store
    other = store.open()
    with store.batch([session, other], [1, 2]) as step:
        for rows in (torch.zeros(2, 2, 4), torch.zeros(4, 2, 4), torch.zeros(()), None, [0]):
            for call in (
                lambda rows=rows: step.write(0, rows, rows),
                lambda rows=rows: step.attend(0, rows, rows, rows),
            ):
                with pytest.raises(TensorMismatch, match="3 of all sessions"):
                    call()
        step.abort()

    assert (5, 0) == (session.position, other.position)


def test_what_a_batch_accepts_is_checked_for_all_before_any_is_kept(session):
    store = session.store
    other = store.open()
    rows = torch.zeros(5, 2, 4)
    with BatchStep([session, other], [2, 3], speculative=True) as step:
        for layer in (0, 1):
            step.write(layer, rows, rows)
        for accepted in ([1], [1, 2, 3], [2, 4], [-1, 0], [None, 9]):
            with pytest.raises(PositionError):
                step.commit(accepted)
        for accepted in ([1, True], ["1", 1], [1.0, 1]):
            with pytest.raises(ArgumentError):
                step.commit(accepted)

        assert all(part.is_open for part in step.steps)
        step.commit([0, None])

    assert (5, 3) == (session.position, other.position)


def test_a_layer_that_one_session_refuses_aborts_the_batch(session):
    store = session.store
    other = store.open()
    rows = torch.zeros(2, 2, 4)
    with store.batch([session, other]) as step:
        step.steps[1].write(0, rows[:1], rows[:1])
        with pytest.raises(LayerRepeated):
            step.write(0, rows, rows)

        assert not any(part.is_open for part in step.steps)

    assert (5, 0) == (session.position, other.position)


# threads


def run(*calls):
    """What each call raised, each in a thread of its own."""
    errors = [None] * len(calls)

    def caught(place, call):
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors[place] = error

    threads = [
        threading.Thread(target=caught, args=(place, call)) for place, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_two_sessions_of_a_store_are_used_from_two_threads(memory):
    store = tiny.store(4, None, max_context=1024, memory=memory)
    parent = tiny.filled(store.open(), 7)
    sessions = [parent, parent.fork(), store.open(), store.open()]

    def grow(session, base):
        for token in range(base, base + 150):
            tiny.put(session, [token])
            if token % 50 == 0:
                session.fork().close()
                store.restore(session.snapshot()).close()
                store.memory()

    calls = [
        lambda session=session, base=base: grow(session, base)
        for session, base in zip(sessions, (1000, 2000, 3000, 4000), strict=True)
    ]

    assert [None] * 4 == run(*calls)
    for session, base in zip(sessions, (1000, 2000, 3000, 4000), strict=True):
        grown = [*range(base, base + 150)]

        assert grown == tiny.held(session, 1)[-150:]
        assert grown[-4:] == tiny.held(session, 0)
    row = 2 * 2 * 4

    assert 4 * 4 * row + (2 * 157 + 2 * 150) * row == store.account.held


def test_a_second_thread_in_one_session_is_refused_not_made_to_wait(session):
    entered, go = threading.Event(), threading.Event()
    back = session.back

    def slow(group, runs):
        entered.set()
        assert go.wait(10)
        back(group, runs)

    session.back = slow
    held = threading.Thread(target=lambda: tiny.put(session, [5]))
    held.start()
    assert entered.wait(10)
    errors = run(
        lambda: session.step(1).__enter__(),
        lambda: session.rewind(4),
        session.checkpoint,
        session.fork,
        session.snapshot,
        session.reset,
        session.mark,
        session.freeze,
        session.record,
        session.forget_recorded,
        lambda: session.spans(0, 1, 2),
        lambda: session.reorder([0]),
        session.close,
        lambda: session.store.select(session, [0]),
    )
    go.set()
    held.join()

    assert {SessionBusy} == {type(error) for error in errors}
    assert 6 == session.position
    assert [2, 3, 4, 5] == tiny.held(session, 0)
    assert not session.closed


def test_a_second_thread_in_an_open_step_is_refused_too(session):
    with session.step(1) as step:
        with session.guard:
            errors = run(
                lambda: step.write(0, good()[:1], good()[:1]),
                lambda: step.view(0),
                lambda: step.attend(0, good()[:1], good()[:1], good()[:1]),
                step.commit,
                step.abort,
                lambda: step.check_commit(None),
            )

        assert {SessionBusy} == {type(error) for error in errors}
        assert set() == step.written
        assert step.is_open
        step.abort()
