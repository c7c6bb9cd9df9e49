"""The memory file that a session and its forks live in: pages, and how many own each.

A page is taken when its first owner writes, shared by forks and checkpoints, and punched out of
the file when its last owner lets go. A page with more than one owner is never written.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from kvplane.memory import address
from kvplane.memory.address import PAGE_NBYTES


class Extent(NamedTuple):
    """Pages [first, stop) of a span are the file's pages from `page` on."""

    first: int
    stop: int
    page: int


class PageFile:
    """A memory file handed out in regions of whole pages.

    Every method but `enter` and `let_go` is called inside `enter`: sessions that share a file may
    live in several threads.

    Raises:
        MemoryUnavailable: no descriptor can be had.
    """

    def __init__(self) -> None:
        try:
            self.fd = os.memfd_create("kvplane", os.MFD_CLOEXEC)
        except OSError as error:
            raise address.failed("a memory file", 0, error.errno or 0) from error
        weakref.finalize(self, os.close, self.fd).atexit = False
        self.owners = np.zeros(0, dtype=np.uint32)
        self._num_pages = 0
        self._retired: dict[int, list[int]] = {}
        self._copies: set[int] = set()
        self._lock = threading.Lock()
        # what collected spans and checkpoints let go, possibly in the middle of a call
        self._let_go: deque[tuple[Sequence[Extent], Sequence[int]]] = deque()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """One caller at a time, with everything let go before taken into account."""
        with self._lock:
            self._settle()
            yield
            self._settle()

    def let_go(self, extents: Sequence[Extent], region: Sequence[int] = ()) -> None:
        """One owner fewer for these pages, now or as soon as the caller inside is done."""
        self._let_go.append((extents, region))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._let_go:
            extents, region = self._let_go.popleft()
            for extent in extents:
                self.drop(extent.page, extent.page + extent.stop - extent.first)
            if region:
                first, num_pages = region
                self._retired.setdefault(num_pages, []).append(first)

    def region(self, num_pages: int) -> int:
        """The first of `num_pages` consecutive pages that nobody owns.

        Raises:
            MemoryUnavailable: the file cannot grow.
        """
        retired = self._retired.get(num_pages, [])
        for place, first in enumerate(retired):
            if not self.owners[first : first + num_pages].any():
                return retired.pop(place)
        first = self._num_pages
        stop = first + num_pages
        try:
            os.ftruncate(self.fd, stop * PAGE_NBYTES)
        except OSError as error:
            raise address.failed("a memory file", stop, error.errno or 0) from error
        if stop > len(self.owners):
            grown = np.zeros(max(stop, 2 * len(self.owners)), dtype=np.uint32)
            grown[:first] = self.owners[:first]
            self.owners = grown
        self._num_pages = stop
        return first

    def copy_page(self) -> int:
        """A page of its own, owned once, for a copy of a shared one: MemoryUnavailable."""
        page = self.region(1)
        self._copies.add(page)
        try:
            self.take(page, page + 1)
        except BaseException:
            self._retired.setdefault(1, []).append(page)
            raise
        return page

    def take(self, first: int, stop: int) -> None:
        """Own the pages of [first, stop) that nobody owns: MemoryUnavailable."""
        for begin, end in _runs(self.owners[first:stop] == 0):
            nbytes = (end - begin) * PAGE_NBYTES
            address.allocate(self.fd, (first + begin) * PAGE_NBYTES, nbytes)
            self.owners[first + begin : first + end] = 1

    def share(self, first: int, stop: int) -> None:
        """One more owner for every page of [first, stop) that has one."""
        self.owners[first:stop] += self.owners[first:stop] > 0

    def drop(self, first: int, stop: int) -> None:
        """One owner fewer; pages without any leave the file."""
        owners = self.owners[first:stop]
        last = owners == 1
        owners -= owners > 0
        for begin, end in _runs(last):
            address.punch(self.fd, (first + begin) * PAGE_NBYTES, (end - begin) * PAGE_NBYTES)
            for page in self._copies.intersection(range(first + begin, first + end)):
                self._copies.remove(page)
                self._retired.setdefault(1, []).append(page)

    @property
    def held_nbytes(self) -> int:
        """Bytes of all pages that somebody owns."""
        return int(np.count_nonzero(self.owners)) * PAGE_NBYTES


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """The runs of true flags, as (begin, end)."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]
