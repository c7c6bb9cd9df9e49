"""One thread at a time, and the second is told instead of made to wait."""

import threading

from kvplane.errors import SessionBusy


class Guard:
    """Lets one caller in at a time and refuses the second instead of making it wait."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise SessionBusy

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
