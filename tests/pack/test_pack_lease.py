"""Leases: work that lasts says so in the root, so that nothing it needs is swept away."""

import json

import pytest
from made_by_hand import Made

from kvplane.errors import StorageError
from kvplane.pack import PrefixCache, load_session, open_root, save_session
from kvplane.pack.lease import GRACE_S, LATE_S, LEASE_S, SKEW_S, Lease, live_leases
from kvplane.storage import MemoryStorage


class Clock:
    """Seconds that pass when somebody says so, and so many at every look."""

    def __init__(self, step=0):
        self.now = 1_000_000.0
        self.step = step

    def __call__(self):
        self.now += self.step
        return self.now


def test_work_that_is_over_soon_leaves_no_file_and_writes_none():
    storage, clock = MemoryStorage(), Clock()
    with Lease(storage, clock=clock) as lease:
        clock.now += LATE_S - 0.1
        lease.keep()

        assert storage.is_empty()


def test_work_that_lasts_holds_a_lease_until_it_ends_however_it_ends():
    storage, clock = MemoryStorage(), Clock()
    with pytest.raises(RuntimeError), Lease(storage, clock=clock) as lease:  # noqa: PT012 - both ends
        clock.now += LATE_S
        lease.keep()

        assert [lease.file] == live_leases(storage, now=clock.now)
        assert {"expires", "host", "pid"} == json.loads(storage.read(lease.file, limit=999)).keys()
        raise RuntimeError
    assert [] == live_leases(storage, now=clock.now)
    assert storage.is_empty()


def test_a_sweeper_waits_longer_than_a_lease_is_late():
    assert GRACE_S >= 2 * LATE_S


def test_a_lease_is_renewed_before_it_expires_and_written_no_oftener():
    storage, clock = MemoryStorage(), Clock()
    expires = []
    with Lease(storage, clock=clock) as lease:
        for _ in range(LATE_S + 2 * LEASE_S):
            clock.now += 1
            lease.keep()
            if storage.exists(lease.file):
                said = json.loads(storage.read(lease.file, limit=999))["expires"]
                assert said > clock.now
                expires.append(said)

    # at once, and then every half of its time
    assert 5 == len(set(expires))


def test_the_lease_of_a_dead_process_expires_with_room_for_other_clocks():
    storage, clock = MemoryStorage(), Clock()
    lease = Lease(storage, clock=clock)
    clock.now += LATE_S
    lease.keep()
    end = clock.now + LEASE_S + SKEW_S

    assert [lease.file] == live_leases(storage, now=end - 1)
    assert [] == live_leases(storage, now=end)


@pytest.mark.parametrize("said", [b"", b"[]", b"{}", b'{"expires":null}', b"\xff", b" " * 2000])
def test_a_lease_that_cannot_be_read_counts_from_when_it_was_stored(said):
    storage = MemoryStorage(clock=lambda: 1000.0)
    storage.put("leases/a.json", said)
    end = 1000 + LEASE_S + SKEW_S

    assert ["leases/a.json"] == live_leases(storage, now=end - 1)
    assert [] == live_leases(storage, now=end)


def test_a_lease_given_back_while_others_are_counted_is_none():
    class Fleeting(MemoryStorage):
        def read(self, name, *, limit):
            self.delete(name)
            return super().read(name, limit=limit)

    storage = Fleeting()
    storage.put("leases/a.json", b"{}")

    assert [] == live_leases(storage, now=0)


def test_whoever_may_not_write_works_without_a_lease():
    class ReadOnly(MemoryStorage):
        def replace(self, name, data):
            raise StorageError(path=name, what=f"read-only: {len(data)} bytes")

    storage, clock = ReadOnly(), Clock()
    with Lease(storage, clock=clock) as lease:
        clock.now += LATE_S
        lease.keep()

    assert storage.is_empty()


@pytest.mark.parametrize("work", ["save", "load", "publish", "cut"])
def test_saves_and_loads_that_last_hold_a_lease_to_their_last_blob(work, monkeypatch):
    made = Made(8, None)
    ids = range(600)
    held = []

    class Watched(MemoryStorage):
        def put(self, name, data, *, durable=True):
            if name.startswith("blobs/"):
                held.append(len(self.list("leases")))
            return super().put(name, data, durable=durable)

        def reading(self, name):
            held.append(len(self.list("leases")))
            return super().reading(name)

    storage = open_root(Watched(), create=True)
    session = made.open(ids)
    cache = PrefixCache(storage, made.fingerprint)
    works = {
        "save": lambda: save_session(storage, "s", session, made.fingerprint),
        "publish": lambda: cache.publish(session),
        "load": lambda: load_session(storage, "s", made.store),
        "cut": lambda: cache.load([*ids, 0], made.store),
    }
    if work in {"load", "cut"}:
        works["save" if work == "load" else "publish"]()
        held.clear()
    clock = Clock(step=LATE_S)
    monkeypatch.setattr(Lease.__init__, "__kwdefaults__", {"clock": clock})
    works[work]()

    assert [1] * 4 == held
    assert () == storage.list("leases")
