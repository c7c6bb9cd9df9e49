"""A storage in this process's memory, for tests: nothing outlives the object."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

from kvplane.errors import PackCorrupt, PackTooLarge, StorageMissing
from kvplane.storage.base import Data, check_name, check_same_size, flat, flat_target
from kvplane.storage.holder import Holder, check_lock_name


class _Stored(NamedTuple):
    data: bytes
    modified: float


class MemoryStorage:
    """Bytes by name in a dictionary; `clock` is what `modified` goes by."""

    location = "memory"
    parallel = 1

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._stored: dict[str, _Stored] = {}
        self._holders: dict[str, Holder] = {}
        self._guard = threading.Lock()

    def read(self, name: str, *, limit: int) -> bytes:
        """See Storage.read."""
        data = self._get(name).data
        if len(data) > limit:
            raise PackTooLarge(what=f"the size of {name}", limit=limit, got=len(data))
        return data

    def size(self, name: str) -> int:
        """See Storage.size."""
        return len(self._get(name).data)

    @contextmanager
    def reading(self, name: str) -> Iterator["MemoryReading"]:
        """See Storage.reading."""
        yield MemoryReading(name, self._get(name).data)

    def exists(self, name: str) -> bool:
        """See Storage.exists."""
        return check_name(name) in self._stored

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """See Storage.list."""
        start = check_name(prefix) + "/" if prefix else ""
        with self._guard:
            return tuple(sorted(name for name in self._stored if name.startswith(start)))

    def is_empty(self) -> bool:
        """See Storage.is_empty."""
        return not self._stored

    def put(self, name: str, data: Data, *, durable: bool = True) -> bool:  # noqa: ARG002
        """See Storage.put; nothing here outlives the object either way."""
        check_name(name)
        view = flat(data)
        with self._guard:
            there = self._stored.get(name)
            if there is None:
                self._stored[name] = _Stored(bytes(view), self._clock())
                return True
        check_same_size(name, there=len(there.data), nbytes=len(view))
        return False

    def replace(self, name: str, data: Data) -> None:
        """See Storage.replace."""
        check_name(name)
        view = flat(data)
        with self._guard:
            self._stored[name] = _Stored(bytes(view), self._clock())

    def delete(self, name: str) -> None:
        """See Storage.delete."""
        check_name(name)
        with self._guard:
            self._stored.pop(name, None)

    def lock(self, name: str) -> "MemoryLock":
        """See Storage.lock; it also excludes only callers of this object."""
        check_lock_name(name)
        mine = Holder.this_process()
        with self._guard:
            if (holder := self._holders.get(name)) is not None:
                raise holder.refusal(name)
            self._holders[name] = mine
            self._stored[f"locks/{name}"] = _Stored(mine.to_bytes(), self._clock())
        return MemoryLock(self._holders, name)

    def touch(self, name: str) -> None:
        """See Storage.touch."""
        with self._guard:
            self._stored[name] = _Stored(self._get(name).data, self._clock())

    def modified(self, name: str) -> float:
        """See Storage.modified."""
        return self._get(name).modified

    def move(self, name: str, new: str) -> None:
        """See Storage.move."""
        check_name(new)
        with self._guard:
            self._stored[new] = self._get(name)
            if new != name:
                del self._stored[name]

    def clear_temporaries(self, *, before: float) -> int:  # noqa: ARG002
        """See Storage.clear_temporaries; nothing is ever half written here."""
        return 0

    def _get(self, name: str) -> _Stored:
        there = self._stored.get(check_name(name))
        if there is None:
            raise StorageMissing(path=name)
        return there


class MemoryReading:
    """The bytes that were stored under a name when it was opened."""

    def __init__(self, name: str, data: bytes | bytearray) -> None:
        self._name = name
        self._data = data
        self.nbytes = len(data)

    def read_into(self, buffer: bytearray | memoryview, *, first: int = 0) -> None:
        """See Reading.read_into."""
        target = flat_target(buffer, first=first)
        stop = first + len(target)
        if stop > self.nbytes:
            raise PackCorrupt(path=self._name, what=f"ends at byte {self.nbytes}, expected {stop}")
        target[:] = memoryview(self._data)[first:stop]


class MemoryLock:
    """A name held in a MemoryStorage."""

    def __init__(self, holders: dict[str, Holder], name: str) -> None:
        self._holders = holders
        self._name: str | None = name

    def release(self) -> None:
        """See Lock.release."""
        if self._name is not None:
            del self._holders[self._name]
            self._name = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
