import errno
import os
import random
from itertools import count
from pathlib import Path

import pytest

from kvplane.errors import KVPlaneError, SessionLocked, StorageError
from kvplane.storage import LocalStorage
from kvplane.testing.faults import (
    Fault,
    FaultySystem,
    Killed,
    Kind,
    attempt,
    count_calls,
    each_fault,
)

OLD = b"the old session"
NEW = random.Random(0).randbytes(5000)
SESSION = "sessions/chat.json"
BLOB = "blobs/ab/ab12"

put = "put", lambda storage: storage.put(BLOB, NEW), {SESSION: OLD, BLOB: NEW}
put_again = "put again", lambda storage: storage.put(SESSION, OLD), {SESSION: OLD}
replace = "replace", lambda storage: storage.replace(SESSION, NEW), {SESSION: NEW}
delete = "delete", lambda storage: storage.delete(SESSION), {}
touch = "touch", lambda storage: storage.touch(SESSION), {SESSION: OLD}
WRITERS = (put, put_again, replace, delete, touch)
READERS = {
    "read": (lambda storage: storage.read(SESSION, limit=99), OLD),
    "size": (lambda storage: storage.size(SESSION), len(OLD)),
    "exists": (lambda storage: storage.exists(SESSION), True),
    "list": (lambda storage: storage.list(), (SESSION,)),
    "is empty": (lambda storage: storage.is_empty(), False),
}
writers = pytest.mark.parametrize(
    ("action", "after"), [writer[1:] for writer in WRITERS], ids=[writer[0] for writer in WRITERS]
)


@pytest.fixture
def new_root(tmp_path):
    """A maker of roots that each hold one saved session."""
    numbers = count()

    def make():
        root = tmp_path / str(next(numbers))
        LocalStorage(root, create=True).put(SESSION, OLD)
        return root

    return make


def stored(root):
    """What a reader finds, and how many temporaries lie about."""
    storage = LocalStorage(root)
    names = storage.list()
    temporary = Path(root) / ".tmp"
    left = len(list(temporary.iterdir())) if temporary.exists() else 0
    return {name: storage.read(name, limit=10_000) for name in names}, left


@writers
def test_killed_anywhere_a_writer_leaves_the_old_or_the_new_and_can_be_repeated(
    new_root, action, after
):
    before = {SESSION: OLD}
    seen = []
    for fault in each_fault(
        lambda system: action(LocalStorage(new_root(), system=system)), kinds=[Kind.KILL]
    ):
        root = new_root()
        outcome = attempt(
            lambda system, root=root: action(LocalStorage(root, system=system)), fault
        )
        found, left = stored(root)
        seen.append(found)

        assert outcome.killed
        assert found in (before, after)
        assert left <= 1
        action(LocalStorage(root))
        assert after == stored(root)[0]
    # old up to some instant, new from there on
    assert sorted(seen, key=[before, after].index) == seen
    assert before == seen[0]
    assert after == seen[-1]


@writers
def test_an_error_anywhere_is_typed_loses_nothing_and_leaves_no_temporary(new_root, action, after):
    before = {SESSION: OLD}
    for fault in each_fault(
        lambda system: action(LocalStorage(new_root(), system=system)),
        kinds=[Kind.DISK_FULL, Kind.IO_ERROR, Kind.INTERRUPTED, Kind.DENIED],
    ):
        root = new_root()
        outcome = attempt(
            lambda system, root=root: action(LocalStorage(root, system=system)), fault
        )
        found, left = stored(root)

        if outcome.error is None:
            # only what is swept later, or only a name that was there, was in the way
            assert after == found
        else:
            assert isinstance(outcome.error, StorageError)
            assert str(root) in outcome.error.path
            assert found in (before, after)
        # where the unlink itself fails a temporary stays for the sweeper
        unlink_fails = "unlink" in fault.kind.calls and (
            fault.lasting or outcome.system.calls[fault.number - 1] == "unlink"
        )
        assert left <= int(unlink_fails)
        action(LocalStorage(root))
        assert after == stored(root)[0]


@writers
def test_short_writes_and_reads_are_continued(new_root, action, after):
    for fault in each_fault(
        lambda system: action(LocalStorage(new_root(), system=system)), kinds=[Kind.SHORT]
    ):
        root = new_root()
        outcome = attempt(
            lambda system, root=root: action(LocalStorage(root, system=system)), fault
        )

        assert outcome.error is None
        assert (after, 0) == stored(root)


@pytest.mark.parametrize(("action", "expected"), READERS.values(), ids=READERS)
def test_a_reader_gives_the_right_answer_or_a_typed_error(new_root, action, expected):
    root = new_root()

    def run(system):
        return action(LocalStorage(root, system=system))

    for fault in each_fault(run):
        outcome = attempt(run, fault)

        if fault.kind is Kind.KILL:
            assert outcome.killed
        elif outcome.error is None:
            assert expected == outcome.value
        else:
            assert isinstance(outcome.error, StorageError)
    assert ({SESSION: OLD}, 0) == stored(root)


def test_reading_into_memory_that_fails_is_a_typed_error(new_root):
    root = new_root()

    def run(system):
        buffer = bytearray(len(OLD) - 4)
        with LocalStorage(root, system=system).reading(SESSION) as file:
            file.read_into(buffer, first=4)
        return bytes(buffer)

    for fault in each_fault(run):
        outcome = attempt(run, fault)

        assert outcome.error is not None or outcome.value == OLD[4:]
        assert (fault.kind is Kind.SHORT) <= (outcome.error is None)


def test_a_lock_that_fails_or_dies_holds_nothing_and_keeps_the_next_holder_out_no_more(new_root):
    def run(root, system):
        with LocalStorage(root, system=system).lock("chat"):
            with pytest.raises(SessionLocked):
                LocalStorage(root).lock("chat")
            return "held"

    for fault in each_fault(lambda system: run(new_root(), system)):
        root = new_root()
        outcome = attempt(lambda system, root=root: run(root, system), fault)

        assert outcome.error is not None or outcome.value == "held"
        assert "held" == run(root, FaultySystem())


def test_a_root_that_is_being_made_is_made_or_not_and_can_be_made_again(tmp_path):
    numbers = count()

    def run(root, system):
        return LocalStorage(root, create=True, system=system).location

    def new_path():
        return tmp_path / str(next(numbers)) / "deep" / "root"

    for fault in each_fault(lambda system: run(new_path(), system)):
        root = new_path()
        outcome = attempt(lambda system, root=root: run(root, system), fault)

        assert outcome.error is not None or outcome.value == str(root)
        assert str(root) == run(root, FaultySystem())


def test_a_root_without_permission_says_so(new_root):
    root = new_root()
    for call in (
        lambda storage: storage.list(),
        lambda storage: storage.exists(SESSION),
        lambda storage: storage.read(SESSION, limit=99),
        lambda storage: storage.put(BLOB, NEW),
        lambda storage: storage.replace(SESSION, NEW),
        lambda storage: storage.lock("chat"),
    ):
        system = FaultySystem()
        storage = LocalStorage(root, system=system)
        system.fault = Fault(kind=Kind.DENIED, number=1, lasting=True)

        with pytest.raises(StorageError, match="EACCES"):
            call(storage)
    with pytest.raises(StorageError, match="EACCES"):
        LocalStorage(root, system=system)
    assert ({SESSION: OLD}, 0) == stored(root)


class Refusing(FaultySystem):
    """Fails certain calls always."""

    def __init__(self, **codes):
        super().__init__()
        self.codes = codes

    def reach(self, call):
        if call in self.codes:
            raise OSError(self.codes[call], os.strerror(self.codes[call]))
        return super().reach(call)


def test_on_a_full_disk_a_lock_is_still_had_and_what_frees_it_can_be_deleted(new_root):
    root = new_root()
    storage = LocalStorage(root, system=Refusing(write=errno.ENOSPC))
    with storage.lock("gc"):
        with pytest.raises(SessionLocked, match="process 0 on unknown"):
            LocalStorage(root).lock("gc")
        storage.delete(SESSION)

    assert SESSION not in LocalStorage(root).list()


def test_a_cleanup_that_fails_too_reports_the_first_cause(new_root):
    root = new_root()
    storage = LocalStorage(root, system=Refusing(write=errno.ENOSPC, unlink=errno.EIO))

    with pytest.raises(StorageError, match="ENOSPC"):
        storage.put(BLOB, NEW)


# the faults themselves


def test_calls_are_counted_and_each_place_is_visited_once_per_kind(tmp_path):
    def run(system):
        return LocalStorage(tmp_path, system=system).size("a")

    LocalStorage(tmp_path).put("a", b"x")
    calls = count_calls(run)
    kills = list(each_fault(run, kinds=[Kind.KILL]))
    errors = list(each_fault(run, kinds=[Kind.IO_ERROR]))

    # two opens of the root, one look, and what closes them
    assert 5 == calls
    assert [1, 3, 4] == [fault.number for fault in kills]
    assert [(n, lasting) for n in range(1, 6) for lasting in (False, True)] == [
        (fault.number, fault.lasting) for fault in errors
    ]


def test_nothing_is_executed_after_death_and_no_handler_of_errors_sees_it(tmp_path):
    system = FaultySystem(Fault(kind=Kind.KILL, number=2))
    folder = system.open_root(str(tmp_path))
    for name in "ab":
        with pytest.raises(Killed):
            system.make_folder(folder, name, 0o700)
    system.close(folder)

    assert not issubclass(Killed, Exception)
    assert set() == system.open_files
    assert [] == list(tmp_path.iterdir())


def test_death_in_a_write_leaves_half_of_it(tmp_path):
    def run(system):
        folder = system.open_root(str(tmp_path))
        file = system.open_new(folder, "a", 0o600)
        system.write(file, memoryview(b"123456"), 0)

    outcome = attempt(run, Fault(kind=Kind.KILL, number=3))

    assert outcome.killed
    assert b"123" == (tmp_path / "a").read_bytes()


def test_a_file_that_an_action_leaves_open_is_reported(tmp_path):
    with pytest.raises(AssertionError, match="1 files left open"):
        attempt(lambda system: system.open_root(str(tmp_path)))


def test_an_error_that_is_not_typed_is_not_an_outcome():
    def run(system):
        raise KeyError(system)

    with pytest.raises(KeyError):
        attempt(run)
    assert not issubclass(KeyError, KVPlaneError)
