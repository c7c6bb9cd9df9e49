"""Connections by address: "host:port", or "unix:" and a path.

Without an identity, TCP goes to and from this machine only, unless somebody insists.
"""

import contextlib
import ipaddress
import os
import select
import socket
import ssl
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from kvplane.errors import ArgumentError
from kvplane.transfer.clock import Clock
from kvplane.transfer.errors import LinkLost, LinkTimeout
from kvplane.transfer.links.identity import Identity
from kvplane.transfer.links.sockets import SocketLink, TlsLink

UNIX = "unix:"
PORT_STOP = 1 << 16
HANDSHAKE_S = 10.0
# what a link keeps under way: one segment and some more
BUFFER_NBYTES = 4 << 20
_OWNER_ONLY = 0o600


class Address(NamedTuple):
    """Where: a path, or a host and a port."""

    path: str | None
    host: str
    port: int

    @classmethod
    def parsed(cls, text: str) -> Self:
        """The address in a text: ArgumentError."""
        if text.startswith(UNIX) and len(text) > len(UNIX):
            return cls(text.removeprefix(UNIX), "", 0)
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit():
            raise ArgumentError(
                argument="address", expected='"host:port", or "unix:" and a path', got=text
            )
        if int(port) >= PORT_STOP:
            raise ArgumentError(argument="port", expected=f"below {PORT_STOP}", got=port)
        return cls(None, host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def is_local(self) -> bool:
        """Whether it cannot be reached from another machine."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self, identity: Identity | None, *, insecure: bool) -> None:
        """Refuse plain TCP to other machines: ArgumentError."""
        if identity is None and not insecure and not self.is_local:
            raise ArgumentError(
                argument="identity",
                expected="certificates for TLS, or insecure=True: rows and ids can be read "
                "and changed on the way",
                got=None,
            )
        if identity is not None and self.path is not None:
            raise ArgumentError(
                argument="identity", expected="None: Unix sockets have no TLS", got=identity
            )


def connect(
    address: str,
    *,
    identity: Identity | None = None,
    insecure: bool = False,
    timeout_s: float = HANDSHAKE_S,
) -> SocketLink:
    """A link to whoever listens at an address.

    Args:
        address: "host:port", or "unix:" and a path.
        identity: for TLS; the listener's certificate must be of `host`.
        insecure: allow plain TCP to another machine.
        timeout_s: until it stands, TLS included.

    Raises:
        ArgumentError: no address, or plain TCP to another machine.
        LinkLost: nobody listens there, or one of the two does not trust the other.
        LinkTimeout: it took too long.
    """
    where = Address.parsed(address)
    where.check(identity, insecure=insecure)
    context = None if identity is None else identity.context(server=False)
    clock = Clock(timeout_s, timeout_s)
    with contextlib.ExitStack() as undo:
        try:
            plain = _connected(where, timeout_s)
            undo.callback(plain.close)
            _tune(plain)
            if context is None:
                undo.pop_all()
                return SocketLink(plain, f"plain {address}")
            plain.settimeout(clock.wait_s(address))
            secured = context.wrap_socket(plain, server_hostname=where.host)
        except TimeoutError:
            raise clock.expired(address) from None
        except OSError as error:
            raise LinkLost(link=address, what=str(error)) from error
        undo.pop_all()
        return TlsLink(secured, f"TLS {address}")


def _connected(where: Address, timeout_s: float) -> socket.socket:
    if where.path is None:
        return socket.create_connection((where.host, where.port), timeout=timeout_s)
    plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        plain.settimeout(timeout_s)
        plain.connect(where.path)
    except BaseException:
        plain.close()
        raise
    return plain


def _tune(plain: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        plain.setsockopt(socket.SOL_SOCKET, option, BUFFER_NBYTES)
    if plain.family != socket.AF_UNIX:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Listener:
    """An address at which handoffs are taken, one connection each.

    Args:
        address: "host:port" (port 0 takes a free one), or "unix:" and a path that is free.
        identity: for TLS; who connects must show a certificate of its authority.
        insecure: allow plain TCP from other machines.

    Raises:
        ArgumentError: no address, or plain TCP from other machines.
        LinkLost: it cannot be had.
    """

    def __init__(
        self, address: str, *, identity: Identity | None = None, insecure: bool = False
    ) -> None:
        where = Address.parsed(address)
        where.check(identity, insecure=insecure)
        self._context = None if identity is None else identity.context(server=True)
        self._path = where.path
        try:
            self._socket = _listening(where)
        except OSError as error:
            raise LinkLost(link=address, what=str(error)) from error
        if where.path is None:
            host, port = self._socket.getsockname()[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.address = address

    def accept(
        self, *, timeout_s: float | None = None, handshake_s: float = HANDSHAKE_S
    ) -> SocketLink:
        """The next connection; not one byte of it has been read when its handshake fails.

        Raises:
            LinkTimeout: nobody came, or a handshake took too long.
            LinkLost: whoever came is not trusted; the next one may be.
        """
        self._socket.settimeout(timeout_s)
        try:
            plain, peer = self._socket.accept()
        except TimeoutError:
            what = "nobody connected"
            raise LinkTimeout(link=self.address, what=what, timeout_s=timeout_s or 0) from None
        except OSError as error:
            raise LinkLost(link=self.address, what=str(error)) from error
        name = f"{self.address} from {peer}" if peer else self.address
        with contextlib.ExitStack() as undo:
            undo.callback(plain.close)
            try:
                _tune(plain)
                if self._context is None:
                    undo.pop_all()
                    return SocketLink(plain, f"plain {name}")
                plain.settimeout(handshake_s)
                secured = _shaken(self._context, plain, handshake_s)
            except TimeoutError:
                what = "no TLS handshake"
                raise LinkTimeout(link=name, what=what, timeout_s=handshake_s) from None
            except (OSError, ssl.SSLError) as error:
                raise LinkLost(link=name, what=str(error)) from error
            undo.pop_all()
            return TlsLink(secured, f"TLS {name}")

    def close(self) -> None:
        """Take no more. Idempotent."""
        self._socket.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                Path(self._path).unlink()
            self._path = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _shaken(context: ssl.SSLContext, plain: socket.socket, handshake_s: float) -> ssl.SSLSocket:
    """The handshake, within its time however slowly bytes come: TimeoutError."""
    secured = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
    until = time.monotonic() + handshake_s
    secured.settimeout(0.0)
    try:
        while True:
            try:
                secured.do_handshake()
            except ssl.SSLWantReadError:
                _wait(secured, until, write=False)
            except ssl.SSLWantWriteError:
                _wait(secured, until, write=True)
            else:
                return secured
    except BaseException:
        secured.close()
        raise


def _wait(secured: ssl.SSLSocket, until: float, *, write: bool) -> None:
    left = until - time.monotonic()
    ready = left > 0 and any(
        select.select([] if write else [secured], [secured] if write else [], [], left)
    )
    if not ready:
        raise TimeoutError


def _listening(where: Address) -> socket.socket:
    if where.path is None:
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        return socket.create_server((where.host, where.port), family=family)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # nobody else may connect, not even for a moment: Linux makes the file with these rights
        with contextlib.suppress(OSError):
            os.fchmod(made.fileno(), _OWNER_ONLY)
        made.bind(where.path)
        Path(where.path).chmod(_OWNER_ONLY)
        made.listen()
    except BaseException:
        made.close()
        raise
    return made
