"""Who holds a lock: what a lock's file says, and what a refusal repeats."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Self

from kvplane.errors import SessionLocked, StorageError
from kvplane.storage.base import check_name

LIMIT_HOLDER = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a lock, and since when (UTC)."""

    host: str
    pid: int
    since: str

    @classmethod
    def this_process(cls) -> Self:
        """The caller, from now."""
        since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(host=socket.gethostname(), pid=os.getpid(), since=since)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What a lock's file says; "unknown" where it does not say it.

        The holder may be about to write it, and the lock is what counts: this is for a message.
        """
        try:
            said = json.loads(data)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            said = {}
        host, pid, since = said.get("host"), said.get("pid"), said.get("since")
        return cls(
            host=host if isinstance(host, str) else "unknown",
            pid=pid if isinstance(pid, int) else 0,
            since=since if isinstance(since, str) else "unknown",
        )

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        text = json.dumps(
            asdict(self), ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
        )
        return text.encode()

    def refusal(self, name: str) -> SessionLocked:
        """What another who wants `name` is told."""
        return SessionLocked(name=name, host=self.host, pid=self.pid, since=self.since)


def check_lock_name(name: str) -> str:
    """The name itself, once it is safe below `locks/`.

    Raises:
        StorageError: it is no name, or has more than one part.
    """
    if "/" in check_name(name):
        raise StorageError(path=name, what="a lock's name has one part")
    return name
