"""A connection inside one process, with a bound on what is under way."""

import threading
import time
from collections import deque
from collections.abc import Sequence

from kvplane.transfer.clock import Clock
from kvplane.transfer.errors import LinkLost
from kvplane.transfer.links.base import Bytes, Link

CAPACITY = 1 << 20


class _Pipe:
    """Bytes in one direction."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.parts: deque[memoryview] = deque()
        self.held = 0
        self.ended = False
        self.changed = threading.Condition()

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class MemoryLink(Link):
    """One end; made by `memory_links`."""

    def __init__(self, name: str, out: _Pipe, into: _Pipe) -> None:
        self.name = name
        self._out = out
        self._into = into

    def write(self, parts: Sequence[Bytes], clock: Clock) -> None:
        """As in `Link`."""
        pipe = self._out
        for part in parts:
            left = memoryview(part).cast("B")
            while len(left):
                with pipe.changed:
                    if not pipe.changed.wait_for(
                        lambda: pipe.ended or pipe.held < pipe.capacity, clock.wait_s(self.name)
                    ):
                        raise clock.expired(self.name)
                    if pipe.ended:
                        raise LinkLost(link=self.name, what="the peer is gone")
                    count = min(len(left), pipe.capacity - pipe.held)
                    pipe.parts.append(memoryview(bytes(left[:count])))
                    pipe.held += count
                    pipe.changed.notify_all()
                left = left[count:]

    def read_into(self, buffers: Sequence[memoryview], clock: Clock) -> int:
        """As in `Link`."""
        pipe = self._into
        with pipe.changed:
            if not pipe.changed.wait_for(lambda: pipe.ended or pipe.held, clock.wait_s(self.name)):
                raise clock.expired(self.name)
            if not pipe.held:
                raise LinkLost(link=self.name, what="the peer is gone")
            return self._moved(buffers)

    def poll(self, buffers: Sequence[memoryview]) -> int:
        """As in `Link`."""
        with self._into.changed:
            if self._into.ended and not self._into.held:
                raise LinkLost(link=self.name, what="the peer is gone")
            return self._moved(buffers)

    def _moved(self, buffers: Sequence[memoryview]) -> int:
        pipe = self._into
        moved = 0
        for buffer in buffers:
            done = 0
            while done < len(buffer) and pipe.parts:
                part = pipe.parts[0]
                count = min(len(part), len(buffer) - done)
                buffer[done : done + count] = part[:count]
                done += count
                if count == len(part):
                    pipe.parts.popleft()
                else:
                    pipe.parts[0] = part[count:]
            moved += done
        pipe.held -= moved
        pipe.changed.notify_all()
        return moved

    def finish(self, *, linger_s: float = 1.0) -> None:
        """As in `Link`."""
        self._out.end()
        until = time.monotonic() + linger_s
        pipe = self._into
        with pipe.changed:
            while not pipe.ended and (left := until - time.monotonic()) > 0:
                pipe.parts.clear()
                pipe.held = 0
                pipe.changed.notify_all()
                pipe.changed.wait(left)

    def close(self) -> None:
        """As in `Link`."""
        self._out.end()
        self._into.end()


def memory_links(*, capacity: int = CAPACITY) -> tuple[MemoryLink, MemoryLink]:
    """Two ends of one connection.

    Args:
        capacity: bytes that may be under way in each direction.
    """
    there, back = _Pipe(capacity), _Pipe(capacity)
    return MemoryLink("memory, one end", there, back), MemoryLink("memory, other end", back, there)
