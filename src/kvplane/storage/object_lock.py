"""A lock in an object store: an object that its holder renews until it is given back.

    locks/<name>.json   {"host","id","pid","renewed","since"}; renewed -1: nobody holds it

Created if absent, renewed every ten seconds with its version, and taken over when it was not
renewed for a minute. How long ago that was is asked of the server's clock, not of this machine's.
The object stays: to delete one that another may have taken meanwhile would not be safe.
"""

import json
import threading
import time
import uuid
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvplane.errors import StorageError, StorageMissing
from kvplane.storage.holder import LIMIT_HOLDER, Holder
from kvplane.storage.object_client import Client

RENEW_S = 10.0
STALE_S = 60.0
_RELEASED = -1
_ATTEMPTS = 5


class _Seen(NamedTuple):
    said: Holder
    id: str | None
    renewed: int
    version: str | None
    modified: float


class ObjectLock:
    """A name that this holder has, until it releases it or stops renewing it."""

    def __init__(self, client: Client, name: str, *, holder: Holder, version: str | None) -> None:
        self.name = name
        self.lost = False
        self._client = client
        self._file = f"locks/{name}.json"
        self._holder = holder
        self._id = str(uuid.uuid4())
        self._version = version
        self._renewed = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def acquired(cls, client: Client, name: str) -> Self:
        """The lock, held: SessionLocked when somebody else has it."""
        lock = cls(client, name, holder=Holder.this_process(), version=None)
        seen: _Seen | None = None
        for number in range(_ATTEMPTS):
            if number:
                client.pause(number)
            version = client.create(lock._file, lock._said())
            if version is None:
                seen = _seen(client, lock._file)
                if seen is None:
                    continue
                version = lock._taken(seen)
            if version is not None:
                lock._hold(version)
                return lock
        # others are faster every time: then one of them has it
        holder = Holder.from_bytes(b"") if seen is None else seen.said
        raise holder.refusal(name)

    def release(self) -> None:
        """See Lock.release."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._end.set()
        thread.join()
        if self.lost:
            return
        self._renewed = _RELEASED
        # a lock that could not be given back is taken over in a minute
        with suppress(StorageError):
            self._updated(self._version)

    def _taken(self, seen: _Seen) -> str | None:
        """The version of a lock that nobody holds, taken; None when another was faster."""
        if self._is_mine(seen):
            # the answer to a request that was asked again was lost
            return seen.version
        if seen.renewed != _RELEASED and not _is_stale(self._client, seen):
            raise seen.said.refusal(self.name)
        return self._updated(seen.version)

    def _updated(self, version: str | None) -> str | None:
        """The new version, if it was still of `version`, or is ours already."""
        new = self._client.update(self._file, self._said(), version=version)
        if new is None:
            seen = _seen(self._client, self._file)
            if seen is not None and self._is_mine(seen):
                return seen.version
        return new

    def _hold(self, version: str) -> None:
        self._version = version
        self._thread = threading.Thread(
            target=self._renew, name=f"renew lock {self.name}", daemon=True
        )
        self._thread.start()

    def _renew(self) -> None:
        renewed_at = time.monotonic()
        while not self._end.wait(RENEW_S):
            self._renewed += 1
            try:
                version = self._updated(self._version)
            except StorageError:
                # a server may be away for a while; for how long others wait, the lock is ours
                version = None
                if time.monotonic() - renewed_at < STALE_S:
                    self._renewed -= 1
                    continue
            if version is None:
                self.lost = True
                return
            self._version, renewed_at = version, time.monotonic()

    def _is_mine(self, seen: _Seen) -> bool:
        return (seen.id, seen.renewed) == (self._id, self._renewed)

    def _said(self) -> bytes:
        said: dict[str, Any] = json.loads(self._holder.to_bytes())
        said |= {"id": self._id, "renewed": self._renewed}
        return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _seen(client: Client, file: str) -> _Seen | None:
    try:
        found = client.get(file, limit=LIMIT_HOLDER)
        modified = client.head(file).modified
    except StorageMissing:
        return None
    number, renewed = None, 0
    with suppress(ValueError, RecursionError):
        said = json.loads(found.data)
        if isinstance(said, dict):
            number = said.get("id")
            renewed = said["renewed"] if isinstance(said.get("renewed"), int) else 0
    return _Seen(Holder.from_bytes(found.data), number, renewed, found.version, modified)


def _is_stale(client: Client, seen: _Seen) -> bool:
    # an object stored now tells the server's time
    probe = f".tmp/{uuid.uuid4()}"
    client.create(probe, b"")
    try:
        now = client.head(probe).modified
    finally:
        with suppress(StorageError):
            client.delete(probe)
    return now - seen.modified > STALE_S
