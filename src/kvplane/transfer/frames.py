"""Frames: a header of fixed size, a body, and a digest over both, keyed by the transfer.

    header   magic, version, kind, 0, number, bytes of the body          20 bytes, little-endian
    body     JSON in its canonical form, packed ids, or rows
    digest   BLAKE3-256, keyed: the body, then the header                32 bytes

The key comes of what both sides said first, a number drawn by each among it: bytes of another
transfer, or of the other direction, have another digest. Rows alone are keyed by the opening, so
that after a lost connection both sides name those that have come already. No byte of a body is
read before somebody was asked whether a frame of that kind, number and length may come now, and
where it is to go.
"""

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from blake3 import blake3

from kvplane.transfer.errors import TransferCorrupt, TransferTooLarge, TransferVersion

VERSION = 1
MAGIC = b"KVPL"
DIGEST_NBYTES = 32
KEY_NBYTES = 32

_HEADER = struct.Struct("<4sBBHIQ")
HEADER_NBYTES = _HEADER.size

Place = Sequence[memoryview]


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    OPENING = 2
    IDS = 3
    ACCEPT = 4
    SEGMENT = 5
    CLOSE = 6
    CONFIRM = 7
    REFUSE = 8
    ABORT = 9
    REQUEST = 10
    HAVE = 11


_KINDS = frozenset(map(int, Kind))


class Header(NamedTuple):
    """What comes before a body."""

    kind: Kind
    number: int
    nbytes: int

    def packed(self) -> bytes:
        """The 20 bytes."""
        return _HEADER.pack(MAGIC, VERSION, self.kind, 0, self.number, self.nbytes)


class Frame(NamedTuple):
    """A frame that has arrived; its digest was not looked at."""

    header: Header
    body: Place
    digest: bytes

    def data(self) -> bytes:
        """The body as one piece."""
        return b"".join(self.body)

    def check(self, key: bytes) -> None:
        """Refuse a body that is not its digest's: TransferCorrupt."""
        check(key, self.header, self.body, self.digest)


def digest_of(key: bytes, header: Header, body: Place | Sequence[bytes]) -> bytes:
    """The keyed digest over a body and its header."""
    state = blake3(key=key)
    for part in body:
        state.update(part)
    state.update(header.packed())
    return bytes(state.digest())


def check(key: bytes, header: Header, body: Place | Sequence[bytes], digest: bytes) -> None:
    """Refuse a body that is not its digest's: TransferCorrupt."""
    if digest_of(key, header, body) != digest:
        what = f"{header.kind.name} {header.number}: damaged, or of another transfer"
        raise TransferCorrupt(what=what)


def sealed(key: bytes, kind: Kind, body: bytes = b"", *, number: int = 0) -> bytes:
    """A whole frame."""
    header = Header(kind, number, len(body))
    return header.packed() + body + digest_of(key, header, [body])


def header_of(data: bytes) -> Header:
    """The header in 20 bytes.

    Raises:
        TransferVersion: another version, or nothing of this kind.
        TransferCorrupt: no such kind of frame, or a bit where none is.
    """
    magic, version, kind, zero, number, nbytes = _HEADER.unpack(data)
    if magic != MAGIC:
        raise TransferVersion(expected=f"kvplane transfer {VERSION}", got=f"{magic!r}")
    if version != VERSION:
        raise TransferVersion(expected=VERSION, got=version)
    if zero or kind not in _KINDS:
        raise TransferCorrupt(what=f"no frame has the kind {kind} and the flags {zero}")
    return Header(Kind(kind), number, nbytes)


class FrameReader:
    """Bytes in, frames out; it asks for memory only where `place` has said yes.

    Args:
        place: where the body of a frame with that header goes, `nbytes` in all; it raises for a
            frame that may not come now, or not in that length.
    """

    def __init__(self, place: Callable[[Header], Place]) -> None:
        self._place = place
        self._begin()

    def _begin(self) -> None:
        self._head = bytearray(HEADER_NBYTES)
        self._header: Header | None = None
        self._body: Place = ()
        self._digest = bytearray(DIGEST_NBYTES)
        self._wanted = [memoryview(self._head)]

    @property
    def is_between(self) -> bool:
        """Whether no byte of a next frame has come."""
        return self._header is None and len(self._wanted[0]) == HEADER_NBYTES

    def buffers(self) -> list[memoryview]:
        """Where the next bytes go, in order; none of them is empty."""
        return self._wanted

    def advance(self, nbytes: int) -> Frame | None:
        """Note that so many bytes were put into the buffers; the frame that they complete.

        Args:
            nbytes: at most what the buffers hold.

        Raises:
            TransferVersion, TransferCorrupt: no header.
            TransferError: whatever `place` refuses with.
        """
        wanted = self._wanted
        while nbytes:
            part = wanted[0]
            if nbytes < len(part):
                wanted[0] = part[nbytes:]
                return None
            nbytes -= len(part)
            wanted.pop(0)
        if wanted:
            return None
        if self._header is None:
            header = header_of(bytes(self._head))
            self._body = self._place(header)
            self._header = header
            self._wanted = [part for part in self._body if len(part)]
            self._wanted.append(memoryview(self._digest))
            return None
        frame = Frame(self._header, self._body, bytes(self._digest))
        self._begin()
        return frame


def fresh(header: Header, *, limit: int) -> Place:
    """Memory of its own for a body: TransferTooLarge when it is longer than allowed."""
    if header.nbytes > limit:
        raise TransferTooLarge(what=f"a {header.kind.name}", limit=limit, got=header.nbytes)
    return [memoryview(bytearray(header.nbytes))]
