"""Ways in which a store was once broken: pages of two sessions, interrupts, foreign tensors."""

import dataclasses

import numpy as np
import pytest
import torch

import tiny
from kvplane import KVStore
from kvplane.batch import BatchStep
from kvplane.errors import ArgumentError, SessionClosed, SnapshotMismatch, TensorMismatch

pytestmark = pytest.mark.usefixtures("memory")

# rows of a page, so that rings are unrolled and forks share them
WIDE = 512


def test_recorded_rows_go_back_into_pages_of_ones_own():
    session = tiny.store(4, None, head_dim=WIDE).open([])
    session.record()
    tiny.filled(session, 9)
    fork = session.fork()
    session.rewind(6)

    assert [3, 4, 5] == tiny.held(session, 0)
    assert [5, 6, 7, 8] == tiny.held(fork, 0)


def test_a_checkpoints_rows_go_back_into_pages_of_ones_own():
    session = tiny.filled(tiny.store(4, None, head_dim=WIDE).open([]), 6)
    checkpoint = session.checkpoint()
    tiny.filled(session, 9)
    fork = session.fork()
    session.return_to(checkpoint)

    assert [2, 3, 4, 5] == tiny.held(session, 0)
    assert [5, 6, 7, 8] == tiny.held(fork, 0)


@pytest.mark.parametrize("tokens", [[55, 66, 77], [55, 66, 77, 88, 99, 1010]])
def test_a_return_brings_the_captures_of_its_branch_back(tokens):
    # no full layer: a checkpoint outlives a rewind below it in either memory
    session = tiny.filled(tiny.store(4, slack=4).open([]), 5)
    with session.step([5, 6, 7, 8], capture=[7]) as step:
        tiny.write(step, session, [5, 6, 7, 8])
    session.mark()
    mine = session.captures[7]
    checkpoint = session.checkpoint()
    session.rewind(5)
    with session.step(tokens, capture=[7]) as step:
        tiny.write(step, session, tokens)

    assert mine is not session.captures[7]
    assert mine.rows[0][0].nbytes * 4 == session.store.memory().captures
    session.return_to(checkpoint)

    assert {7: mine} == session.captures
    assert {9} == session.marks
    assert mine.rows[0][0].nbytes * 2 == session.store.memory().captures


def test_a_session_that_is_opened_in_inference_mode_is_used_outside_it():
    with torch.inference_mode():
        session = tiny.store(4, None).open([])
    tiny.put(session, range(6))
    tiny.put(session, [6, 7], speculative=True, accepted=1)

    assert [3, 4, 5, 6] == tiny.held(session, 0)


def changed(snapshot, change):
    """The snapshot with all keys and values changed."""
    rows = {layer: (change(key), change(value)) for layer, (key, value) in snapshot.rows.items()}
    return dataclasses.replace(snapshot, rows=rows)


@pytest.mark.parametrize("again", [False, True])
def test_no_gradient_is_kept_of_rows_that_are_restored(again):
    store = tiny.store(4, None)
    session = tiny.filled(store.open(), 3)
    snapshot = changed(session.snapshot(), lambda rows: rows.requires_grad_())
    restored = store.restore(snapshot, into=session if again else None)

    assert not restored.planes[0].key.requires_grad
    assert not restored.planes[1].value.requires_grad


def key_and_value(snapshot, layer, change):
    """The snapshot's rows with one layer's pair changed."""
    return {"rows": {**snapshot.rows, layer: change(*snapshot.rows[layer])}}


FORGED = {
    "too few ids": lambda _: {"tokens": ((1, 2),)},
    "ids of two sequences": lambda _: {"tokens": ((1,) * 5,) * 2},
    "ids of none": lambda _: {"tokens": ()},
    "ids that are none": lambda _: {"tokens": ((0, 1, 2, 3, 2**32),)},
    "no ids at all": lambda _: {"tokens": 5},
    "another position": lambda _: {"position": 99},
    "a position that is none": lambda _: {"position": torch.tensor([1, 2])},
    "no first position": lambda _: {"first_position": None},
    "a first position below 0": lambda _: {"first_position": -1},
    "a batch of none": lambda _: {"batch": 0},
    "a batch that is none": lambda _: {"batch": True},
    "provenance of more rows": lambda _: {"numerics": ((99, {"chunk": 256}),)},
    "provenance of no rows": lambda _: {"numerics": ((0, {"chunk": 256}),)},
    "provenance without a chunk": lambda _: {"numerics": ((5, {}),)},
    "provenance by nobody": lambda _: {"numerics": ((5, None),)},
    "half a provenance": lambda _: {"numerics": ((5,),)},
    "no provenance": lambda _: {"numerics": None},
    "canonical above it": lambda _: {"canonical": 256},
    "canonical by nobody": lambda _: {"canonical": 5, "numerics": ()},
    "canonical below 0": lambda _: {"canonical": -1},
    "another kind of geometry": lambda _: {"geometry": None},
    "a dtype by name": lambda _: {"dtype": "float32"},
    "no rows": lambda _: {"rows": None},
    "a layer too few": lambda s: {"rows": {0: s.rows[0]}},
    "a layer too many": lambda s: {"rows": {**s.rows, 7: s.rows[0]}},
    "keys alone": lambda s: key_and_value(s, 0, lambda key, _: (key,)),
    "one tensor": lambda s: key_and_value(s, 0, lambda key, _: key),
    "rows too few": lambda s: key_and_value(s, 0, lambda k, v: (k[:, 1:], v[:, 1:])),
    "rows too many": lambda s: key_and_value(s, 0, lambda k, v: (k.repeat(1, 2, 1, 1), v)),
    "values too few": lambda s: key_and_value(s, 1, lambda k, v: (k, v[:, 1:])),
    "rows without data": lambda s: key_and_value(s, 1, lambda k, v: (k.to("meta"), v)),
    "sparse rows": lambda s: key_and_value(s, 1, lambda k, v: (k, v.to_sparse())),
    "flat rows": lambda s: key_and_value(s, 0, lambda k, v: (k.flatten(), v)),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_snapshot_is_refused_and_nothing_is_made_or_changed(forge, again):
    store = tiny.store(4, None)
    session = tiny.filled(store.open([]), 5)
    snapshot = session.snapshot()
    before = tiny.state(session)
    forged = dataclasses.replace(snapshot, **forge(snapshot))

    with pytest.raises((SnapshotMismatch, TensorMismatch, ArgumentError)):
        store.restore(forged, into=session if again else None)

    assert tiny.same(before, tiny.state(session))
    assert [session] == store.sessions


def builder_of(session, **options):
    cursors = {name: cursor.as_tuple() for name, cursor in session.cursors.items()}
    return session.store.builder(cursors, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"batch": True},
        {"batch": 0},
        {"batch": "x"},
        {"first_position": None},
        {"first_position": -1},
        {"tokens": [[1, 2]]},
        {"tokens": 5},
        {"ledger": 0},
    ],
    ids=str,
)
def test_a_builder_is_not_made_of_arguments_that_mean_nothing(options):
    session = tiny.filled(tiny.store(4, None).open(), 5)
    held = session.store.account.held

    with pytest.raises(ArgumentError):
        builder_of(session, **options)

    assert held == session.store.account.held


NO_LAYERS = [None, True, 2, -1, "0", [0], 0.0]


@pytest.mark.parametrize("layer", NO_LAYERS, ids=str)
def test_a_builder_refuses_a_layer_that_has_no_rows(layer):
    session = tiny.filled(tiny.store(4, None).open(), 5)
    builder = builder_of(session)
    calls = (
        lambda: builder.rows(layer, 1, 2),
        lambda: builder.filled(layer, 1, 2),
        lambda: builder.share(layer, session.planes[0]),
        lambda: builder.write(layer, 1, *session.snapshot().rows[0]),
    )
    for call in calls:
        with pytest.raises(ArgumentError):
            call()


@pytest.mark.parametrize("position", [None, 1.0, "1", True, torch.tensor([1, 2])], ids=str)
def test_a_builder_refuses_a_position_that_is_none(position):
    session = tiny.filled(tiny.store(4, None).open(), 5)
    builder = builder_of(session)
    calls = (
        lambda: builder.rows(0, position, 2),
        lambda: builder.rows(0, 1, position),
        lambda: builder.filled(0, position, 2),
        lambda: builder.filled(0, 1, position),
        lambda: builder.write(0, position, *session.snapshot().rows[0]),
    )
    for call in calls:
        with pytest.raises(ArgumentError):
            call()


def test_a_builder_shares_planes_of_its_shape_only():
    session = tiny.filled(tiny.store(4, None).open(), 5)
    builder = builder_of(session)
    for source in (None, session, session.planes[1]):
        with pytest.raises(ArgumentError):
            builder.share(0, source)


def test_a_builder_is_used_once():
    session = tiny.filled(tiny.store(4, None).open(), 5)
    rows = session.snapshot().rows
    builder, abandoned = builder_of(session), builder_of(session)
    builder.write(0, 1, *rows[0])
    builder.write(1, 0, *rows[1])
    abandoned.write(0, 1, *rows[0])
    abandoned.write(1, 0, *rows[1])
    abandoned.abandon()
    made = builder.finish()
    builder.abandon()

    assert not made.closed
    for used in (builder, abandoned):
        for call in (
            used.finish,
            lambda used=used: used.write(0, 1, *rows[0]),
            lambda used=used: used.rows(0, 1, 2),
            lambda used=used: used.filled(0, 1, 2),
            lambda used=used: used.share(0, session.planes[0]),
        ):
            with pytest.raises(SessionClosed):
                call()

    assert {session, made} == set(session.store.sessions)


def test_rows_that_are_not_strided_are_refused_before_anything_is_written():
    session = tiny.filled(tiny.store(4, None, 4, shares={2: 0}).open(), 5)
    good = torch.zeros(2, 1, 2)
    before = tiny.state(session)
    for rows in (good.to_sparse(), good.to_mkldnn()):
        with session.step(2) as step:
            for call in (
                lambda rows=rows: step.write(0, rows, good),
                lambda rows=rows: step.write(1, good, rows),
                lambda rows=rows: step.attend(0, rows, good, good),
            ):
                with pytest.raises(TensorMismatch, match="layout"):
                    call()

            assert set() == step.written
            step.abort()

    assert tiny.same(before, tiny.state(session))


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(2, dtype=torch.int64, device="meta"),
        torch.zeros(2, dtype=torch.int64).to_sparse(),
    ],
    ids=["meta", "sparse"],
)
def test_ids_that_are_not_there_are_refused(tokens):
    session = tiny.store(4).open()

    with pytest.raises(ArgumentError):
        session.step(tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"capture": np.array([1, 2])},
        {"capture": np.array(1)},
        {"capture": torch.tensor([1])},
        {"speculative": torch.tensor([1, 2])},
        {"speculative": 1},
        {"speculative": None},
    ],
    ids=str,
)
def test_a_step_is_not_made_of_options_that_mean_nothing(options):
    session = tiny.store(4).open()

    with pytest.raises(ArgumentError):
        session.step(1, **options)


@pytest.mark.parametrize("accepted", [1, True, 1.5, "11", {0: 1}, {1}], ids=repr)
def test_a_batch_refuses_what_is_no_number_for_each_session(accepted):
    store = tiny.store(4)
    session = store.open()
    with store.batch([session]) as batch:
        tiny.write(batch, session, [0])
        with pytest.raises(ArgumentError):
            batch.commit(accepted)

        assert batch.steps[0].is_open

    assert 1 == session.position


@pytest.mark.parametrize("sessions", [None, 5, "x", [5], [None], {}, torch.zeros(2)], ids=repr)
def test_a_batch_is_of_sessions(sessions):
    with pytest.raises(ArgumentError):
        BatchStep(sessions)


def test_sequences_are_selected_of_a_session_of_the_store():
    store, other = tiny.store(4), tiny.store(4)
    for session in (None, 5, other.open()):
        with pytest.raises(ArgumentError):
            store.select(session, [0])


@pytest.mark.parametrize("options", [{"device": 10**40}, {"dtype": np.array([1, 2])}], ids=list)
def test_a_store_is_not_made_on_what_is_none(options):
    with pytest.raises(ArgumentError):
        KVStore(tiny.geometry(4), max_context=8, **options)
