"""Who is at work in a root, so that a sweeper takes nothing away that a load or save still needs.

    begin         LATE_S              LEASE_S / 2              end
      |------------|-----------------------|---------------------|
      no file      leases/<uuid>.json       renewed               deleted

A document that is deleted while somebody loads it leaves blobs that nothing names. Most work is
over before a lease would be written, so it is written late, when a blob is done: a sweeper that
deletes only what nothing named at two looks, `GRACE_S` apart and with no live lease at the second,
meets nobody. A process that is killed leaves a lease that expires.
"""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from kvplane.errors import PackCorrupt, PackTooLarge, StorageError, StorageMissing
from kvplane.pack.encoding import canonical
from kvplane.pack.limits import LEASE_NBYTES
from kvplane.pack.strict import loaded
from kvplane.storage import Storage

LEASE_S = 600
LATE_S = 1
# leaves work that begins its last blob before `LATE_S` the time to end it
GRACE_S = 5
# clocks of two hosts may differ by this much
SKEW_S = 3600
FOLDER = "leases"


class Lease:
    """A work's lease, by `with`; `keep` is called at least every few blobs, from any thread.

    Whoever may only read the root works without one.

    Args:
        storage: an opened root.
        clock: seconds since 1970.
    """

    def __init__(self, storage: Storage, *, clock: Callable[[], float] = time.time) -> None:
        self.file = f"{FOLDER}/{uuid.uuid4()}.json"
        self._storage = storage
        self._clock = clock
        self._due = clock() + LATE_S
        self._written = False
        self._guard = threading.Lock()

    def keep(self) -> None:
        """Write or renew the lease where it is due."""
        if self._clock() < self._due:
            return
        with self._guard:
            now = self._clock()
            if now < self._due:
                return
            said = {"expires": int(now) + LEASE_S, "host": socket.gethostname(), "pid": os.getpid()}
            with suppress(StorageError):
                self._storage.replace(self.file, canonical(said))
                self._written = True
            # not before it is there: other threads wait for it
            self._due = now + LEASE_S / 2

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._written:
            with suppress(StorageError):
                self._storage.delete(self.file)


def live_leases(storage: Storage, *, now: float) -> list[str]:
    """The leases whose work may go on: by what they say, with room for clocks that differ.

    One that cannot be read counts from when it was stored.
    """
    return [file for file in storage.list(FOLDER) if _expires(storage, file) + SKEW_S > now]


def _expires(storage: Storage, file: str) -> float:
    try:
        try:
            said, _ = loaded(storage.read(file, limit=LEASE_NBYTES), file)
            return float(said["expires"])
        except (PackCorrupt, PackTooLarge, TypeError, ValueError, KeyError):
            return storage.modified(file) + LEASE_S
    except StorageMissing:
        # given back since it was listed
        return float("-inf")
