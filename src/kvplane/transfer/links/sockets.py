"""Connections over sockets: TCP, TLS over it, and Unix sockets."""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Sequence

from kvplane.transfer.clock import Clock
from kvplane.transfer.errors import LinkLost
from kvplane.transfer.links.base import Bytes, Link

# the system takes no more buffers in one call
VECTOR = 512
_DROPPED = 1 << 16
# how often the clock is looked at in the time that a wait may take
_LOOKS = 8


class SocketLink(Link):
    """A connected stream socket.

    Args:
        connection: closed with the link.
        name: for messages.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._socket = connection
        self._wait_s: float | None = None

    def write(self, parts: Sequence[Bytes], clock: Clock) -> None:
        """As in `Link`."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        place = 0
        while place < len(views):
            try:
                self._set_wait(clock)
                sent = self._send(views[place : place + VECTOR])
            except TimeoutError:
                raise clock.expired(self.name) from None
            except OSError as error:
                raise self._lost(error) from error
            while place < len(views) and sent >= len(views[place]):
                sent -= len(views[place])
                place += 1
            if sent:
                views[place] = views[place][sent:]

    def read_into(self, buffers: Sequence[memoryview], clock: Clock) -> int:
        """As in `Link`."""
        try:
            self._set_wait(clock)
            count = self._receive(buffers)
        except TimeoutError:
            raise clock.expired(self.name) from None
        except OSError as error:
            raise self._lost(error) from error
        if not count:
            raise LinkLost(link=self.name, what="the peer closed the connection")
        return count

    def poll(self, buffers: Sequence[memoryview]) -> int:
        """As in `Link`."""
        try:
            if not self._is_ready():
                return 0
            self._wait_s = 0.0
            self._socket.settimeout(0.0)
            count = self._receive(buffers)
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        except (OSError, ValueError) as error:
            # a closed socket has no number to look at
            raise LinkLost(link=self.name, what=str(error)) from error
        if not count:
            raise LinkLost(link=self.name, what="the peer closed the connection")
        return count

    def finish(self, *, linger_s: float = 1.0) -> None:
        """As in `Link`."""
        until = time.monotonic() + linger_s
        with contextlib.suppress(OSError, ValueError):
            self._socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(_DROPPED):
                    return

    def close(self) -> None:
        """As in `Link`."""
        self._socket.close()

    def _send(self, views: Sequence[memoryview]) -> int:
        return self._socket.sendmsg(views)

    def _receive(self, buffers: Sequence[memoryview]) -> int:
        return self._socket.recvmsg_into(buffers[:VECTOR])[0]

    def _is_ready(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def _set_wait(self, clock: Clock) -> float:
        """How long the next wait may be, which the socket knows now."""
        wait_s = clock.wait_s(self.name)
        if wait_s != self._wait_s:
            self._wait_s = wait_s
            self._socket.settimeout(wait_s)
        return wait_s

    def _lost(self, error: OSError) -> LinkLost:
        return LinkLost(link=self.name, what=str(error) or type(error).__name__)


class TlsLink(SocketLink):
    """A TLS connection whose handshake is done."""

    _socket: ssl.SSLSocket

    def read_into(self, buffers: Sequence[memoryview], clock: Clock) -> int:
        """As in `Link`; fills the first buffer, since a record is small and each call costs."""
        wanted, done, look_s = buffers[0], 0, 0.0
        try:
            while done < len(wanted):
                now_s = time.monotonic()
                if now_s >= look_s:
                    look_s = now_s + self._set_wait(clock) / _LOOKS
                count = self._socket.recv_into(wanted[done:])
                if not count:
                    break
                done += count
        except TimeoutError:
            raise clock.expired(self.name) from None
        except OSError as error:
            raise self._lost(error) from error
        if done < len(wanted):
            raise LinkLost(link=self.name, what="the peer closed the connection")
        return done

    def _send(self, views: Sequence[memoryview]) -> int:
        return self._socket.send(views[0])

    def _receive(self, buffers: Sequence[memoryview]) -> int:
        # an orderly end that was not announced is an end all the same: nothing was confirmed
        return self._socket.recv_into(buffers[0])

    def _is_ready(self) -> bool:
        return self._socket.pending() > 0 or super()._is_ready()
