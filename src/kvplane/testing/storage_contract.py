"""What every storage has to do, as tests: a new one passes by subclassing.

    class TestMyStorage(StorageContract):
        def empty(self): ...            a context manager: a storage with nothing in it
        def again(self, storage): ...   the same bytes as another process opens them
        def read_behind(self, storage, name): ...
        def write_behind(self, storage, name, data): ...

The last two reach the bytes without the code under test.
"""
# ruff: noqa: D102, PLR2004, S311, SIM300 - a test's name is its sentence, it expects on the left,
# and its data need not be secret

import json
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from kvplane.errors import (
    ArgumentError,
    KVPlaneError,
    PackCorrupt,
    PackTooLarge,
    SessionLocked,
    StorageError,
    StorageMissing,
)
from kvplane.storage.base import Storage
from kvplane.testing.hostile_names import HOSTILE_NAMES

BLOB = "blobs/ab/ab12.safetensors"
BY_NAME: dict[str, Callable[[Storage, str], object]] = {
    "read": lambda storage, name: storage.read(name, limit=100),
    "size": lambda storage, name: storage.size(name),
    "reading": lambda storage, name: storage.reading(name).__enter__(),
    "exists": lambda storage, name: storage.exists(name),
    "put": lambda storage, name: storage.put(name, b"x"),
    "replace": lambda storage, name: storage.replace(name, b"x"),
    "delete": lambda storage, name: storage.delete(name),
    "touch": lambda storage, name: storage.touch(name),
    "modified": lambda storage, name: storage.modified(name),
    "lock": lambda storage, name: storage.lock(name),
    "move": lambda storage, name: storage.move(name, "moved"),
    "move to": lambda storage, name: storage.move("sessions/a", name),
}
NEEDS_IT = ("read", "size", "reading", "touch", "modified")


class StorageContract:
    """Subclass as `Test...` and fill in the four methods."""

    tick_s = 0.05  # times that are so far apart are told apart
    lock_file = "locks/chat"
    lock_fields = ("host", "pid", "since")
    num_calls = 150  # in a sequence of any

    def empty(self) -> AbstractContextManager[Storage]:
        """A storage with nothing in it."""
        raise NotImplementedError

    def again(self, storage: Storage) -> Storage:
        """The same bytes, as another process would open them."""
        raise NotImplementedError

    def read_behind(self, storage: Storage, name: str) -> bytes:
        """The bytes of `name`, without the storage's help."""
        raise NotImplementedError

    def write_behind(self, storage: Storage, name: str, data: bytes) -> None:
        """Bytes under `name`, without the storage's help."""
        raise NotImplementedError

    @pytest.mark.parametrize("size", [0, 1, 255, 4096, 1_000_003])
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    @pytest.mark.parametrize("verb", ["put", "replace"])
    def test_what_was_stored_is_read_back(
        self, size: int, kind: Callable[[bytes], bytes], verb: str
    ) -> None:
        data = random.Random(size).randbytes(size)
        with self.empty() as storage:
            getattr(storage, verb)(BLOB, kind(data))

            assert data == storage.read(BLOB, limit=size)
            assert data == self.read_behind(storage, BLOB)
            assert data == self.again(storage).read(BLOB, limit=size)
            assert size == storage.size(BLOB)
            assert storage.exists(BLOB)

    def test_items_wider_than_a_byte_are_stored_as_their_bytes(self) -> None:
        data = memoryview(bytes(range(32))).cast("I", (4, 2))
        with self.empty() as storage:
            assert storage.put("a", data)
            assert not storage.put("a", data)
            storage.replace("b", data)

            assert bytes(range(32)) == self.read_behind(storage, "a")
            assert bytes(range(32)) == self.read_behind(storage, "b")

    def test_what_was_written_behind_its_back_is_read(self) -> None:
        with self.empty() as storage:
            self.write_behind(storage, BLOB, b"from elsewhere")

            assert b"from elsewhere" == storage.read(BLOB, limit=100)
            assert (BLOB,) == storage.list()

    @pytest.mark.parametrize("durable", [True, False])
    def test_put_says_whether_it_stored_and_keeps_what_is_there(self, *, durable: bool) -> None:
        with self.empty() as storage:
            assert storage.put(BLOB, b"first", durable=durable)
            assert not storage.put(BLOB, b"other", durable=durable)
            assert b"first" == self.read_behind(storage, BLOB)

    def test_put_over_bytes_of_another_size_is_refused_and_keeps_them(self) -> None:
        with self.empty() as storage:
            self.write_behind(storage, BLOB, b"cut sho")

            with pytest.raises(PackCorrupt, match="holds 7 bytes, 9 were to be put"):
                storage.put(BLOB, b"cut short")

            assert b"cut sho" == self.read_behind(storage, BLOB)
            assert (BLOB,) == storage.list()

    @pytest.mark.parametrize("new", [b"", b"shorter", b"a longer one than before"])
    def test_replace_leaves_the_new_bytes_only(self, new: bytes) -> None:
        with self.empty() as storage:
            storage.replace("sessions/a.json", b"the old bytes")
            storage.replace("sessions/a.json", new)

            assert new == self.read_behind(storage, "sessions/a.json")
            assert ("sessions/a.json",) == storage.list()

    @pytest.mark.parametrize("verb", NEEDS_IT)
    @pytest.mark.parametrize(
        "name", ["sessions/b.json", "sessions/a", "nodes/deep/er/a", "c", "sessions/a.json/b"]
    )
    def test_a_name_that_is_not_stored_is_an_error_that_says_so(self, verb: str, name: str) -> None:
        with self.empty() as storage:
            storage.put("sessions/a.json", b"there")

            with pytest.raises(StorageMissing, match=name) as refused:
                BY_NAME[verb](storage, name)

            assert isinstance(refused.value, FileNotFoundError)
            assert not storage.exists(name)
            assert ("sessions/a.json",) == storage.list()

    @pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
    def test_a_hostile_name_is_refused_by_every_call_and_changes_nothing(self, name: str) -> None:
        with self.empty() as storage:
            storage.put("sessions/a", b"there")
            for call in BY_NAME.values():
                with pytest.raises(StorageError, match="not a name"):
                    call(storage, name)
            if name:
                with pytest.raises(StorageError, match="not a name"):
                    storage.list(name)

            assert ("sessions/a",) == storage.list()

    def test_a_lock_name_has_one_part(self) -> None:
        with self.empty() as storage, pytest.raises(StorageError, match="one part"):
            storage.lock("sessions/a")

    def test_what_is_longer_than_the_limit_is_refused_and_the_limit_itself_is_not(self) -> None:
        with self.empty() as storage:
            storage.put(BLOB, b"12345")

            with pytest.raises(PackTooLarge, match="is 5, the limit is 4"):
                storage.read(BLOB, limit=4)

            assert b"12345" == storage.read(BLOB, limit=5)

    def test_a_part_is_read_into_the_callers_memory_and_nowhere_else(self) -> None:
        memory = bytearray(b"." * 8)
        with self.empty() as storage:
            storage.put(BLOB, bytes(range(10)))
            with storage.reading(BLOB) as file:
                file.read_into(memoryview(memory)[2:5], first=4)
                file.read_into(memoryview(memory)[8:], first=10)

            assert b"..\x04\x05\x06..." == bytes(memory)
            assert 10 == file.nbytes

    def test_a_reader_has_one_version_whatever_is_stored_meanwhile(self) -> None:
        memory = bytearray(6)
        with self.empty() as storage:
            storage.put("sessions/a", b"before")
            with storage.reading("sessions/a") as file:
                file.read_into(memoryview(memory)[:3])
                storage.replace("sessions/a", b"afterwards")
                file.read_into(memoryview(memory)[3:], first=3)

            assert b"before" == bytes(memory)

    def test_reading_past_the_end_says_where_it_ends(self) -> None:
        with self.empty() as storage:
            storage.put(BLOB, b"12345")

            with storage.reading(BLOB) as file:
                with pytest.raises(PackCorrupt, match="ends at byte 5, expected 6"):
                    file.read_into(bytearray(3), first=3)
                with pytest.raises(PackCorrupt, match="expected 9"):
                    file.read_into(bytearray(2), first=7)

    @pytest.mark.parametrize(
        ("buffer", "first", "argument"),
        [
            (memoryview(b"read only"), 0, "buffer"),
            (memoryview(bytearray(8))[::2], 0, "data"),
            (bytearray(1), -1, "first"),
        ],
        ids=["read-only", "strided", "negative"],
    )
    def test_memory_that_cannot_be_filled_is_refused(
        self, buffer: memoryview, first: int, argument: str
    ) -> None:
        with self.empty() as storage:
            storage.put(BLOB, b"123456789")

            with storage.reading(BLOB) as file, pytest.raises(ArgumentError, match=argument):
                file.read_into(buffer, first=first)

    def test_strided_bytes_are_not_stored(self) -> None:
        with self.empty() as storage:
            for verb in (storage.put, storage.replace):
                with pytest.raises(ArgumentError, match="contiguous"):
                    verb(BLOB, memoryview(bytes(8))[::2])

            assert storage.is_empty()

    def test_delete_takes_one_name_away_and_may_be_repeated(self) -> None:
        with self.empty() as storage:
            storage.put("sessions/a", b"a")
            storage.put("sessions/b", b"b")
            for _ in range(2):
                storage.delete("sessions/a")
            storage.delete("never/was")

            assert ("sessions/b",) == storage.list()
            assert storage.put("sessions/a", b"again")

    def test_what_is_moved_has_its_new_name_only(self) -> None:
        with self.empty() as storage:
            storage.put(BLOB, b"moved")
            storage.put("swept/a", b"replaced")
            storage.move(BLOB, "swept/a")

            assert ("swept/a",) == storage.list()
            assert 0 == storage.clear_temporaries(before=time.time() + 1)
            with pytest.raises(StorageMissing, match=BLOB):
                storage.move(BLOB, "swept/a")

    def test_names_are_listed_by_folder_in_code_point_order(self) -> None:
        names = ("a-b/c", "a.b", "a/b", "a/c.d", "a/c/d", "a0", "ab/c", "b")
        with self.empty() as storage:
            for name in reversed(names):
                storage.put(name, b"x")

            assert names == storage.list()
            assert ("a/b", "a/c.d", "a/c/d") == storage.list("a")
            assert ("a/c/d",) == storage.list("a/c")
            assert () == storage.list("missing")
            assert () == storage.list("a/missing/too")
            assert () == storage.list("b")
            assert names == self.again(storage).list()

    def test_empty_is_only_where_nobody_stored_anything(self) -> None:
        with self.empty() as storage:
            assert storage.is_empty()
            storage.put("root.json", b"{}")
            assert not storage.is_empty()
            assert not self.again(storage).is_empty()

    def test_one_holder_of_a_lock_at_a_time_whom_the_refusal_names(self) -> None:
        with self.empty() as storage:
            other = self.again(storage)
            with storage.lock("chat"):
                for storage_of_another in (storage, other):
                    with pytest.raises(SessionLocked, match=f"process {os.getpid()}") as refused:
                        storage_of_another.lock("chat")
                    assert ("chat", os.getpid()) == (refused.value.name, refused.value.pid)
                other.lock("gc").release()
            with other.lock("chat"), pytest.raises(SessionLocked):
                storage.lock("chat")

    def test_a_lock_is_given_back_by_an_error_and_may_be_released_twice(self) -> None:
        with self.empty() as storage:
            with pytest.raises(ZeroDivisionError), storage.lock("chat"):
                raise ZeroDivisionError
            lock = storage.lock("chat")
            lock.release()
            with storage.lock("chat"):
                lock.release()
                with pytest.raises(SessionLocked):
                    storage.lock("chat")

    def test_a_locks_file_says_who_and_stays(self) -> None:
        with self.empty() as storage:
            storage.lock("chat").release()
            said = self.read_behind(storage, self.lock_file)

            assert list(self.lock_fields) == list(json.loads(said))
            assert os.getpid() == json.loads(said)["pid"]
            assert b" " not in said

    def test_touching_makes_it_newer_and_changes_no_byte(self) -> None:
        with self.empty() as storage:
            storage.put("a", b"a")
            storage.put("b", b"b")
            stored = storage.modified("a")
            time.sleep(self.tick_s)
            storage.touch("a")

            assert stored < storage.modified("a")
            assert storage.modified("b") < storage.modified("a")
            assert abs(time.time() - storage.modified("a")) < 60
            assert b"a" == self.read_behind(storage, "a")

    def test_of_many_who_put_one_name_one_stores_it(self) -> None:
        with self.empty() as storage, ThreadPoolExecutor(8) as pool:
            stored = list(pool.map(lambda n: self.again(storage).put(BLOB, b"%03d" % n), range(32)))

            assert 1 == stored.count(True)
            assert b"%03d" % stored.index(True) == self.read_behind(storage, BLOB)
            assert (BLOB,) == storage.list()

    def test_while_it_is_replaced_a_reader_sees_one_version_whole(self) -> None:
        versions = [bytes([n]) * (50_000 + 1000 * n) for n in range(6)]
        with self.empty() as storage:
            storage.replace("sessions/a", versions[0])

            def write(mine: list[bytes]) -> None:
                for version in mine * 4:
                    self.again(storage).replace("sessions/a", version)

            writers = [threading.Thread(target=write, args=(versions[n::2],)) for n in range(2)]
            for writer in writers:
                writer.start()
            seen = set()
            while any(writer.is_alive() for writer in writers):
                seen.add(storage.read("sessions/a", limit=100_000))
            for writer in writers:
                writer.join()

            assert seen <= set(versions)
            assert ("sessions/a",) == storage.list()

    @pytest.mark.parametrize("seed", range(8))
    def test_any_sequence_of_calls_does_what_a_dictionary_does(self, seed: int) -> None:
        draw = random.Random(seed)
        names = ["a", "b/a", "b/b", "b/c/a", "c.json", "b-c"]
        model: dict[str, bytes] = {}
        with self.empty() as storage:
            for _ in range(self.num_calls):
                name, data = draw.choice(names), draw.randbytes(draw.randrange(4))
                verb = draw.choice(["put", "replace", "delete", "read", "list"])
                expected = _as_a_dictionary(model, verb, name, data)

                assert expected == _as_it_does(storage, verb, name, data)
                assert tuple(sorted(model)) == storage.list()
            contents = {name: self.read_behind(storage, name) for name in model}

        assert model == contents


def _as_a_dictionary(model: dict[str, bytes], verb: str, name: str, data: bytes) -> object:
    if verb == "put":
        if name in model and len(model[name]) != len(data):
            return PackCorrupt
        return name not in model and model.setdefault(name, data) is data
    if verb == "replace":
        model[name] = data
        return None
    if verb == "delete":
        model.pop(name, None)
        return None
    if verb == "list":
        folder = name.split("/", maxsplit=1)[0] + "/"
        return tuple(sorted(one for one in model if one.startswith(folder)))
    return model.get(name, StorageMissing)


def _as_it_does(storage: Storage, verb: str, name: str, data: bytes) -> object:
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: storage.put(name, data),
        "replace": lambda: storage.replace(name, data),
        "delete": lambda: storage.delete(name),
        "list": lambda: storage.list(name.split("/", maxsplit=1)[0]),
        "read": lambda: storage.read(name, limit=10),
    }
    try:
        return calls[verb]()
    except KVPlaneError as error:
        return type(error)
