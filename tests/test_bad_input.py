"""Every public function of the store refuses what makes no sense, and then nothing has changed."""

import numpy as np
import pytest
import torch

import tiny
from kvplane import KVStore, Layout
from kvplane.errors import (
    ArgumentError,
    BackendUnavailable,
    ContextFull,
    EvictedPosition,
    GeometryError,
    KVPlaneError,
    LimitReached,
    PositionError,
    SessionClosed,
    SnapshotMismatch,
)

pytestmark = pytest.mark.usefixtures("memory")

HUGE = 10**30
NO_NUMBERS = [None, True, 1.5, "3", b"3", [3], object()]


@pytest.fixture
def session():
    """Five tokens in a ring of four and a full layer, and a layer that reads the ring's rows."""
    store = tiny.store(4, None, 4, heads=2, head_dim=4, shares={2: 0})
    return tiny.filled(store.open(), 5)


def test_spans_of_a_layer_that_reads_anothers_rows_are_those_rows(session):
    for mine, theirs in zip(session.spans(2, 1, 5), session.spans(0, 1, 5), strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def refuses(session, error, call):
    """The error of a call that leaves a session as it was."""
    before = tiny.state(session)
    with pytest.raises(error) as caught:
        call()
    assert tiny.same(before, tiny.state(session))
    assert isinstance(caught.value, KVPlaneError)
    return caught.value


# the store


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("max_context", [0, -1, HUGE, 2**62, *NO_NUMBERS]),
        ("slack", [-1, HUGE, *NO_NUMBERS]),
        ("row_floor", [0, -1, HUGE, *NO_NUMBERS]),
        ("limit", [-1, HUGE, *NO_NUMBERS[1:]]),
        ("dtype", ["int8", "float64", torch.int8, torch.float64, 3, "", ["float16"], {}]),
        ("device", ["nowhere", "cuda:99", "cpu:x", None, 3.5, [], object()]),
        ("memory", ["", "disk", None, 3, ["heap"], {}]),
        ("attention", ["", "fast", None, 3, ["blocked"], {}]),
        (
            "layout",
            [
                {"full_attention": "NHD"},
                {"linear_attention": Layout.TOKEN_MAJOR},
                {3: Layout.TOKEN_MAJOR},
                ["full_attention"],
                "NHD",
                3,
            ],
        ),
    ],
)
def test_a_store_is_not_made_of_arguments_that_mean_nothing(argument, values):
    for value in values:
        options = {"max_context": 64, argument: value}
        with pytest.raises((ArgumentError, BackendUnavailable)) as refused:
            KVStore(tiny.geometry(4, None), **options)

        assert argument in str(refused.value)


@pytest.mark.parametrize("geometry", [None, "muse-glimmer-30b", {}, object()])
def test_a_store_is_not_made_without_a_geometry(geometry):
    with pytest.raises(ArgumentError, match="geometry"):
        KVStore(geometry, max_context=64)


def test_a_model_without_rows_needs_no_store():
    geometry = tiny.geometry(4)
    rowless = type(geometry)(layers=(type(geometry.layers[0])(kind="linear_attention"),))
    with pytest.raises(ArgumentError, match="layers with rows"):
        KVStore(rowless, max_context=64)


def test_whole_numbers_of_any_kind_are_taken_as_ints():
    store = tiny.store(4, None, max_context=np.int64(64), slack=np.int32(2), limit=np.uint32(9999))
    session = store.open(first_position=np.int64(3), first_row=np.int8(1), batch=np.int16(1))

    for number in (store.max_context, store.slack, store.account.limit, session.position):
        assert int is type(number)
    assert {64, 6} == set(store.describe().capacities.values())
    assert all(int is type(rows) for rows in store.describe().capacities.values())


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("first_position", [-1, 64, 65, HUGE, *NO_NUMBERS]),
        ("first_row", [-1, 4, 64, HUGE, *NO_NUMBERS[1:]]),
        ("batch", [0, -1, HUGE, *NO_NUMBERS[1:]]),
        ("tokens", [[1, 2], "ab", 3, torch.tensor([1]), True]),
    ],
)
def test_a_session_is_not_opened_with_arguments_that_mean_nothing(argument, values):
    store = tiny.store(4, None)
    for value in values:
        with pytest.raises(ArgumentError) as refused:
            store.open(**{argument: value})

        assert argument == refused.value.argument
    assert 0 == store.account.held
    assert [] == store.sessions


def test_a_batch_too_large_for_any_memory_is_refused():
    store = tiny.store(4, None, max_context=1 << 40)
    for batch in (1 << 40, 1 << 61):
        with pytest.raises(MemoryError) as refused:
            store.open(batch=batch)

        assert isinstance(refused.value, KVPlaneError)
    assert 0 == store.account.held
    assert [] == store.sessions


def test_a_session_past_the_limit_is_refused_with_the_numbers():
    store = tiny.store(4, None, limit=4 * 16 * 2 + 1)
    kept = [store.open(), store.open()]
    with pytest.raises(LimitReached) as refused:
        store.open()

    assert (64, 128, 129) == (refused.value.asked, refused.value.held, refused.value.limit)
    kept.pop().close()

    assert isinstance(store.open(), type(kept[0]))


@pytest.mark.parametrize("snapshot", [None, 3, {}, "session", object()])
def test_what_is_no_snapshot_is_not_restored(snapshot):
    store = tiny.store(4, None)
    with pytest.raises((ArgumentError, SnapshotMismatch)):
        store.restore(snapshot)

    assert 0 == store.account.held


@pytest.mark.parametrize("cursors", [None, 3, "s4", {"s4.1x2x2.f32": 3, "f0.1x2x2.f32": None}])
def test_what_are_no_cursors_build_nothing(cursors):
    store = tiny.store(4, None)
    with pytest.raises((ArgumentError, SnapshotMismatch)):
        store.builder(cursors)

    assert 0 == store.account.held


def test_a_closed_store_makes_nothing(session):
    store, snapshot = session.store, session.snapshot()
    store.close()
    store.close()
    for call in (
        store.open,
        lambda: store.restore(snapshot),
        lambda: store.builder(snapshot.cursors),
        session.fork,
        lambda: store.batch([session]).__enter__(),
        lambda: store.select(session, [0]),
    ):
        with pytest.raises(SessionClosed):
            call()

    assert 0 == store.account.held


# sessions


@pytest.mark.parametrize(
    "tokens",
    [
        0,
        -1,
        2**31,
        HUGE,
        None,
        True,
        1.0,
        "ids",
        b"ids",
        [],
        [-1],
        [2**32],
        [1.0],
        [True],
        ["1"],
        [[1, 2]],
        [None],
        {1, 2},
        torch.tensor([1.0]),
        torch.tensor([1j]),
        torch.tensor(data=True),
        torch.tensor([True]),
        torch.tensor([[1, 2]]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([-1]),
        ...,
    ],
    ids=repr,
)
def test_a_step_is_not_made_of_what_are_no_tokens(session, tokens):
    assert "tokens" == refuses(session, ArgumentError, lambda: session.step(tokens)).argument


def test_more_tokens_than_there_is_room_for_are_refused(session):
    refuses(session, ContextFull, session.step(60).__enter__)
    refuses(session, ContextFull, session.step(2**31 - 1).__enter__)


@pytest.mark.parametrize("tokens", [3, [[1], [2], [3]], [[1, 2], [3]], [1, 2], [[], []]])
def test_a_batch_takes_ids_for_every_sequence(tokens):
    session = tiny.store(4, None).open([], batch=2)
    with pytest.raises(ArgumentError):
        session.step(tokens)


def test_a_session_that_remembers_ids_wants_ids():
    session = tiny.store(4, None).open([])
    with pytest.raises(ArgumentError, match="remembers"):
        session.step(3)


@pytest.mark.parametrize(
    "capture", [[True], [6.0], ["6"], [None], [5], [4], [8], [HUGE], 6, "6"], ids=repr
)
def test_cuts_are_positions_inside_the_step(session, capture):
    refuses(session, ArgumentError, lambda: session.step(2, capture=capture).__enter__())


@pytest.mark.parametrize("layer", [-1, 3, HUGE, None, "0", 1.5, True], ids=repr)
def test_layers_that_are_not_there_are_refused(session, layer):
    rows = torch.zeros(1, 2, 4)
    with session.step(1) as step:
        for call in (
            lambda: step.write(layer, rows, rows),
            lambda: step.view(layer),
            lambda: step.attend(layer, rows),
            lambda: step.attend(layer, rows, rows, rows),
            lambda: session.live(layer),
            lambda: session.spans(layer, 1, 2),
        ):
            with pytest.raises((GeometryError, ArgumentError)):
                call()

        assert set() == step.written
        step.abort()


@pytest.mark.parametrize(("first", "stop"), [(0, 5), (1, 6), (-1, 3), (HUGE, HUGE + 1)])
def test_spans_are_of_live_rows(session, first, stop):
    refuses(session, EvictedPosition, lambda: session.spans(0, first, stop))


@pytest.mark.parametrize("number", [None, "1", 1.0, True], ids=repr)
def test_spans_are_between_whole_numbers(session, number):
    refuses(session, ArgumentError, lambda: session.spans(0, number, 4))
    refuses(session, ArgumentError, lambda: session.spans(0, 1, number))
    refuses(session, ArgumentError, lambda: session.spans(0, 3, 2))


@pytest.mark.parametrize("checkpoint", [None, 3, object()])
def test_what_is_no_checkpoint_is_not_returned_to(session, checkpoint):
    refuses(session, (ArgumentError, PositionError), lambda: session.return_to(checkpoint))


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", 3.5, object()])
def test_a_snapshot_goes_to_a_device_that_is_there(session, device):
    refuses(session, ArgumentError, lambda: session.snapshot(device=device))


def test_a_session_without_a_batch_is_not_reordered(session):
    refuses(session, ArgumentError, lambda: session.reorder([1]))
    refuses(session, ArgumentError, lambda: session.reorder([0, 0]))
    refuses(session, ArgumentError, lambda: session.reorder(None))


def test_a_closed_session_does_nothing(session):
    kept = session.checkpoint()
    step = session.step(1)
    session.close()
    session.close()
    for call in (
        step.__enter__,
        lambda: session.rewind(4),
        session.checkpoint,
        lambda: session.return_to(kept),
        session.fork,
        session.snapshot,
        lambda: session.spans(0, 1, 2),
        session.reset,
        session.record,
        session.mark,
        session.freeze,
        lambda: session.reorder([0]),
    ):
        with pytest.raises(SessionClosed) as refused:
            call()

        assert 5 == refused.value.position
    assert 5 == session.position
