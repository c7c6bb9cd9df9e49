"""Bytes held by all sessions of a store together, against its limit."""

import threading
import weakref

from kvplane.errors import LimitReached


class Account:
    """The store's side: one total, one limit.

    Args:
        limit: bytes of all sessions together; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.held = 0
        # a session may be collected, and so give its bytes back, inside any of these calls
        self._lock = threading.RLock()

    def open(self, owner: object) -> "Tally":
        """A tally that gives everything back when `owner` is collected without being closed."""
        tally = Tally(self)
        weakref.finalize(owner, tally.close).atexit = False
        return tally

    def change(self, nbytes: int) -> None:
        """Add bytes, or give some back when negative.

        Raises:
            LimitReached: they would pass the limit. Nothing was counted.
        """
        with self._lock:
            if nbytes > 0 and self.limit is not None and self.held + nbytes > self.limit:
                raise LimitReached(asked=nbytes, held=self.held, limit=self.limit)
            self.held += nbytes


class Tally:
    """One session's side of the account."""

    __slots__ = ("_account", "held")

    def __init__(self, account: Account) -> None:
        self._account = account
        self.held = 0

    def change(self, nbytes: int) -> None:
        """Add bytes, or give some back: LimitReached."""
        if nbytes:
            self._account.change(nbytes)
            self.held += nbytes

    def close(self) -> None:
        """Give everything back. Idempotent."""
        held, self.held = self.held, 0
        self._account.change(-held)
