"""Pages of a GPU, and how many own each: what a session and its forks share.

A page is taken when its first owner writes, shared by forks and checkpoints, and given back to the
driver when its last owner lets go. A page with more than one owner is never written.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvplane.memory.driver_cuda import Driver

# pages of one allocation, where so many are needed
LARGEST = 16


@dataclass(slots=True, eq=False)
class Extent:
    """Physical memory of one allocation, which is shown, shared and given back whole.

    Args:
        handle: the driver's name for it.
        first: the first of a plane's pages that it holds, in every plane that shows it.
        num_pages: how many.
        owners: spans that show it and holds that keep it.
    """

    handle: Any
    first: int
    num_pages: int
    owners: int = 1

    @property
    def stop(self) -> int:
        """One past its last page in a plane."""
        return self.first + self.num_pages


class PagePool:
    """The pages of sessions that may share them.

    Every method but `enter` and `later` is called inside `enter`: sessions may live in threads.

    Args:
        driver: the device's.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.num_pages = 0
        # of planes that fill no page
        self.heap_nbytes = 0
        self._lock = threading.Lock()
        # what collected spans and holds let go, possibly in the middle of a call
        self._later: deque[Callable[[], None]] = deque()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """One caller at a time, with everything let go before taken into account."""
        with self._lock:
            self._settle()
            yield
            self._settle()

    def later(self, work: Callable[[], None]) -> None:
        """Do work now, or as soon as the caller inside is done."""
        self._later.append(work)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        # no page goes while a graph is captured: that would be a wait
        while self._later and not self.driver.is_busy():
            self._later.popleft()()

    def take(self, first: int, num_pages: int) -> Extent:
        """Pages with one owner; what is in them is undefined: MemoryUnavailable."""
        extent = Extent(self.driver.create(num_pages), first, num_pages)
        self.num_pages += num_pages
        return extent

    def drop(self, extent: Extent) -> None:
        """One owner fewer, who shows it no more; without any it goes back."""
        extent.owners -= 1
        if not extent.owners:
            self.num_pages -= extent.num_pages
            self.driver.release(extent.handle)


class PageHold:
    """A further owner of some of a span's pages: what a checkpoint or a fork keeps of a plane.

    Args:
        pool: the pages', entered by the caller.
        extents: the pages.
    """

    def __init__(self, pool: PagePool, extents: Sequence[Extent]) -> None:
        self.extents = tuple(extents)
        for extent in self.extents:
            extent.owners += 1
        weakref.finalize(self, pool.later, _Dropped(pool, self.extents)).atexit = False


@dataclass(frozen=True, slots=True)
class _Dropped:
    pool: PagePool
    extents: tuple[Extent, ...]

    def __call__(self) -> None:
        for extent in self.extents:
            self.pool.drop(extent)


def places_of(ranges: Sequence[range], page_nbytes: int) -> list[int]:
    """The pages of a plane behind byte ranges, ascending."""
    places: set[int] = set()
    for part in ranges:
        places.update(range(part.start // page_nbytes, -(-part.stop // page_nbytes)))
    return sorted(places)


def runs_of(flags: Sequence[bool], first: int) -> Iterator[tuple[int, int]]:
    """The runs of true flags, as (begin, end), counted from `first`."""
    begin = None
    for place, flag in enumerate([*flags, False], first):
        if flag and begin is None:
            begin = place
        elif not flag and begin is not None:
            yield begin, place
            begin = None


def together(place: int, stop: int) -> int:
    """How many pages from `place` on are one allocation, of those needed before `stop`.

    The last page is where forks part: by itself, it is copied by itself.
    """
    count = LARGEST
    while count > 1 and place + count >= stop:
        count //= 2
    return count


def distinct(pages: Sequence[Extent | None]) -> list[Extent]:
    """The allocations behind pages, each once, in order."""
    return [page for page in dict.fromkeys(pages) if page is not None]


def neighbours(extents: Sequence[Extent]) -> list[list[Extent]]:
    """Allocations in runs that follow each other."""
    runs: list[list[Extent]] = []
    for extent in extents:
        if runs and runs[-1][-1].stop == extent.first:
            runs[-1].append(extent)
        else:
            runs.append([extent])
    return runs
