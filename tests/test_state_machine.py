"""Sessions of one store under every operation in any order, against dictionaries of positions."""

from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tiny
from kvplane import Layout
from kvplane.batch import BatchStep
from kvplane.errors import (
    CheckpointLost,
    ContextFull,
    PositionError,
    SessionClosed,
    SessionReadOnly,
    StepIncomplete,
    WindowLost,
)
from oracle import Oracle, check
from poison import poisoned

MAX_SESSIONS = 4
pick = st.integers(0, MAX_SESSIONS - 1)
counts = st.one_of(st.integers(1, 4), st.integers(5, 14))


class Torn(Exception):
    pass


class Sessions(RuleBasedStateMachine):
    """A store of drawn windows; every session beside its oracle."""

    memory = "heap"

    @initialize(
        windows=st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=3),
        slack=st.integers(0, 3),
        room=st.integers(8, 50),
        layout=st.sampled_from(Layout),
        wide=st.booleans(),
        shared=st.booleans(),
    )
    def make_store(self, windows, slack, room, layout, wide, shared):
        # a row of 4,096 bytes lets mapped memory unroll a ring of any capacity
        shape = {"head_dim": 512} if wide and self.memory == "mapped" else {}
        if shared:
            windows = [*windows, windows[0]]
            shape["shares"] = {len(windows) - 1: 0}
        with mock.patch("kvplane.store.choose", poisoned):
            self.store = tiny.store(
                *windows,
                slack=slack,
                max_context=room,
                memory=self.memory,
                layout={"full_attention": layout},
                **shape,
            )
        self.pairs = []
        self.kept = []
        self.snapshots = []
        self.token = 1

    # helpers

    def fresh(self, count):
        tokens = list(range(self.token, self.token + count))
        self.token += count
        return tokens

    def pair(self, which):
        return self.pairs[which % len(self.pairs)]

    def adopt(self, session, oracle):
        if len(self.pairs) < MAX_SESSIONS:
            self.pairs.append((session, oracle))
        else:
            session.close()

    def write(self, session, oracle, step, tokens, order):
        layers = tiny.owners(session)
        for layer in sorted(layers, key=lambda layer: order >> layer & 3):
            tiny.write(step, session, tokens, layers=[layer])
            view = step.view(layer)

            assert oracle.seen(layer, tokens) == (
                view.first,
                tiny.tokens_of(session, layer, view.spans),
            )
            assert step.stop == view.stop

    def took(self, session, oracle, tokens, accepted):
        # when all is taken back, a ring that no row had reached yet holds more than one that had
        full = oracle.copy()
        oracle.take(tokens, accepted)
        for layer in oracle.held if accepted == 0 else ():
            if sorted(full.held[layer]) == list(session.live(layer)):
                oracle.held[layer] = full.held[layer]

    def fits(self, oracle, tokens):
        return oracle.position + len(tokens) <= self.store.max_context

    # sessions

    @precondition(lambda self: len(self.pairs) < MAX_SESSIONS)
    @rule(first=st.integers(0, 7), row=st.one_of(st.none(), st.integers(0, 20)), ids=st.booleans())
    def open(self, first, row, ids):
        windows, capacities, rows = {}, {}, {}
        rings = [
            self.store.plan.capacities[group.id]
            for group in self.store.geometry.groups
            if group.is_sliding
        ]
        row = None if row is None else row % min(rings, default=1)
        for group in self.store.geometry.groups:
            for layer in group.layers:
                windows[layer] = group.sliding_window
                capacities[layer] = self.store.plan.capacities[group.id]
                turned = row is not None and group.is_sliding
                rows[layer] = row if turned else first % capacities[layer]
        session = self.store.open([] if ids else None, first_position=first, first_row=row)
        self.adopt(session, Oracle(first, windows, capacities, rows))

    @precondition(lambda self: self.pairs)
    @rule(which=pick)
    def fork(self, which):
        session, oracle = self.pair(which)
        self.adopt(session.fork(), oracle.copy())

    @precondition(lambda self: self.pairs)
    @rule(which=pick)
    def snapshot(self, which):
        session, oracle = self.pair(which)
        self.snapshots.append((session.snapshot(), oracle.copy()))

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 9))
    def restore(self, which):
        snapshot, oracle = self.snapshots[which % len(self.snapshots)]
        self.adopt(self.store.restore(snapshot), oracle.copy())

    @precondition(lambda self: self.snapshots and self.pairs)
    @rule(which=st.integers(0, 9), place=pick)
    def restore_into(self, which, place):
        session, _ = self.pair(place)
        snapshot, kept = self.snapshots[which % len(self.snapshots)]
        if session.read_only or session.batch != snapshot.batch:
            return
        self.store.restore(snapshot, into=session)
        self.pairs[place % len(self.pairs)] = (session, kept.copy())
        for checkpoint in self.kept:
            if checkpoint[0] is session:
                checkpoint[3] = True

    @precondition(lambda self: self.pairs)
    @rule(which=pick)
    def reset(self, which):
        session, oracle = self.pair(which)
        session.reset()
        oracle.reset()
        for kept in self.kept:
            if kept[0] is session:
                kept[3] = True

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(which=pick)
    def close(self, which):
        session, _ = self.pairs.pop(which % len(self.pairs))
        session.close()
        session.close()
        for use in (lambda: session.step([1]).__enter__(), session.fork, session.snapshot):
            with pytest.raises(SessionClosed):
                use()

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(which=pick)
    def freeze(self, which):
        session, oracle = self.pair(which)
        fork = session.fork()
        fork.freeze()
        for use in (lambda: fork.step([1]).__enter__(), lambda: fork.rewind(0), fork.reset):
            with pytest.raises(SessionReadOnly):
                use()
        check(fork, oracle)
        fork.close()

    # steps

    @precondition(lambda self: self.pairs)
    @rule(which=pick, count=counts, order=st.integers(0, 255))
    def step(self, which, count, order):
        session, oracle = self.pair(which)
        tokens = self.fresh(count)
        before = tiny.state(session)
        try:
            with session.step(tokens) as step:
                self.write(session, oracle, step, tokens, order)
        except ContextFull:
            assert not self.fits(oracle, tokens)
            assert tiny.same(before, tiny.state(session))
        else:
            assert self.fits(oracle, tokens)
            oracle.take(tokens, count)

    @precondition(lambda self: self.pairs)
    @rule(which=pick, count=counts, part=st.integers(0, 14), order=st.integers(0, 255))
    def speculate(self, which, count, part, order):
        session, oracle = self.pair(which)
        tokens = self.fresh(count)
        accepted = part % (count + 1)
        if not self.fits(oracle, tokens):
            return
        with session.step(tokens, speculative=True) as step:
            self.write(session, oracle, step, tokens, order)
            step.commit(accepted)
        self.took(session, oracle, tokens, accepted)

    @precondition(lambda self: self.pairs)
    @rule(which=pick, count=counts, written=st.integers(0, 4), forgotten=st.booleans())
    def abort(self, which, count, written, forgotten):
        session, oracle = self.pair(which)
        tokens = self.fresh(count)
        if not self.fits(oracle, tokens):
            return
        layers = tiny.owners(session)[:written]
        forgotten = forgotten and len(layers) < len(tiny.owners(session))
        step = session.step(tokens)
        step.__enter__()
        tiny.write(step, session, tokens, layers=layers)
        if forgotten:
            with pytest.raises(StepIncomplete):
                step.__exit__(None, None, None)
        else:
            step.__exit__(Torn, Torn(), None)
        self.took(session, oracle, tokens, 0)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(
        parts=st.lists(st.tuples(counts, st.integers(0, 14)), min_size=MAX_SESSIONS, max_size=4),
        turn=pick,
        accept=st.booleans(),
    )
    def batch(self, parts, turn, accept):
        pairs = self.pairs[turn:] + self.pairs[:turn]
        tokens = [self.fresh(count) for (count, _), _ in zip(parts, pairs, strict=False)]
        sessions = [session for session, _ in pairs]
        wanted = [
            part if session.tokens is not None else len(part)
            for session, part in zip(sessions, tokens, strict=True)
        ]
        before = [tiny.state(session) for session in sessions]
        together = BatchStep(sessions, wanted, speculative=True)
        accepted = [
            part % (count + 1) if accept else count
            for (count, part), _ in zip(parts, pairs, strict=False)
        ]
        flat = [token for part in tokens for token in part]
        try:
            with together as step:
                for group in self.store.geometry.groups:
                    for layer in group.layers:
                        step.write(layer, *tiny.rows(group, layer, flat))
                step.commit(accepted)
        except ContextFull:
            assert not all(
                self.fits(oracle, t) for (_, oracle), t in zip(pairs, tokens, strict=True)
            )
            assert all(
                tiny.same(state, tiny.state(session))
                for state, session in zip(before, sessions, strict=True)
            )
        else:
            for (session, oracle), part, count in zip(pairs, tokens, accepted, strict=True):
                self.took(session, oracle, part, count)

    # going back

    @precondition(lambda self: self.pairs)
    @rule(which=pick, back=st.integers(0, 14))
    def rewind(self, which, back):
        session, oracle = self.pair(which)
        position = oracle.position - back
        before = tiny.state(session)
        if position < oracle.first:
            with pytest.raises(PositionError):
                session.rewind(position)
            assert tiny.same(before, tiny.state(session))
            return
        lost = {layer: oracle.lost(layer, position) for layer in oracle.held}
        promised = all(not lost[layer] or oracle.recorded(layer, position) for layer in lost)
        refused = self.refused(session, position)
        if refused is not None:
            group = next(group for group in session.groups if group.id == refused.group)
            layer = group.layers[0]

            assert not promised
            assert oracle.needed(layer, position).start == refused.first
            assert tiny.same(before, tiny.state(session))
            if oracle.left is None:
                assert lost[layer] == list(range(refused.first, refused.stop))
        elif back:
            assert promised or oracle.left is not None
            self.forget_above(session, position)
            oracle.rewind(position)

    def refused(self, session, position):
        try:
            session.rewind(position)
        except WindowLost as error:
            return error
        return None

    def forget_above(self, session, position):
        for kept in self.kept:
            if kept[0] is session and kept[2].position > position and kept[1].holds is None:
                kept[3] = True

    @precondition(lambda self: self.pairs)
    @rule(which=pick, on=st.booleans())
    def record(self, which, on):
        session, oracle = self.pair(which)
        session.record(on=on)
        oracle.record(on=on)

    @precondition(lambda self: self.pairs)
    @rule(which=pick)
    def checkpoint(self, which):
        session, oracle = self.pair(which)
        self.kept.append([session, session.checkpoint(), oracle.copy(), False])

    @precondition(lambda self: self.kept and self.pairs)
    @rule(which=st.integers(0, 9), other=pick)
    def return_to(self, which, other):
        owner, checkpoint, then, lost = self.kept[which % len(self.kept)]
        session, oracle = self.pair(other)
        before = tiny.state(session)
        if session is not owner:
            with pytest.raises(PositionError, match="another session's"):
                session.return_to(checkpoint)
            assert tiny.same(before, tiny.state(session))
        elif lost:
            with pytest.raises(CheckpointLost) as refused:
                session.return_to(checkpoint)
            assert then.position == refused.value.position
            assert tiny.same(before, tiny.state(session))
        else:
            session.return_to(checkpoint)
            self.forget_above(session, then.position)
            oracle.become(then)

    # what must hold after every rule

    @invariant()
    def every_session_is_what_its_oracle_says(self):
        for session, oracle in getattr(self, "pairs", ()):
            check(session, oracle)

    @invariant()
    def the_account_is_rings_and_full_rows(self):
        plan = self.store.plan if hasattr(self, "store") else None
        held = [
            plan.ring_nbytes + plan.full_row_nbytes * len(oracle.history)
            for _, oracle in getattr(self, "pairs", ())
        ]
        if plan is not None:
            assert sum(held) == self.store.account.held

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            assert 0 == self.store.account.held


class SessionsMapped(Sessions):
    """The same in mapped memory, where forks and checkpoints share pages."""

    memory = "mapped"


@pytest.mark.parametrize("machine", [Sessions, SessionsMapped], ids=["heap", "mapped"])
def test_sessions_are_what_dictionaries_of_positions_say(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=100, stateful_step_count=40, report_multiple_bugs=False),
    )
