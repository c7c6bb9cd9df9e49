"""Ways in which a store was once broken: pages of two sessions, interrupts, foreign tensors."""

import dataclasses

import pytest
import torch

import tiny

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
