"""Keeping house: what a sweep deletes, what it never does, and what a budget drops first."""

import fcntl
import os
from pathlib import Path

import pytest
from sweeping import load, same

from kvplane.errors import ArgumentError, SessionLocked
from kvplane.pack import (
    PrefixCache,
    load_session,
    read_session,
    remove_session,
    save_session,
)
from kvplane.pack.inventory import Kind, blob_of, kind_of
from kvplane.pack.lease import Lease, live_leases
from kvplane.pack.sweep import BLOB_AGE_S, GRACE_S, sweep
from kvplane.pack.usage import usage
from kvplane.storage import MemoryStorage
from saved_roots import FINGERPRINT, cut_at, make_root, new_store


class Clock:
    """Time that passes when told to."""

    def __init__(self):
        self.now = 1_700_000_000.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def root(clock):
    """Sessions "a" and "b" of one text, and cuts of "a" at 256 and 300."""
    storage = MemoryStorage(clock=clock)
    make_root(storage, lengths=(600, 300), cuts=(256, 300, 600))
    return storage


def swept(storage, clock, **options):
    return sweep(storage, clock=clock, wait=clock.wait, **options)


def files(storage, kind):
    return {file for file in storage.list() if kind_of(file) is kind}


def test_nothing_that_is_named_is_ever_deleted(root, clock):
    before = set(root.list())
    clock.now += 10 * BLOB_AGE_S
    found = swept(root, clock)

    assert ((), (), ()) == (found.cuts, found.blobs, found.nodes)
    assert before <= set(root.list())


def test_blobs_of_what_was_removed_go_once_they_are_old(root, clock):
    kept = load(root, "b")
    for file in files(root, Kind.CUT):
        root.delete(file)
    remove_session(root, "a")
    unnamed = usage(root).unnamed
    early = swept(root, clock)
    clock.now += BLOB_AGE_S + 1
    found = swept(root, clock)

    assert ((), unnamed.num_files) == (early.blobs, early.young)
    assert unnamed == (len(found.blobs), found.nbytes)
    assert 0 == usage(root).unnamed.num_files
    assert same(kept, load(root, "b"))


def test_a_dry_run_says_the_same_and_deletes_nothing(root, clock):
    remove_session(root, "a")
    clock.now += BLOB_AGE_S + 1
    before = set(root.list())
    would = sweep(root, clock=clock, dry_run=True, budget_nbytes=0)

    assert before == set(root.list())
    done = swept(root, clock, budget_nbytes=0)
    assert (would.cuts, would.blobs, would.nodes, would.nbytes) == (
        done.cuts,
        done.blobs,
        done.nodes,
        done.nbytes,
    )


def test_a_budget_drops_the_cuts_used_longest_ago_first(root, clock):
    order = [cut_at(root, position).file for position in (300, 600, 256)]
    for file in order:
        clock.now += 10
        root.touch(file)
    clock.now += BLOB_AGE_S + 1
    whole = usage(root).nbytes
    seen = []
    for budget in range(whole, 0, -500):
        seen += swept(root, clock, budget_nbytes=budget).cuts

    assert order == seen


def test_a_load_counts_as_use(root, clock):
    clock.now += 10
    PrefixCache(root, FINGERPRINT).load(list(range(257)), new_store())[1].session.close()
    clock.now += BLOB_AGE_S
    dropped = sweep(root, clock=clock, dry_run=True, budget_nbytes=0).cuts

    assert cut_at(root, 256).file == dropped[-1]


def test_a_budget_never_drops_what_a_session_names(root, clock):
    kept = [load(root, name) for name in "ab"]
    clock.now += BLOB_AGE_S + 1
    found = swept(root, clock, budget_nbytes=0)

    assert 3 == len(found.cuts)
    assert found.left_nbytes == usage(root).nbytes
    assert all(same(one, load(root, name)) for one, name in zip(kept, "ab", strict=True))


def test_a_budget_that_is_kept_drops_nothing(root, clock):
    clock.now += BLOB_AGE_S + 1

    assert () == swept(root, clock, budget_nbytes=usage(root).nbytes + 1000).cuts


def test_a_budget_counts_what_shared_blobs_free(root, clock):
    clock.now += BLOB_AGE_S + 1
    budget = usage(root).nbytes - 1
    found = swept(root, clock, budget_nbytes=budget)

    assert 1 == len(found.cuts)
    assert found.left_nbytes <= budget


def test_nodes_without_a_cut_below_go_with_the_last_of_them(root, clock):
    clock.now += BLOB_AGE_S + 1
    nodes = files(root, Kind.NODE)
    # the root's own size keeps the last one
    first = swept(root, clock, budget_nbytes=usage(root).nbytes - 1)
    rest = swept(root, clock, budget_nbytes=0)

    assert 2 == len(nodes)
    assert set(rest.nodes) | set(first.nodes) == nodes
    assert set() == files(root, Kind.NODE)


def test_while_somebody_is_at_work_no_blob_is_deleted(root, clock):
    remove_session(root, "a")
    clock.now += BLOB_AGE_S + 1
    with Lease(root, clock=clock) as lease:
        clock.now += GRACE_S
        lease.keep()
        found = swept(root, clock, budget_nbytes=0)
    after = swept(root, clock)

    assert ((), (lease.file,)) == (found.blobs, found.busy)
    assert after.blobs
    assert () == after.busy


def test_a_lease_that_is_taken_while_a_sweep_waits_stops_it(root, clock):
    for file in files(root, Kind.CUT):
        root.delete(file)
    remove_session(root, "a")
    clock.now += BLOB_AGE_S + 1
    lease = Lease(root, clock=clock)

    def meanwhile(seconds):
        clock.wait(seconds)
        lease.keep()

    found = sweep(root, clock=clock, wait=meanwhile)

    assert ((), (lease.file,)) == (found.blobs, found.busy)


def test_what_is_named_while_a_sweep_waits_stays(root, clock):
    for file in files(root, Kind.CUT):
        root.delete(file)
    session = load_session(root, "a", new_store(), FINGERPRINT)[1].session
    remove_session(root, "a")
    clock.now += BLOB_AGE_S + 1

    def meanwhile(seconds):
        clock.wait(seconds)
        save_session(root, "again", session, FINGERPRINT)

    found = sweep(root, clock=clock, wait=meanwhile)

    assert 0 == len(set(found.blobs) & files(root, Kind.BLOB))
    assert 600 == load(root, "again")[0]


def test_leases_of_the_dead_are_deleted(root, clock):
    lease = Lease(root, clock=clock)
    clock.now += GRACE_S
    lease.keep()
    clock.now += 2 * BLOB_AGE_S

    assert (lease.file,) == swept(root, clock).leases
    assert [] == live_leases(root, now=clock())


@pytest.mark.parametrize("content", [b'{"format":2}', b"damaged"], ids=["another format", "damage"])
def test_while_a_session_cannot_be_read_no_blob_is_deleted(root, clock, content):
    remove_session(root, "a")
    root.replace("sessions/c.json", content)
    clock.now += BLOB_AGE_S + 1
    found = swept(root, clock, budget_nbytes=0)

    assert ((), ("sessions/c.json",)) == (found.blobs, found.unreadable)


def test_a_damaged_cut_is_deleted_and_one_of_another_format_stays(root, clock):
    damaged, newer = cut_at(root, 300).file, cut_at(root, 256).file
    root.replace(damaged, b"damaged")
    root.replace(newer, b'{"format":2}')
    found = swept(root, clock)

    assert ((damaged,), (newer,)) == (found.cuts, found.unreadable)


def test_one_sweeper_at_a_time(root, clock):
    with root.lock("gc"), pytest.raises(SessionLocked):
        swept(root, clock)


@pytest.mark.parametrize("options", [{"budget_nbytes": -1}, {"age_s": -1}], ids=str)
def test_impossible_limits_are_refused(root, clock, options):
    with pytest.raises(ArgumentError):
        swept(root, clock, **options)


def test_what_dead_writers_left_goes_after_a_day(tmp_path):
    storage = make_root(str(tmp_path / "root"))
    folder = Path(storage.location) / ".tmp"
    old, held, new = (folder / name for name in ("old", "held", "new"))
    for file in (old, held, new):
        file.write_bytes(b"half")
    for file in (old, held):
        os.utime(file, (1, 1))
    with held.open("rb") as writer:
        # as its writer does for as long as it lives
        fcntl.flock(writer, fcntl.LOCK_EX)

        assert 1 == sweep(storage).temporaries
    assert [False, True, True] == [file.exists() for file in (old, held, new)]


def test_what_a_sweeper_that_died_had_moved_aside_is_put_back(root, clock):
    kept = load(root, "b")
    for file in files(root, Kind.BLOB):
        root.move(file, f"swept/{file.rsplit('/', 1)[1]}")
    swept(root, clock)

    assert same(kept, load(root, "b"))
    assert () == root.list("swept")


def test_what_is_named_just_before_it_would_be_deleted_is_put_back(root, clock):
    for file in files(root, Kind.CUT):
        root.delete(file)
    kept = load(root, "a")
    document = root.read("sessions/a.json", limit=1 << 20)
    remove_session(root, "a")
    clock.now += BLOB_AGE_S + 1

    class Publishing(MemoryStorage):
        """A writer that found every blob there publishes as the first one is moved."""

        def move(self, name, new):
            if not self.exists("sessions/a.json"):
                self.put("sessions/a.json", document)
            super().move(name, new)

    storage = Publishing(clock=clock)
    storage._stored = root._stored
    found = swept(storage, clock)

    assert same(kept, load(storage, "a"))
    assert not {blob_of(file) for file in found.blobs} & read_session(storage, "a").state.blobs
