"""What a step shows, keeps beside its planes, counts, and survives."""

import gc

import pytest
import torch

import tiny
from kvplane.errors import (
    ArgumentError,
    LimitReached,
    ViewExpired,
)

pytestmark = pytest.mark.usefixtures("memory")


def window_of(step, session, layer):
    """First position and tokens of a layer's view."""
    view = step.view(layer)
    return view.first, tiny.tokens_of(session, layer, view.spans)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("slack", [0, 2])
def test_a_view_is_the_window_and_the_step_in_logical_order(tokens, slack, memory):
    session = tiny.filled(tiny.store(4, 6, None, slack=slack, memory=memory).open(), 11)
    with session.step(tokens) as step:
        for layer, window in ((0, 4), (1, 6), (2, 64)):
            tiny.write(step, session, range(11, 11 + tokens), layers=[layer])
            first = max(0, 11 - (window - 1))

            assert (first, list(range(first, 11 + tokens))) == window_of(step, session, layer)
            assert 11 + tokens == step.view(layer).stop
            assert len(step.view(layer).spans) <= 2

            key, value = step.view(layer).gather()

            assert 11 + tokens - first == key.shape[0] == value.shape[0]


def test_one_span_is_handed_out_without_a_copy():
    session = tiny.filled(tiny.store(None).open(), 3)
    with session.step(1) as step:
        tiny.write(step, session, [3])
        view = step.view(0)

        assert view.gather()[0] is view.spans[0][0]
        assert view.spans[0][0].data_ptr() == session.planes[0].key.data_ptr()


def test_an_unrolled_ring_is_one_span_at_any_rotation():
    session = tiny.store(4, None, head_dim=512, memory="mapped").open()
    for position in range(13):
        with session.step(1) as step:
            tiny.write(step, session, [position])

            assert 1 == len(step.view(0).spans)
            assert list(range(max(0, position - 3), position + 1)) == window_of(step, session, 0)[1]


def test_the_view_of_a_chunk_ends_when_the_next_layer_takes_its_place():
    session = tiny.filled(tiny.store(4, 6, None).open(), 11)
    with session.step(3) as step:
        tiny.write(step, session, range(11, 14), layers=[0])
        step.view(0)
        tiny.write(step, session, range(11, 14), layers=[1])
        with pytest.raises(ViewExpired) as refused:
            step.view(0)
        tiny.write(step, session, range(11, 14), layers=[2])

        # a full plane loses nothing: its view is there to the end
        assert list(range(14)) == window_of(step, session, 2)[1]

    assert 0 == refused.value.layer


def test_a_chunk_that_others_share_can_be_read_to_the_end():
    session = tiny.filled(tiny.store(4, 6, 4, None, shares={2: 0}).open(), 11)
    with session.step(3) as step:
        tiny.write(step, session, range(11, 14))

        assert list(range(8, 14)) == window_of(step, session, 2)[1]

    assert [10, 11, 12, 13] == tiny.held(session, 0)


def test_the_callers_tensors_may_change_after_the_write():
    session = tiny.filled(tiny.store(4, None).open(), 6)
    key, value = tiny.rows(session.groups[0], 0, [6, 7])
    with session.step(2) as step:
        step.write(0, key, value)
        key.fill_(9)
        value.fill_(9)
        tiny.write(step, session, [6, 7], layers=[1])

    assert [4, 5, 6, 7] == tiny.held(session, 0)


def test_ids_are_remembered_for_what_was_kept():
    session = tiny.store(4, None).open([])
    tiny.put(session, [5, 6, 7])
    tiny.put(session, [8, 9, 10], accepted=1, speculative=True)
    with session.step(torch.tensor([20, 21])) as step:
        step.abort()
    tiny.put(session, [11])

    assert [5, 6, 7, 8, 11] == session.tokens


def test_a_session_that_remembers_no_ids_takes_counts():
    session = tiny.store(4, None).open()
    with session.step(2) as step:
        tiny.write(step, session, [0, 1])

    assert session.tokens is None


@pytest.mark.parametrize("cut", [1, 2, 4, 5, 9])
def test_sliding_rows_are_kept_at_cuts_inside_a_step(cut):
    session = tiny.filled(tiny.store(4, 6, None).open(), 5)
    with session.step(9, capture=(5 + cut,)) as step:
        tiny.write(step, session, range(5, 14))

    kept = session.captures[5 + cut]

    assert 5 + cut == kept.position
    assert {0, 1} == set(kept.rows)
    for layer, window in ((0, 4), (1, 6)):
        spans = [(key[0], value[0]) for key, value in [kept.rows[layer]]]

        assert list(range(max(0, 5 + cut - (window - 1)), 5 + cut)) == tiny.tokens_of(
            session, layer, spans
        )


def test_a_cut_beyond_what_was_accepted_is_not_kept():
    session = tiny.store(4, None).open()
    with session.step(4, speculative=True, capture=(2, 4)) as step:
        tiny.write(step, session, range(4))
        step.commit(3)

    assert [2] == sorted(session.captures)


@pytest.mark.parametrize("cut", [0, 3, 6, 10**30])
def test_a_cut_outside_the_step_is_refused(cut):
    session = tiny.filled(tiny.store(4, None).open(), 3)
    with pytest.raises(ArgumentError, match=r"within \(3, 5\]"), session.step(2, capture=(cut,)):
        pass

    assert session.open_step is None


def test_a_step_counts_against_the_limit_and_gives_back_what_it_did_not_keep():
    row = 2 * 2 * 4
    store = tiny.store(4, None, limit=4 * row + 8 * row)
    session = store.open()

    assert 4 * row == store.account.held

    tiny.put(session, range(6))

    assert (4 + 6) * row == store.account.held
    with pytest.raises(LimitReached) as refused, session.step(2, speculative=True):
        pass
    # two full rows and one journalled sliding row
    assert (3 * row, 10 * row, 12 * row) == (
        refused.value.asked,
        refused.value.held,
        refused.value.limit,
    )
    assert session.open_step is None
    tiny.put(session, [6])
    with session.step(1) as step:
        assert 12 * row == store.account.held
        step.abort()

    assert 11 * row == store.account.held
    session.close()

    assert 0 == store.account.held


def test_memory_that_cannot_be_had_refuses_the_step(memory):
    session = tiny.filled(tiny.store(4, None, memory=memory).open(), 3)
    before = tiny.state(session)

    def fails(group, runs):
        raise MemoryError(group, runs)

    session.back = fails
    with pytest.raises(MemoryError), session.step(2):
        pass
    del session.back

    assert tiny.same(before, tiny.state(session))
    tiny.put(session, [3])

    assert [0, 1, 2, 3] == tiny.held(session, 0)


class Torn(RuntimeError):
    pass


@pytest.mark.parametrize("failing", range(12))
@pytest.mark.parametrize("accepted", [None, 2])
def test_a_store_that_fails_at_any_copy_leaves_the_session_as_it_was(failing, accepted):
    session = tiny.filled(tiny.store(4, 6, None).open([]), 11)
    before = tiny.state(session)
    copies = 0
    planes = list(session.planes.values())
    stores = {id(plane): type(plane).store for plane in planes}

    def torn(self, runs, key, value):
        nonlocal copies
        copies += 1
        stores[id(self)](self, runs, key, value)
        if copies == failing + 1:
            raise Torn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(planes[0]), "store", torn)
        try:
            tiny.put(session, range(100, 105), accepted=accepted, speculative=accepted is not None)
        except Torn:
            assert 11 == session.position
            assert [8, 9, 10] == tiny.held(session, 0)[-3:]
            assert [6, 7, 8, 9, 10] == tiny.held(session, 1)[-5:]
            assert before[1] == session.tokens
            assert before[5] == session.store.account.held
            assert before[7] == session.ledger
        else:
            assert 11 + (accepted or 5) == session.position
    tiny.put_each(session, range(session.position, session.position + 7))

    assert session.open_step is None


@pytest.mark.parametrize("recording", [False, True])
def test_a_copy_that_failed_and_is_tried_again_can_still_be_taken_back(recording):
    session = tiny.filled(tiny.store(4, 6, None).open(), 11)
    if recording:
        session.record()
    plane = type(session.planes[0])
    store = plane.store

    def torn(self, runs, key, value):
        store(self, runs, key, value)
        raise Torn

    with session.step(3) as step:
        tiny.write(step, session, range(100, 103), layers=[0])
        # the chunk of layer 0 reaches its ring as layer 1 is written
        for _ in range(2):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(plane, "store", torn)
                with pytest.raises(Torn):
                    tiny.write(step, session, range(100, 103), layers=[1])
        tiny.write(step, session, range(100, 103), layers=[1, 2])
        step.abort()

    assert [8, 9, 10] == tiny.held(session, 0)[-3:]
    assert [6, 7, 8, 9, 10] == tiny.held(session, 1)[-5:]
    assert list(range(11)) == tiny.held(session, 2)


def test_a_journal_that_cannot_be_had_takes_the_step_back():
    session = tiny.filled(tiny.store(4, 6, None).open(), 11)
    before = tiny.state(session)

    def fails(like, shape):
        raise MemoryError(like, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvplane.journal.scratch", fails)
        with pytest.raises(MemoryError):
            tiny.put(session, range(100, 103))

    assert tiny.same(before, tiny.state(session))


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 6, 13])
@pytest.mark.parametrize("start", [0, 3, 5, 11])
def test_a_journal_holds_as_many_rows_as_it_says(start, tokens, recording, speculative):
    session = tiny.filled(tiny.store(5, None).open(), start)
    if recording:
        session.record()
    ring, full = (group.id for group in session.groups)
    with session.step(tokens, speculative=speculative) as step:
        tiny.write(step, session, range(tokens))
        step._flush_waiting(everything=True)
        kept = {
            name: sum(rows.key.shape[1] for saved in part._saved.values() for rows in saved)
            for name, part in step._groups.items()
        }

        assert {ring: step.journal_rows(ring), full: 0} == kept
        if recording:
            gone = range(max(0, start - 5), min(start, start + tokens - 5))
            assert len(gone) + max(0, tokens - 5) == kept[ring]
        step.abort()


def test_no_step_leaves_anything_behind():
    session = tiny.filled(tiny.store(4, None).open(), 5)
    for _ in range(3):
        with session.step(3) as step:
            tiny.write(step, session, range(3))
            step.abort()
    gc.collect()

    assert tiny.store(4, None).memory().total.scratch == session.store.memory().total.scratch
