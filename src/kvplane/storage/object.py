"""An object store as a storage: S3, Google, Azure, and whatever else obstore reaches.

An upload is one request, so an object is there whole or not at all. A server may be slow, fail,
answer what is not so or lose what it confirmed: every request has a time limit and a deadline over
its repetitions, sizes are compared, and what was stored is asked for once more before it is said
to be stored. What comes back is compared with its digest by whoever reads it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from kvplane.errors import PackCorrupt, StorageError, StorageMissing
from kvplane.storage.base import Data, check_name, check_same_size, flat, flat_target, is_name
from kvplane.storage.holder import check_lock_name
from kvplane.storage.object_client import Client, Patience
from kvplane.storage.object_lock import ObjectLock

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TEMPORARY = ".tmp"
PARALLEL = 8
# an object up to this size comes in one request and stays while it is read; parts of longer ones
# come by several requests at once, and a version that is gone meanwhile is an error
WHOLE_NBYTES = 64 << 20
PART_NBYTES = 8 << 20
_ATTEMPTS = 3


class ObjectStorage:
    """Objects below one address. Requests of all threads together are at most `parallel`."""

    def __init__(
        self,
        url: str,
        *,
        create: bool = False,
        parallel: int = PARALLEL,
        patience: Patience | None = None,
        store: "ObjectStore | None" = None,
    ) -> None:
        """Nothing is written.

        Args:
            url: such as s3://bucket/prefix; credentials, region and endpoint are the environment's.
            create: the bucket has to be there either way; folders are no objects.
            parallel: requests at a time.
            patience: how long to wait for a server.
            store: an obstore store in place of the one that the address means.

        Raises:
            StorageError: no bucket, no access, or a kind of address that obstore does not reach.
            ExtraMissing: obstore is not installed.
        """
        del create
        self.location = url.rstrip("/")
        self.parallel = parallel
        self._client = Client(
            self.location, parallel=parallel, patience=patience or Patience(), store=store
        )
        # a bucket that is not there is no empty root
        self._client.check()

    def read(self, name: str, *, limit: int) -> bytes:
        """See Storage.read."""
        return self._client.get(check_name(name), limit=limit).data

    def size(self, name: str) -> int:
        """See Storage.size."""
        return self._client.head(check_name(name)).nbytes

    @contextmanager
    def reading(self, name: str) -> Iterator["ObjectReading"]:
        """See Storage.reading."""
        yield ObjectReading(self._client, check_name(name), parallel=self.parallel)

    def exists(self, name: str) -> bool:
        """See Storage.exists."""
        try:
            self.size(name)
        except StorageMissing:
            return False
        return True

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """See Storage.list."""
        folder = check_name(prefix) if prefix else ""
        return tuple(sorted(filter(is_name, self._client.names(folder))))

    def is_empty(self) -> bool:
        """See Storage.is_empty."""
        return all(part == TEMPORARY for part in self._client.top())

    def put(self, name: str, data: Data, *, durable: bool = True) -> bool:
        """See Storage.put."""
        view = flat(data)
        path = self._client.path(check_name(name))
        for _ in self._attempts():
            if self._client.create(name, view) is None:
                # another was faster, or an answer to our own first request was lost
                with suppress(StorageMissing):
                    check_same_size(path, there=self.size(name), nbytes=len(view))
                    return False
                continue
            if not durable:
                return True
            with suppress(StorageMissing):
                check_same_size(path, there=self.size(name), nbytes=len(view))
                return True
        raise self._lost(name)

    def replace(self, name: str, data: Data) -> None:
        """See Storage.replace."""
        view = flat(data)
        before = self._version(check_name(name))
        for _ in self._attempts():
            mine = self._client.overwrite(name, view)
            now = self._version(name)
            # of two who replace at once the later one stays; the older bytes must not
            if now is not None and (now == mine or now != before):
                return
        raise self._lost(name)

    def delete(self, name: str) -> None:
        """See Storage.delete."""
        self._client.delete(check_name(name))

    def lock(self, name: str) -> ObjectLock:
        """See Storage.lock."""
        return ObjectLock.acquired(self._client, check_lock_name(name))

    def touch(self, name: str) -> None:
        """See Storage.touch; the object is stored again, as no store can only be touched."""
        found = self._client.get(check_name(name), limit=None)
        # whoever replaced it meanwhile made it newer too
        self._client.update(name, found.data, version=found.version)

    def modified(self, name: str) -> float:
        """See Storage.modified; some stores tell whole seconds only."""
        return self._client.head(check_name(name)).modified

    def move(self, name: str, new: str) -> None:
        """See Storage.move."""
        nbytes = self.size(name)
        if check_name(new) == name:
            return
        self._client.copy(name, new)
        # what a server confirmed and lost is not the only copy
        check_same_size(self._client.path(new), there=self.size(new), nbytes=nbytes)
        self._client.delete(name)

    def clear_temporaries(self, *, before: float) -> int:
        """See Storage.clear_temporaries."""
        cleared = 0
        for name in list(self._client.names(TEMPORARY)):
            with suppress(StorageMissing):
                if self._client.head(name).modified < before:
                    self._client.delete(name)
                    cleared += 1
        return cleared

    def _version(self, name: str) -> str | None:
        with suppress(StorageMissing):
            return self._client.head(name).version
        return None

    def _attempts(self) -> Iterator[int]:
        for number in range(_ATTEMPTS):
            if number:
                self._client.pause(number)
            yield number

    def _lost(self, name: str) -> StorageError:
        return StorageError(
            path=self._client.path(name), what="the server lost what it said it had stored"
        )


class ObjectReading:
    """One version of an object: what came stays, so that a later one cannot mix in."""

    def __init__(self, client: Client, name: str, *, parallel: int) -> None:
        self._client = client
        self._name = name
        self._parallel = parallel
        self._coming = client.start(name)
        self._data = bytearray()
        self.nbytes = self._coming.nbytes

    def read_into(self, buffer: bytearray | memoryview, *, first: int = 0) -> None:
        """See Reading.read_into."""
        target = flat_target(buffer, first=first)
        stop = first + len(target)
        if len(target) and stop > self.nbytes:
            self._refuse(self.nbytes, stop)
        if self.nbytes > WHOLE_NBYTES:
            self._read_parts(target, first)
            return
        while len(self._data) < stop:
            part = next(self._coming.parts, None)
            if part is None:
                self._refuse(len(self._data), stop)
            self._data += part
        target[:] = memoryview(self._data)[first:stop]

    def _read_parts(self, target: memoryview, first: int) -> None:
        edges = range(0, len(target), PART_NBYTES)
        with ThreadPoolExecutor(self._parallel) as pool:
            for _ in pool.map(
                lambda at: self._read_part(target[at : at + PART_NBYTES], first + at), edges
            ):
                pass

    def _read_part(self, target: memoryview, first: int) -> None:
        stop = first + len(target)
        version = self._coming.version
        coming = self._client.start(self._name, part=(first, stop), version=version)
        at = 0
        for data in coming.parts:
            target[at : at + len(data)] = data
            at += len(data)
        if at < len(target):
            self._refuse(first + at, stop)

    def _refuse(self, got: int, stop: int) -> NoReturn:
        what = f"ends at byte {got}, expected {stop}"
        raise PackCorrupt(path=self._client.path(self._name), what=what)
