"""The memory file that a session and its forks live in: pages, and how many own each.

A page is taken when its first owner writes, shared by forks and checkpoints, and punched out of
the file when its last owner lets go. A page with more than one owner is never written.
"""

import fcntl
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import numpy as np

from kvplane.errors import MemoryUnavailable
from kvplane.memory import address
from kvplane.memory.address import PAGE_NBYTES

# retired regions that are looked at before a new one is made
MAX_LOOKS = 8


class Extent(NamedTuple):
    """Pages [first, stop) of a span are the file's pages from `page` on."""

    first: int
    stop: int
    page: int

    @property
    def page_stop(self) -> int:
        """One past the last of the file's pages."""
        return self.page + self.stop - self.first


class Region(NamedTuple):
    """Consecutive pages of a file that one span may take."""

    first: int
    num_pages: int


class Owner(Protocol):
    """Whatever remembers that pages are its own."""

    def forget_own(self) -> None:
        """Look again before the next page is written."""
        ...


class PageFile:
    """A memory file handed out in regions of whole pages.

    Every method but `enter` and `let_go` is called inside `enter`: sessions that share a file may
    live in several threads. Only the process that made a file uses it: in a forked child every
    change is refused, and what is collected there takes nothing from its parent.

    Raises:
        MemoryUnavailable: no descriptor can be had.
    """

    def __init__(self) -> None:
        try:
            self.fd = os.memfd_create("kvplane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise address.failed("a memory file", 0, error.errno or 0) from error
        weakref.finalize(self, os.close, self.fd).atexit = False
        # a page that a tensor shows never goes from under it: that would end in a signal
        with suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.owners = np.zeros(0, dtype=np.uint32)
        self._num_pages = 0
        self._retired: dict[int, deque[int]] = {}
        self._lock = threading.Lock()
        self._foreign = False
        # what collected spans and checkpoints let go, possibly in the middle of a call
        self._let_go: deque[tuple[Sequence[Extent], Sequence[Region]]] = deque()
        self.spans: weakref.WeakSet[Owner] = weakref.WeakSet()
        _FILES.add(self)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """One caller at a time, with everything let go before taken into account.

        Raises:
            MemoryUnavailable: another process made this file.
        """
        if self._foreign:
            message = "this memory belongs to the process that opened the session"
            raise MemoryUnavailable(message)
        try:
            with self._lock:
                self._settle()
                yield
        finally:
            self._drain()

    def let_go(self, extents: Sequence[Extent], regions: Sequence[Region] = ()) -> None:
        """One owner fewer for these pages, now or as soon as the caller inside is done."""
        self._let_go.append((extents, regions))
        self._drain()

    def disown(self) -> None:
        """Leave the file to the process that made it: this is a child of it."""
        self._foreign = True
        for span in list(self.spans):
            span.forget_own()

    def _drain(self) -> None:
        # what is let go while somebody is inside waits for that one to come out
        while self._let_go and not self._foreign and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._let_go:
            extents, regions = self._let_go.popleft()
            for extent in extents:
                self.drop(extent.page, extent.page_stop)
            for region in regions:
                self._retired.setdefault(region.num_pages, deque()).append(region.first)

    def region(self, num_pages: int) -> Region:
        """Consecutive pages that nobody owns.

        Raises:
            MemoryUnavailable: the file cannot grow.
        """
        retired = self._retired.get(num_pages, deque())
        for _ in range(min(len(retired), MAX_LOOKS)):
            if not self.owners[retired[-1] : retired[-1] + num_pages].any():
                return Region(retired.pop(), num_pages)
            # forks still use some of it
            retired.rotate()
        first = self._num_pages
        stop = first + num_pages
        try:
            os.ftruncate(self.fd, stop * PAGE_NBYTES)
        except OSError as error:
            nbytes = stop * PAGE_NBYTES
            raise address.failed("a memory file", nbytes, error.errno or 0) from error
        if stop > len(self.owners):
            grown = np.zeros(max(stop, 2 * len(self.owners)), dtype=np.uint32)
            grown[:first] = self.owners[:first]
            self.owners = grown
        self._num_pages = stop
        return Region(first, num_pages)

    def take(self, first: int, stop: int) -> None:
        """Own the pages of [first, stop) that nobody owns: MemoryUnavailable."""
        for begin, end in runs_of(self.owners[first:stop] == 0):
            nbytes = (end - begin) * PAGE_NBYTES
            address.allocate(self.fd, (first + begin) * PAGE_NBYTES, nbytes)
            self.owners[first + begin : first + end] = 1

    def share(self, first: int, stop: int) -> None:
        """One more owner for every page of [first, stop) that has one."""
        self.owners[first:stop] += self.owners[first:stop] > 0

    def drop(self, first: int, stop: int) -> None:
        """One owner fewer; pages without any leave the file."""
        owners = self.owners[first:stop]
        for begin, end in runs_of(owners == 1):
            # a page that stays in the file stays owned: whoever takes one finds zeros
            address.punch(self.fd, (first + begin) * PAGE_NBYTES, (end - begin) * PAGE_NBYTES)
        owners -= owners > 0

    @property
    def held_nbytes(self) -> int:
        """Bytes of all pages that somebody owns."""
        return int(np.count_nonzero(self.owners)) * PAGE_NBYTES


def runs_of(flags: np.ndarray) -> list[tuple[int, int]]:
    """The runs of true flags, as (begin, end)."""
    if not flags.any():
        return []
    if flags.all():
        return [(0, len(flags))]
    edges = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    first = 0 if flags[0] else 1
    return list(zip(edges[first::2], edges[first + 1 :: 2], strict=False))


_FILES: weakref.WeakSet[PageFile] = weakref.WeakSet()


def _disown_all() -> None:
    for file in list(_FILES):
        file.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
