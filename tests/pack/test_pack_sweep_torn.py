"""Sweeps with calls that fail, and with others at work."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from sweeping import load, same

from kvplane.errors import PackMissing, SessionLocked, StorageError
from kvplane.pack import open_root, remove_session, save_session
from kvplane.pack.inventory import documents
from kvplane.pack.sweep import sweep
from kvplane.pack.usage import usage
from kvplane.storage import LocalStorage
from kvplane.testing.faults import FaultySystem, attempt, each_fault
from kvplane.testing.faults import Kind as Fault
from saved_roots import FINGERPRINT, grow, make_root, new_store

# of the calls that may fail `make torture` takes each
STEP = 1 if os.environ.get("KVPLANE_TORTURE") else 61


@pytest.mark.parametrize("kind", list(Fault), ids=lambda kind: kind.value)
def test_with_any_call_of_a_sweep_failing_what_is_named_is_there(tmp_path, kind):
    numbers = iter(range(10_000))

    def fresh():
        storage = make_root(str(tmp_path / str(next(numbers))), lengths=(20, 10), cuts=(10,))
        remove_session(storage, "a")
        return storage.location

    def clean(location, system):
        return sweep(
            LocalStorage(location, system=system),
            age_s=0,
            budget_nbytes=0,
            wait=lambda _: None,
            clock=lambda: time.time() + 5,
        )

    expected = load(open_root(fresh()), "b")
    for fault in each_fault(lambda system: clean(fresh(), system), kinds=[kind]):
        if fault.number % STEP:
            continue
        location = fresh()
        outcome = attempt(lambda system, at=location: clean(at, system), fault)

        assert outcome.error is None or outcome.killed or isinstance(outcome.error, StorageError)
        assert same(expected, load(open_root(location), "b"))
        # the next one finishes
        clean(location, FaultySystem())
        assert 0 == usage(open_root(location)).unnamed.num_files


def length_of(storage, name):
    """A session's position; a blob that is aside for an instant is put back, or was put again."""
    for _ in range(20):
        with suppress(PackMissing):
            return load(storage, name)[0]
        time.sleep(0.01)
    return None


def save_and_load(root, name, draw, end):
    """Sessions of any length, one after another, each of which has to be there afterwards."""
    storage = open_root(root)
    while time.monotonic() < end:
        session = new_store().open(tokens=[])
        length = draw.randrange(1, 40)
        grow(session, list(range(length)), seed=draw.randrange(3))
        save_session(storage, name, session, FINGERPRINT)
        session.close()

        assert length == length_of(storage, name)


def sweep_at_once(root, end):
    """As if every blob were old and nobody would wait: the hardest case."""
    while time.monotonic() < end:
        with suppress(SessionLocked):
            sweep(open_root(root), age_s=0, clock=lambda: time.time() + 1, wait=lambda _: None)


@pytest.mark.parametrize("seed", range(3))
def test_writers_readers_and_sweepers_at_once_lose_nothing(tmp_path, seed):
    root = str(tmp_path / "root")
    make_root(root, lengths=(20,), cuts=())
    end = time.monotonic() + 1.5
    with ThreadPoolExecutor(3) as pool:
        work = [
            pool.submit(save_and_load, root, f"s{n}", random.Random(10 * seed + n), end)
            for n in range(2)
        ]
        work.append(pool.submit(sweep_at_once, root, end))
        for one in work:
            one.result()

    assert all(one.error is None for one in documents(open_root(root)))
