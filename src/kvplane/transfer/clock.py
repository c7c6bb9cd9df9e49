"""How long a transfer may still take: the whole of it, and each wait without a byte."""

import time
from collections.abc import Callable

from kvplane.errors import ArgumentError
from kvplane.transfer.errors import LinkTimeout

WHOLE_S = 600.0
IDLE_S = 30.0
# what a peer is still told when a transfer has failed
FAREWELL_S = 1.0

# called with the segments that moved, and with all that will
Progress = Callable[[int, int], None]


class Clock:
    """Two limits that count from now.

    Args:
        timeout_s: of the whole.
        idle_timeout_s: of a wait in which nothing moves.

    Raises:
        ArgumentError: one is not above 0.
    """

    def __init__(self, timeout_s: float = WHOLE_S, idle_timeout_s: float = IDLE_S) -> None:
        for argument, given in (("timeout_s", timeout_s), ("idle_timeout_s", idle_timeout_s)):
            if type(given) not in {int, float} or not given > 0:
                raise ArgumentError(argument=argument, expected="above 0", got=given)
        self.timeout_s = timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.begun

    def wait_s(self, link: str) -> float:
        """How long the next wait may be: LinkTimeout when the whole has taken too long."""
        left = self.timeout_s - self.seconds
        if left <= 0:
            raise LinkTimeout(link=link, what="the handoff was not over", timeout_s=self.timeout_s)
        return min(left, self.idle_timeout_s)

    def expired(self, link: str) -> LinkTimeout:
        """The error after such a wait."""
        if self.seconds >= self.timeout_s:
            what, limit = "the handoff was not over", self.timeout_s
        else:
            what, limit = "nothing moved", self.idle_timeout_s
        return LinkTimeout(link=link, what=what, timeout_s=limit)
