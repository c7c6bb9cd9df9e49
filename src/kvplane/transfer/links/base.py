"""Bytes between two machines, in order: what a transfer asks of a connection."""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from kvplane.transfer.clock import Clock

Bytes = bytes | bytearray | memoryview


class Link(Protocol):
    """One end of a connection; used by one thread at a time.

    Attributes:
        name: what it is and to whom, for messages.
    """

    name: str

    def write(self, parts: Sequence[Bytes], clock: Clock) -> None:
        """Send all bytes of all parts; they are free for other use afterwards.

        Raises:
            LinkTimeout: the peer took nothing for too long.
            LinkLost: the connection has ended.
        """
        ...

    def read_into(self, buffers: Sequence[memoryview], clock: Clock) -> int:
        """Put at least one byte into the buffers, in their order; how many.

        Raises:
            LinkTimeout: nothing came for too long.
            LinkLost: the connection has ended.
        """
        ...

    def poll(self, buffers: Sequence[memoryview]) -> int:
        """Put into the buffers what is there already, without waiting; how many: LinkLost."""
        ...

    def finish(self, *, linger_s: float = 1.0) -> None:
        """Send no more, and let the peer read what was sent: its own bytes are dropped meanwhile.

        Args:
            linger_s: the longest that this waits for the peer to go.
        """
        ...

    def close(self) -> None:
        """End the connection. Idempotent."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
