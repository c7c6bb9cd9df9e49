"""Sessions with a batch axis: sequences that advance together, one plane row for all of them."""

import pytest
import torch

import tiny
from kvplane import Layout
from kvplane.errors import ArgumentError, TensorMismatch

pytestmark = pytest.mark.usefixtures("memory")

SEQUENCES = 3


@pytest.fixture(params=Layout, ids=lambda layout: layout.value)
def store(request, memory):
    layout = {"sliding_attention": request.param, "full_attention": request.param}
    return tiny.store(4, None, heads=2, head_dim=8, memory=memory, layout=layout)


def inputs(tokens, heads=2):
    """Query, key and value `[batch, tokens, heads, dim]`."""
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(3, SEQUENCES, 64, heads, 8, generator=generator)
    return rows[:, :, tokens.start : tokens.stop].unbind()


def attended(session, counts, sequence=None):
    """Outputs of steps of the given counts, `[batch, tokens, layers, heads, dim]`."""
    outs = []
    for count in counts:
        tokens = range(session.position, session.position + count)
        query, key, value = inputs(tokens)
        if sequence is not None:
            query, key, value = query[sequence], key[sequence], value[sequence]
        with session.step(count) as step:
            outs.append(
                torch.stack([step.attend(layer, query, key, value) for layer in (0, 1)], dim=-3)
            )
    return torch.cat(outs, dim=-4)


COUNTS = [3, 1, 6, 1, 1, 4, 9, 1]


def test_every_sequence_has_the_bits_of_a_session_of_its_own(store):
    together = attended(store.open(batch=SEQUENCES), COUNTS)
    for sequence in range(SEQUENCES):
        alone = attended(store.open(), COUNTS, sequence)

        assert torch.equal(alone, together[sequence])


def test_a_view_has_the_batch_axis_in_front(store):
    session = store.open(batch=SEQUENCES)
    attended(session, [11])
    for count in (1, 3, 7):
        _, key, value = inputs(range(session.position, session.position + count))
        with session.step(count) as step:
            step.write(0, key, value)
            keys, values = step.view(0).gather()

            assert (SEQUENCES, 3 + count, 2, 8) == keys.shape == values.shape
            assert torch.equal(key, keys[:, -count:])
            step.abort()

    for keys, values in session.spans(1, 2, 9):
        assert (SEQUENCES, 2, 8) == (keys.shape[0], *keys.shape[2:])
        assert keys.shape == values.shape


@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_a_batch_is_rolled_back_together(store, accepted):
    session = store.open(batch=SEQUENCES)
    attended(session, [9])
    fork = session.fork()
    _, key, value = inputs(range(9, 14))
    with session.step(5, speculative=True) as step:
        for layer in (0, 1):
            step.write(layer, key, value)
        step.commit(accepted)
    if accepted:
        with fork.step(accepted) as step:
            for layer in (0, 1):
                step.write(layer, key[:, :accepted], value[:, :accepted])

    assert 9 + accepted == session.position
    assert torch.equal(attended(fork, [1, 1]), attended(session, [1, 1]))


def test_sequences_change_places(store):
    session = store.open(batch=SEQUENCES)
    attended(session, [9])
    fork = session.fork()
    fork.reorder([2, 2, 0])
    tokens = range(9, 10)
    query, key, value = inputs(tokens)
    place = torch.tensor([2, 2, 0])
    with session.step(1) as step:
        expected = step.attend(0, query, key, value)
        step.attend(1, query, key, value)
    with fork.step(1) as step:
        got = step.attend(0, query[place], key[place], value[place])
        step.attend(1, query[place], key[place], value[place])

    assert torch.equal(expected[place], got)


def test_what_was_recorded_before_sequences_change_places_is_forgotten(store):
    session = store.open([], batch=SEQUENCES)
    session.record()
    _, key, value = inputs(range(12))
    for token in range(12):
        with session.step([[token]] * SEQUENCES) as step:
            for layer in (0, 1):
                step.write(layer, key[:, token : token + 1], value[:, token : token + 1])

    assert 0 < store.memory().recorded

    session.reorder([1, 0, 2])

    assert 0 == store.memory().recorded


@pytest.mark.parametrize("lead", [(), (2,), (4,), (1, SEQUENCES)])
def test_rows_without_the_batch_axis_or_of_another_batch_are_refused(store, lead):
    session = store.open(batch=SEQUENCES)
    rows = torch.zeros(*lead, 1, 2, 8)
    with session.step(1) as step:
        for call in (
            lambda: step.write(0, rows, rows),
            lambda: step.attend(0, rows, rows, rows),
        ):
            with pytest.raises(TensorMismatch):
                call()
        step.abort()


def test_a_batch_of_one_keeps_its_axis(store):
    session = store.open(batch=1)
    query, key, value = (rows[:1] for rows in inputs(range(3)))
    with session.step(3) as step:
        outs = [step.attend(layer, query, key, value) for layer in (0, 1)]

    assert [(1, 3, 2, 8)] * 2 == [out.shape for out in outs]


def test_ids_of_every_sequence_are_remembered():
    session = tiny.store(4).open([], batch=2)
    rows = torch.zeros(2, 2, 1, 2)
    with session.step([[1, 2], [3, 4]]) as step:
        step.write(0, rows, rows)
    with session.step(torch.tensor([[5, 6], [7, 8]]), speculative=True) as step:
        step.write(0, rows, rows)
        step.commit(1)

    assert [[1, 2, 5], [3, 4, 7]] == session.tokens
    with pytest.raises(ArgumentError, match="one length"):
        session.step([[1], [2, 3]])


def test_a_lockstep_session_takes_as_many_times_the_memory():
    store = tiny.store(4, None, limit=100 * 16)
    session = store.open(batch=2)
    rows = torch.zeros(2, 3, 1, 2)
    with session.step(3) as step:
        for layer in (0, 1):
            step.write(layer, rows, rows)

    assert 2 * (4 + 3) * 16 == store.account.held
    assert 2 * (3 + 3) * 16 == store.memory().total.rows_held
