"""Second sessions of the same rows: forks, and sequences of a batch."""

import pytest
import torch

import tiny
from kvplane.errors import ArgumentError, LimitReached
from tiny import equal, live_bytes

pytestmark = pytest.mark.usefixtures("memory")

ROW = 2 * 2 * 4


def test_a_fork_goes_its_own_way(memory):
    store = tiny.store(4, 6, None, memory=memory)
    session = tiny.filled(store.open([]), 11)
    fork = session.fork()

    assert equal(live_bytes(session), live_bytes(fork))
    assert session.ledger is not fork.ledger
    tiny.put_each(session, [11, 12])
    tiny.put_each(fork, [100, 101, 102])

    assert [*range(11), 11, 12] == tiny.held(session, 2) == session.tokens
    assert [*range(11), 100, 101, 102] == tiny.held(fork, 2) == fork.tokens
    assert [11, 12] == tiny.held(session, 0)[-2:]
    assert [100, 101, 102] == tiny.held(fork, 1)[-3:]
    session.rewind(12)
    tiny.put(session, [77])

    assert [*range(11), 100, 101, 102] == tiny.held(fork, 2)
    session.close()
    tiny.put(fork, [103])

    assert [*range(11), 100, 101, 102, 103] == tiny.held(fork, 2)


def test_a_fork_of_a_read_only_session_can_be_written():
    session = tiny.filled(tiny.store(4, None).open(), 6)
    session.freeze()
    fork = session.fork()
    tiny.put(fork, [6])

    assert (6, 7) == (session.position, fork.position)


def test_a_fork_past_the_limit_is_refused():
    store = tiny.store(4, None, limit=19 * ROW)
    session = tiny.filled(store.open(), 6)
    with pytest.raises(LimitReached):
        session.fork()

    assert 10 * ROW == store.account.held
    assert [session] == store.sessions


def test_sequences_of_a_batch_are_selected_and_reordered():
    store = tiny.store(4, None)
    session = store.open([], batch=3)
    group = store.geometry.groups[0]
    for first in range(6):
        ids = [[first + 100 * place] for place in range(3)]
        with session.step(ids) as step:
            for layer in (0, 1):
                parts = [tiny.rows(group, layer, token) for token in ids]
                step.write(layer, *(torch.stack(rows) for rows in zip(*parts, strict=True)))
    picked = store.select(session, [2, 0, 2, 2])

    assert [[first + 100 * place for first in range(6)] for place in (2, 0, 2, 2)] == picked.tokens
    assert 4 == picked.batch
    for layer in (0, 1):
        mine, theirs = live_bytes(session)[layer], live_bytes(picked)[layer]

        assert torch.equal(mine[0][[2, 0, 2, 2]], theirs[0])
        assert torch.equal(mine[1][[2, 0, 2, 2]], theirs[1])

    before = live_bytes(session)
    session.reorder([1, 1, 0])

    assert [[first + 100 * place for first in range(6)] for place in (1, 1, 0)] == session.tokens
    assert torch.equal(before[0][0][[1, 1, 0]], live_bytes(session)[0][0])
    for wrong in ([], [0, 1], [0, 1, 3], [-1, 0, 1], [True, 0, 1], ["0", 1, 2]):
        with pytest.raises(ArgumentError):
            session.reorder(wrong)
    for wrong in ([], [3], [-1], [1.0]):
        with pytest.raises(ArgumentError):
            store.select(session, wrong)
