"""A GPU's driver played by this process's own memory unit, strict about what may be done when."""

import os
import weakref

from kvplane.errors import MemoryUnavailable
from kvplane.memory import address
from kvplane.memory.address import PAGE_NBYTES, AddressRange


class PagedDriver:
    """Pages of a memory file; addresses that show none show 0xFF.

    Args:
        limit: pages that can be had.

    Attributes:
        handles: allocations that are taken: of how many pages.
        shown: how often each is seen.
        queued: work is queued that may read anything: no page may go from under an address.
    """

    page_nbytes = PAGE_NBYTES

    def __init__(self, limit=1 << 20):
        self.limit = limit
        self.fd = os.memfd_create("paged")
        weakref.finalize(self, os.close, self.fd)
        self.handles = {}
        self.shown = {}
        self.queued = False
        self.busy = False
        self.waits = 0
        self._next = 0
        self.poison = self._page(b"\xff")
        self.zero = self._page(b"\0")

    def _page(self, content):
        page, self._next = self._next, self._next + 1
        os.ftruncate(self.fd, self._next * PAGE_NBYTES)
        os.pwrite(self.fd, content * PAGE_NBYTES, page * PAGE_NBYTES)
        return page

    def reserve(self, nbytes):
        return PagedSpan(self, nbytes)

    @property
    def num_pages(self):
        return sum(self.handles.values())

    def create(self, num_pages):
        if self.num_pages + num_pages > self.limit:
            raise MemoryUnavailable("no page left")
        # what was there before is not zero
        handle = self._page(b"\xee")
        for _ in range(num_pages - 1):
            self._page(b"\xee")
        self.handles[handle] = num_pages
        return handle

    def release(self, handle):
        assert not self.shown.get(handle)
        del self.handles[handle]

    def settle(self):
        assert not self.busy
        self.queued = False
        self.waits += 1

    def is_busy(self):
        return self.busy


class PagedSpan:
    page_nbytes = PAGE_NBYTES

    def __init__(self, driver, nbytes):
        self.driver = driver
        self.range = AddressRange(nbytes)
        self.tensor = self.range.tensor
        self.places = {}
        self._put(0, nbytes, driver.poison)

    def _put(self, first, nbytes, page):
        for at in range(first, first + nbytes, PAGE_NBYTES):
            self.range.map(at, PAGE_NBYTES, self.driver.fd, page * PAGE_NBYTES)

    def map(self, first, shown):
        at = first
        for handle, num_pages in shown:
            assert self.driver.handles[handle] == num_pages
            assert not self.places.keys() & range(at, at + num_pages * PAGE_NBYTES, PAGE_NBYTES)
            for number in range(num_pages):
                self._put(at, PAGE_NBYTES, handle + number)
                self.places[at] = handle
                at += PAGE_NBYTES
            self.driver.shown[handle] = self.driver.shown.get(handle, 0) + 1

    def unmap(self, first, nbytes):
        assert not self.driver.queued
        gone = [self.places.pop(at) for at in range(first, first + nbytes, PAGE_NBYTES)]
        for handle in set(gone):
            # an allocation goes whole
            times, left = divmod(gone.count(handle), self.driver.handles[handle])
            assert not left
            self.driver.shown[handle] -= times
        self._put(first, nbytes, self.driver.poison)

    def blank(self, first, nbytes):
        self._put(first, nbytes, self.driver.zero)


def works():
    """Whether this system can play it."""
    return address.available() is None
