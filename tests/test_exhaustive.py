"""Every sequence of operations up to a length, for rings of one to four rows.

A random walk may miss the one order that matters; this one misses none. Each node of the tree of
sequences goes on from its parent by a fork, so that the walk tests forks all along.
"""

import pytest

import tiny
from kvplane.errors import CheckpointLost, WindowLost
from oracle import Oracle

pytestmark = pytest.mark.usefixtures("memory")

DEPTH = 4
MAX_CONTEXT = 32


class Walk:
    """A session at one node of the tree, its oracle, and the checkpoint it may return to."""

    def __init__(self, session, oracle, kept=None):
        self.session = session
        self.oracle = oracle
        self.kept = kept

    def fresh(self, count):
        # every branch of the tree has tokens of its own
        start = self.oracle.position * 40
        return list(range(start, start + count))

    def take(self, count, accepted, *, branch=0):
        tokens = [token + branch for token in self.fresh(count)]
        with self.session.step(count, speculative=True) as step:
            tiny.write(step, self.session, tokens)
            step.commit(accepted)
        full = self.oracle.copy()
        self.oracle.take(tokens, accepted)
        for layer in self.oracle.held if accepted == 0 else ():
            if sorted(full.held[layer]) == list(self.session.live(layer)):
                self.oracle.held[layer] = full.held[layer]

    def rewind(self, back):
        position = self.oracle.position - back
        if position < 0:
            return
        lost = any(self.oracle.lost(layer, position) for layer in self.oracle.held)
        if lost:
            with pytest.raises(WindowLost):
                self.session.rewind(position)
        else:
            self.session.rewind(position)
            self.oracle.rewind(position)

    def checkpoint(self):
        self.kept = (self.session.checkpoint(), self.oracle.copy())

    def return_to(self):
        if self.kept is None or self.kept[0].owner is not self.session:
            return
        checkpoint, then = self.kept
        if checkpoint.lost_by is not None:
            with pytest.raises(CheckpointLost):
                self.session.return_to(checkpoint)
        else:
            self.session.return_to(checkpoint)
            self.oracle.become(then)

    def restore(self):
        restored = self.session.store.restore(self.session.snapshot())
        self.session.close()
        self.session = restored

    def reset(self):
        self.session.reset()
        self.oracle.reset()


def operations(capacity):
    """Every way on, by name; those that mean the same at this capacity once."""
    steps = {
        (1, 1): "a token",
        (2, 2): "two tokens",
        (capacity, capacity): "a ring of tokens",
        (capacity + 1, capacity + 1): "a ring and a token",
        (2, 0): "none of two",
        (3, 1): "one of three",
        (capacity + 2, capacity): "all but two",
    }
    ways = {
        name: lambda walk, step=step, branch=branch: walk.take(*step, branch=branch)
        for branch, (step, name) in enumerate(steps.items(), 1)
    }
    return {
        **ways,
        "back 1": lambda walk: walk.rewind(1),
        "back 2": lambda walk: walk.rewind(2),
        "keep": Walk.checkpoint,
        "return": Walk.return_to,
        "restore": Walk.restore,
        "reset": Walk.reset,
    }


def check(walk, path):
    session, oracle = walk.session, walk.oracle
    assert oracle.position == session.position, path
    for layer, held in oracle.held.items():
        assert sorted(held) == list(session.live(layer)), path

        plane = session.planes[layer]
        keys = plane.key[0, :, 0, 0].tolist()
        values = plane.value[0, :, 0, 1].tolist()
        for position, token in held.items():
            row = oracle.row(layer, position)
            first = 100 * token + tiny.SHIFT * layer

            assert (first, -first - 1) == (keys[row], values[row]), path

        runs = session.live_runs(session.geometry.group_of(layer))

        assert [oracle.row(layer, p) for p in sorted(held)] == [r for run in runs for r in run]


def play(make, ways, path):
    """A new session on which the operations of a path were done."""
    walk = make()
    for name in path:
        ways[name](walk)
    return walk


def explore(make, ways, path=()):
    """Check every path below this one; how many there were."""
    count = 0
    here = play(make, ways, path)
    for name in ways:
        longer = (*path, name)
        if "keep" in longer:
            # a checkpoint belongs to its session
            walk = play(make, ways, longer)
        else:
            walk = Walk(here.session.fork(), here.oracle.copy())
            ways[name](walk)
        check(walk, longer)
        walk.session.close()
        count += 1
        if len(longer) < DEPTH:
            count += explore(make, ways, longer)
    here.session.close()
    return count


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_every_sequence_of_operations_does_what_the_dictionaries_say(capacity):
    store = tiny.store(capacity, None, max_context=MAX_CONTEXT)

    def make():
        windows = {0: capacity, 1: None}
        rows = {0: capacity - 1, 1: 0}
        session = store.open(first_row=capacity - 1)
        return Walk(session, Oracle(0, windows, {0: capacity, 1: MAX_CONTEXT}, rows))

    ways = operations(capacity)
    count = explore(make, ways)

    assert sum(len(ways) ** depth for depth in range(1, DEPTH + 1)) == count
