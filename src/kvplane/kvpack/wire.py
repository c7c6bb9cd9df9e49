"""Integers and names as kvpack v1 writes them: little-endian, counted, without anything optional.

A `Reader` goes through bytes once, from the first to the last. Whatever it cannot take as it
stands is a KvpackRejected with the format's own category; no count is believed before the bytes
that it promises are known to be there.
"""

import hmac
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import NamedTuple, TypeVar

from kvplane.errors import KvpackRejected
from kvplane.kvpack import limits

VERSION = 1
T = TypeVar("T")
Enumerated = TypeVar("Enumerated", bound=IntEnum)

# designs that came before the published one: never read, whatever follows
LEGACY_MAGICS = (b"IOKVPK1", b"IOKVREC", b"IOKVCM1", b"IOKVFTR", b"IOKVLZ1", b"IOKVQ81", b"IOKVENC")


def reject(category: str, what: str) -> KvpackRejected:
    """The refusal, to be raised."""
    return KvpackRejected(category=category, what=what)


def magic(name: str) -> bytes:
    """Eight bytes of ASCII, padded with NUL."""
    return name.encode("ascii").ljust(8, b"\0")


class StateKey(NamedTuple):
    """A state of the cache: its layer and what it is called; ordered by layer, then by bytes."""

    layer: int
    name: str

    @property
    def order(self) -> tuple[int, bytes]:
        """What states are sorted by."""
        return self.layer, self.name.encode()

    def __str__(self) -> str:
        return f"layer {self.layer} {self.name!r}"


def u8(value: int) -> bytes:
    """One byte."""
    return _unsigned(value, 1)


def u16(value: int) -> bytes:
    """Two bytes."""
    return _unsigned(value, 2)


def u32(value: int) -> bytes:
    """Four bytes."""
    return _unsigned(value, 4)


def u64(value: int) -> bytes:
    """Eight bytes."""
    return _unsigned(value, 8)


def id32(value: bytes) -> bytes:
    """The 32 bytes of an id."""
    if len(value) != 32:  # noqa: PLR2004
        raise reject("bounds", f"an id has 32 bytes, not {len(value)}")
    return value


def head(name: str) -> bytes:
    """The twelve bytes that every canonical object begins with."""
    return magic(name) + u16(VERSION) + u16(0)


def key_bytes(key: StateKey) -> bytes:
    """A state's key on the wire."""
    check_key(key)
    name = key.name.encode()
    return u32(key.layer) + u16(len(name)) + name


def shape_bytes(dims: tuple[int, ...]) -> bytes:
    """A rank and its dimensions."""
    return u8(len(dims)) + b"".join(map(u64, dims))


def check_key(key: StateKey) -> None:
    """Nothing, when it can be a state's key: KvpackRejected."""
    name = key.name.encode("utf-8", "surrogatepass")
    if not 1 <= len(name) <= limits.NAME_NBYTES:
        raise reject("bounds", f"a state's name has {len(name)} bytes")
    if b"\0" in name:
        raise reject("semantics", "a state's name holds NUL")
    if not 0 <= key.layer <= limits.U32:
        raise reject("bounds", f"a layer is {key.layer}")


def check_ascending(keys: Iterable[StateKey], *, what: str, category: str = "semantics") -> None:
    """Nothing, when each comes after the one before: KvpackRejected."""
    before: tuple[int, bytes] | None = None
    for key in keys:
        order = key.order
        if before is not None and order <= before:
            raise reject(category, f"{what}: {key} is repeated or out of order")
        before = order


def check_canonical(data: bytes | memoryview, again: bytes, *, what: str) -> None:
    """Nothing, when what was read is written in the same bytes: KvpackRejected."""
    if not hmac.compare_digest(data, again):
        raise reject("semantics", f"{what}: not in its one canonical form")


class Reader:
    """Bytes, read once in order."""

    __slots__ = ("_at", "_data", "_what")

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._what = what

    @property
    def left(self) -> int:
        """Bytes that were not read yet."""
        return len(self._data) - self._at

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        if nbytes > self.left:
            raise reject(
                "truncated", f"{self._what}: {nbytes} bytes at {self._at}, {self.left} left"
            )
        self._at += nbytes
        return bytes(self._data[self._at - nbytes : self._at])

    def u8(self) -> int:
        """One byte."""
        return self.take(1)[0]

    def u16(self) -> int:
        """Two bytes."""
        return int.from_bytes(self.take(2), "little")

    def u32(self) -> int:
        """Four bytes."""
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        """Eight bytes."""
        return int.from_bytes(self.take(8), "little")

    def id32(self) -> bytes:
        """An id's 32 bytes."""
        return self.take(32)

    def zero(self, nbytes: int) -> None:
        """Bytes that have no meaning, and so have to be zero."""
        if any(self.take(nbytes)):
            raise reject("reserved", f"{self._what}: reserved bytes before {self._at} are not zero")

    def head(self, name: str) -> None:
        """An object's first twelve bytes."""
        found = self.take(8)
        if found != magic(name):
            legacy = " of a design that was given up" if found[:7] in LEGACY_MAGICS else ""
            raise reject("bad_magic", f"{self._what}: begins with {found!r}{legacy}, not {name}")
        version = self.u16()
        if version != VERSION:
            raise reject("bad_magic", f"{self._what}: version {version}, this reads {VERSION}")
        self.zero(2)

    def enum(self, kind: type[Enumerated], value: int) -> Enumerated:
        """The member of this value."""
        try:
            return kind(value)
        except ValueError:
            raise reject("unknown_enum", f"{self._what}: {kind.__name__} {value}") from None

    def key(self) -> StateKey:
        """A state's key."""
        layer = self.u32()
        raw = self.take(self.u16())
        try:
            key = StateKey(layer, raw.decode())
        except UnicodeDecodeError:
            raise reject("semantics", f"{self._what}: a state's name is not UTF-8") from None
        check_key(key)
        return key

    def dims(self, *, zero: bool = False) -> tuple[int, ...]:
        """A shape; `zero`: a dimension may be zero."""
        rank = self.u8()
        if not 1 <= rank <= limits.RANK:
            raise reject("bounds", f"{self._what}: rank {rank}")
        dims = tuple(self.u64() for _ in range(rank))
        if not zero and 0 in dims:
            raise reject("bounds", f"{self._what}: a dimension is zero")
        return dims

    def many(
        self, count: int, each: Callable[[], T], *, limit: int, nbytes: int, least: int = 1
    ) -> tuple[T, ...]:
        """`count` entries of at least `nbytes` each."""
        if not least <= count <= limit:
            raise reject("bounds", f"{self._what}: {count} entries, at most {limit}")
        if count * nbytes > self.left:
            raise reject("truncated", f"{self._what}: {count} entries in {self.left} bytes")
        return tuple(each() for _ in range(count))

    def end(self) -> None:
        """Nothing may follow."""
        if self.left:
            raise reject("reserved", f"{self._what}: {self.left} bytes after its end")


def _unsigned(value: int, nbytes: int) -> bytes:
    try:
        return value.to_bytes(nbytes, "little")
    except OverflowError:
        raise reject("bounds", f"{value} does not fit {nbytes} bytes") from None
