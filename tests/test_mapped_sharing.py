"""Pages shared by forks and checkpoints, in any order of events, against a model of the pages.

After every event: each session's rows are its own history; what the system says a memory file
holds is what the model says; and a page with two owners has the bytes it had when it was shared.
"""

import os

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
from kvplane.errors import WindowLost
from oracle import Oracle, check
from page_model import PAGE, Pages

MAX_SESSIONS = 6
MAX_CONTEXT = 80
pick = st.integers(0, MAX_SESSIONS - 1)


def file_pages(fd):
    """The pages of a file that are there, as the system walks them."""
    pages, at = set(), 0
    stop = os.fstat(fd).st_size
    while at < stop:
        try:
            first = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(fd, first, os.SEEK_HOLE)
        pages.update(range(first // PAGE, at // PAGE))
    return pages


class Family(RuleBasedStateMachine):
    """Sessions that fork from each other, beside their oracles and their pages."""

    @initialize(
        windows=st.lists(st.one_of(st.none(), st.integers(2, 18)), min_size=1, max_size=3),
        dim=st.sampled_from([40, 128, 512]),
        ring=st.sampled_from(Layout),
        full=st.sampled_from(Layout),
    )
    def make_store(self, windows, dim, ring, full):
        layout = {"sliding_attention": ring, "full_attention": full}
        self.store = tiny.store(
            *windows, head_dim=dim, max_context=MAX_CONTEXT, memory="mapped", layout=layout
        )
        plan = self.store.plan
        self.windows = dict(enumerate(windows))
        self.capacities = {
            layer: plan.capacities[self.store.geometry.group_of(layer).id] for layer in self.windows
        }
        head_major = {
            layer
            for layer, window in self.windows.items()
            if (full if window is None else ring) is Layout.HEAD_MAJOR
        }
        self.pages = Pages(self.windows, self.capacities, dim, head_major)
        self.live = []
        self.kept = []
        self.shared = {}
        self.token = 1

    # helpers

    def pair(self, which):
        return self.live[which % len(self.live)]

    def rows(self, oracle, positions):
        """The rows of positions, by layer; `positions` is a range, or what a layer holds."""
        return {
            layer: [
                oracle.row(layer, position)
                for position in (oracle.held[layer] if positions is None else positions)
            ]
            for layer in self.windows
        }

    def stored(self, oracle, count):
        """The rows that a step writes: of a chunk longer than a ring only its end."""
        stop = oracle.position + count
        return {
            layer: [
                oracle.row(layer, position)
                for position in range(max(oracle.position, stop - self.capacities[layer]), stop)
            ]
            for layer in self.windows
        }

    def adopt(self, session, oracle):
        self.live.append((session, oracle))

    # sessions

    @precondition(lambda self: len(self.live) < 2)
    @rule()
    def open(self):
        session = self.store.open([])
        self.pages.sessions[session] = {}
        rows = dict.fromkeys(self.windows, 0)
        self.adopt(session, Oracle(0, self.windows, self.capacities, rows))

    @precondition(lambda self: 0 < len(self.live) < MAX_SESSIONS)
    @rule(which=pick)
    def fork(self, which):
        session, oracle = self.pair(which)
        twin = session.fork()
        lent = self.pages.of_rows(session, self.rows(oracle, None))
        self.pages.sessions[twin] = lent
        self.adopt(twin, oracle.copy())

    # what makes room for others, and what ends a history, is not to happen all the time

    @precondition(lambda self: len(self.live) > 3)
    @rule(which=pick)
    def close(self, which):
        session, oracle = self.pair(which)
        self.live.remove((session, oracle))
        self.kept = [kept for kept in self.kept if kept[0] is not session]
        for key in [key for key in self.pages.holds if key[0] is session]:
            del self.pages.holds[key]
        del self.pages.sessions[session]
        session.close()

    @precondition(lambda self: len(self.live) > 4)
    @rule(which=pick)
    def reset(self, which):
        session, oracle = self.pair(which)
        session.reset()
        oracle.reset()
        self.kept = [kept for kept in self.kept if kept[0] is not session]
        for key in [key for key in self.pages.holds if key[0] is session]:
            del self.pages.holds[key]
        self.pages.sessions[session] = {}

    # steps

    @precondition(lambda self: self.live)
    @rule(which=pick)
    def token(self, which):
        self.step(which, 1, 1)

    @precondition(lambda self: self.live)
    @rule(which=pick, count=st.integers(1, 30), part=st.integers(0, 60))
    def chunk(self, which, count, part):
        self.step(which, count, part)

    def step(self, which, count, part):
        session, oracle = self.pair(which)
        if oracle.position + count > MAX_CONTEXT:
            return
        tokens = list(range(self.token, self.token + count))
        self.token += count
        # most often all of it
        accepted = min(part, count)
        self.pages.write(session, self.stored(oracle, count))
        tiny.put(session, tokens, accepted=accepted, speculative=True)
        full = oracle.copy()
        oracle.take(tokens, accepted)
        for layer in oracle.held if accepted == 0 else ():
            # nothing was lost where the ring had not filled
            if sorted(full.held[layer]) == list(session.live(layer)):
                oracle.held[layer] = full.held[layer]

    @precondition(lambda self: self.live)
    @rule(which=pick, back=st.integers(0, 20))
    def rewind(self, which, back):
        session, oracle = self.pair(which)
        position = max(0, oracle.position - back)
        try:
            session.rewind(position)
        except WindowLost:
            return
        oracle.rewind(position)

    @precondition(lambda self: self.live and len(self.kept) < 5)
    @rule(which=pick)
    def checkpoint(self, which):
        session, oracle = self.pair(which)
        kept = (session, session.checkpoint(), oracle.copy())
        self.kept.append(kept)
        rows = self.rows(oracle, None)
        hold = self.pages.of_rows(session, rows, full_only=True)
        self.pages.holds[session, id(kept[1])] = hold

    @precondition(lambda self: self.kept)
    @rule(which=pick)
    def return_to(self, which):
        session, checkpoint, then = self.kept[which % len(self.kept)]
        oracle = next(oracle for live, oracle in self.live if live is session)
        session.return_to(checkpoint)
        oracle.become(then)
        rings = {
            layer: rows
            for layer, rows in self.rows(oracle, None).items()
            if self.windows[layer] is not None
        }
        self.pages.sessions[session].update(self.pages.holds[session, id(checkpoint)])
        self.pages.write(session, rings)

    @precondition(lambda self: self.kept)
    @rule(which=pick)
    def forget(self, which):
        session, checkpoint, _ = self.kept.pop(which % len(self.kept))
        del self.pages.holds[session, id(checkpoint)]

    # what must hold after every event

    @invariant()
    def every_session_is_its_own_history(self):
        for session, oracle in getattr(self, "live", ()):
            check(session, oracle)

    @invariant()
    def what_is_held_is_what_the_model_says(self):
        if not hasattr(self, "live"):
            return
        files = {}
        for session, _ in self.live:
            files.setdefault(session.arena.held()[0], []).append(session)
        known = self.pages.known()
        for fd, sessions in files.items():
            holds = [key for key in self.pages.holds if key[0] in sessions]
            held = self.pages.held([*sessions, *holds])

            assert held == sessions[0].arena.held()[1]
            assert held == 512 * os.fstat(fd).st_blocks
            # a page that was taken for a row that nobody wrote has no data
            assert held >= PAGE * len(file_pages(fd))
        report = self.store.memory()

        assert report.pages_held == sum(
            session.arena.held()[1]
            for session in {session.arena.held()[0]: session for session, _ in self.live}.values()
        )
        for session, groups in zip(self.store.sessions, report.sessions, strict=True):
            mine = self.pages.sessions[session].values()

            assert PAGE * len(mine) == sum(part.pages_held for part in groups.values())
            assert PAGE * sum(known[name] > 1 for name in mine) == sum(
                part.shared for part in groups.values()
            )

    @invariant()
    def a_page_with_two_owners_is_never_written(self):
        if not hasattr(self, "live"):
            return
        known = self.pages.known()
        shared = {}
        for session, _ in self.live:
            for (layer, page), name in self.pages.sessions[session].items():
                if known[name] > 1:
                    tensor = session.planes[layer].span.tensor()
                    content = bytes(tensor[page * PAGE : (page + 1) * PAGE].numpy())

                    assert content == shared.setdefault(name, content)
        for name in shared.keys() & self.shared.keys():
            assert self.shared[name] == shared[name]
        self.shared = shared

    def teardown(self):
        if hasattr(self, "store"):
            self.kept.clear()
            self.store.close()


def test_pages_are_shared_until_one_side_writes_in_any_order_of_events():
    run_state_machine_as_test(
        Family,
        settings=settings(max_examples=60, stateful_step_count=50, report_multiple_bugs=False),
    )
