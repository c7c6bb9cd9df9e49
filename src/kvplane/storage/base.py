"""Where a pack's files live: bytes by name, and what every kind of storage promises.

A name is `/`-separated parts of lower-case letters, digits, `.`, `_` and `-`, each beginning with
a letter or digit. It is checked before it becomes a path or a key.

    put        create if absent: for names that say their content; two writers cannot conflict
    replace    the old bytes or the new, at every instant, for every reader
    lock       one holder of a name at a time, over all processes

When `put` or `replace` returns, the bytes survive the loss of power, unless `put` was told that
they need not; when it raises, what was
there before is still there. A name that ends in failure leaves nothing but, at worst, a temporary
that `list` does not show.
"""

import re
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from kvplane.errors import ArgumentError, PackCorrupt, StorageError

Data: TypeAlias = bytes | bytearray | memoryview

# 255 bytes is what one part may have on the file systems in use
_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,254}", re.ASCII)
LIMIT_NAME = 1024
LIMIT_PARTS = 16


def is_name(name: str) -> bool:
    """Whether it is safe to make a path or key of it."""
    parts = name.split("/")
    return (
        len(name) <= LIMIT_NAME
        and len(parts) <= LIMIT_PARTS
        and all(_PART.fullmatch(part) for part in parts)
    )


def check_name(name: str) -> str:
    """The name itself, once it is safe to make a path or key of it.

    Raises:
        StorageError: it is empty, absolute, too long, leaves the root or holds other characters.
    """
    if not is_name(name):
        shown = ascii(name if len(name) <= LIMIT_NAME else name[:LIMIT_NAME] + "...")
        raise StorageError(
            path=shown,
            what="not a name: parts of a-z, 0-9, '.', '_', '-' that begin with one of a-z, 0-9, "
            "separated by '/'",
        )
    return name


def flat(data: Data) -> memoryview:
    """The bytes of `data`, one after another, without copying them.

    Raises:
        ArgumentError: they do not lie side by side.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise ArgumentError(argument="data", expected="contiguous bytes", got=view.strides)
    return view.cast("B")


def flat_target(buffer: bytearray | memoryview, *, first: int) -> memoryview:
    """The bytes to fill, from byte `first` of something stored.

    Raises:
        ArgumentError: they do not lie side by side or may not be written, or `first` < 0.
    """
    view = flat(buffer)
    if view.readonly:
        raise ArgumentError(argument="buffer", expected="writable memory", got=buffer)
    if first < 0:
        raise ArgumentError(argument="first", expected="a byte's number, from 0", got=first)
    return view


def check_same_size(path: str, *, there: int, nbytes: int) -> None:
    """Nothing, when what is there may be what is put again.

    Raises:
        PackCorrupt: its size says that it is not.
    """
    if there != nbytes:
        raise PackCorrupt(path=path, what=f"holds {there} bytes, {nbytes} were to be put")


class Lock(AbstractContextManager["Lock"], Protocol):
    """A name that this holder has, until it releases it or dies."""

    def release(self) -> None:
        """Let others have it. Idempotent; also by `with`."""
        ...


class Reading(Protocol):
    """One version of something stored, whatever is stored under its name meanwhile."""

    nbytes: int  # when it was opened

    def read_into(self, buffer: bytearray | memoryview, *, first: int = 0) -> None:
        """Fill `buffer` with the bytes [first, first + nbytes of buffer), without another copy.

        Raises:
            PackCorrupt: it ends before `buffer` is full, which then holds undefined bytes.
        """
        ...


class Storage(Protocol):
    """Bytes by name. Safe to call from several threads; keeps no files open between calls.

    Every method raises StorageError for a name that `check_name` refuses, and for a root that
    cannot be read or written as asked, naming the path and the cause.
    """

    location: str  # for people: a folder or a URL
    parallel: int  # calls that are worth having under way at a time, from as many threads

    def read(self, name: str, *, limit: int) -> bytes:
        """All bytes of one version of `name`; its size is checked before memory is taken.

        Raises:
            StorageMissing: nothing is stored under it.
            PackTooLarge: it is longer than `limit`.
            PackCorrupt: it ended before its size.
        """
        ...

    def size(self, name: str) -> int:
        """Its bytes, counted.

        Raises:
            StorageMissing: nothing is stored under it.
        """
        ...

    def reading(self, name: str) -> AbstractContextManager[Reading]:
        """One version of its bytes, to be read part by part; `with` gives it back.

        Raises:
            StorageMissing: nothing is stored under it.
        """
        ...

    def exists(self, name: str) -> bool:
        """Whether something is stored under it."""
        ...

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """The names below the folder `prefix`, in code-point order; "" is the root.

        No temporaries, and nothing whose name `check_name` refuses. A folder that nothing was ever
        stored in is empty.
        """
        ...

    def is_empty(self) -> bool:
        """Whether nobody has stored anything, under any name, in the whole root."""
        ...

    def put(self, name: str, data: Data, *, durable: bool = True) -> bool:
        """Store `data` unless the name is taken; whether it was stored now.

        Only for names that say their content: bytes that are there are taken to be these bytes,
        and are as durable afterwards as if they had been written now.

        Args:
            name: where.
            data: what.
            durable: False for what may be lost, or found damaged, after the loss of power: it is
                cheap, and only for what can be made again and is checked when it is read.

        Raises:
            PackCorrupt: bytes of another size are there. They are kept.
            StorageError: disk full, an I/O error; nothing was lost.
        """
        ...

    def replace(self, name: str, data: Data) -> None:
        """Store `data` in place of what was there, if anything.

        Raises:
            StorageError: disk full, an I/O error; the old bytes or the new are there.
        """
        ...

    def delete(self, name: str) -> None:
        """See to it that nothing is stored under `name`. Idempotent."""
        ...

    def lock(self, name: str) -> Lock:
        """Hold `name`, one part, against every other process and every other caller in this one.

        Raises:
            SessionLocked: somebody else holds it: host, pid and since when.
        """
        ...

    def touch(self, name: str) -> None:
        """Say that it was used now.

        Raises:
            StorageMissing: nothing is stored under it.
        """
        ...

    def modified(self, name: str) -> float:
        """When it was stored or touched last, in seconds since 1970.

        Raises:
            StorageMissing: nothing is stored under it.
        """
        ...

    def move(self, name: str, new: str) -> None:
        """Give what is stored another name, in place of what had that.

        Raises:
            StorageMissing: nothing is stored under `name`.
            StorageError: it is under one of the two names, or, in an object store, under both.
        """
        ...

    def clear_temporaries(self, *, before: float) -> int:
        """Delete what writers that died left behind, last written before that time.

        Args:
            before: seconds since 1970.

        Returns:
            How many.
        """
        ...
