"""A proxy between two ends of a connection that does to its bytes what networks do."""

import socket
import threading
import time
from dataclasses import dataclass

from kvplane.transfer import Listener, connect


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What becomes of one direction's bytes.

    Args:
        cut_after: bytes, after which both ends lose the connection.
        flip: place of a byte whose lowest bit is turned.
        stop_after: bytes, after which nothing more goes through, and nobody is told.
        pause_s: before each piece.
        piece: bytes that go on at a time.
    """

    cut_after: int | None = None
    flip: int | None = None
    stop_after: int | None = None
    pause_s: float = 0.0
    piece: int = 1 << 16


class Proxy:
    """Listens, and passes on to another address: one connection."""

    def __init__(self, target, *, there=None, back=None):
        self._faults = (there or Fault(), back or Fault())
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._ends = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        near, _ = self._server.accept()
        host, _, port = self._target.rpartition(":")
        far = socket.create_connection((host, int(port)))
        self._ends += [near, far]
        for fault, (source, target) in zip(self._faults, ((near, far), (far, near)), strict=True):
            self._threads.append(
                threading.Thread(target=self._pass_on, args=(source, target, fault))
            )
            self._threads[-1].start()

    def _pass_on(self, source, target, fault):
        done = 0
        try:
            while data := source.recv(fault.piece):
                if fault.flip is not None and done <= fault.flip < done + len(data):
                    data = bytearray(data)
                    data[fault.flip - done] ^= 1
                time.sleep(fault.pause_s)
                if fault.stop_after is not None:
                    data = data[: max(0, fault.stop_after - done)]
                if fault.cut_after is not None and done + len(data) >= fault.cut_after:
                    target.sendall(data[: fault.cut_after - done])
                    self._cut()
                    return
                target.sendall(data)
                done += len(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            self._cut()

    def _cut(self):
        for end in self._ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self):
        self._server.close()
        self._cut()
        for thread in list(self._threads):
            thread.join(10)
            assert not thread.is_alive()
        for end in self._ends:
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Linked:
    """Two ends over TCP with a proxy between them."""

    def __init__(self, **faults):
        self._listener = Listener("127.0.0.1:0")
        self._proxy = Proxy(self._listener.address, **faults)
        self.near = connect(self._proxy.address)
        self.far = self._listener.accept(timeout_s=10)

    def __enter__(self):
        return self.near, self.far

    def __exit__(self, *exc):
        self.near.close()
        self.far.close()
        self._proxy.close()
        self._listener.close()
