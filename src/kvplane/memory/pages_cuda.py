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


@dataclass(slots=True, eq=False)
class Page:
    """One physical page.

    Args:
        handle: the driver's name for it.
        owners: spans that show it and holds that keep it.
    """

    handle: Any
    owners: int = 1


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

    def take(self) -> Page:
        """A page with one owner; what is in it is undefined: MemoryUnavailable."""
        page = Page(self.driver.create())
        self.num_pages += 1
        return page

    def drop(self, page: Page) -> None:
        """One owner fewer, who shows it no more; a page without any goes back."""
        page.owners -= 1
        if not page.owners:
            self.num_pages -= 1
            self.driver.release(page.handle)


class PageHold:
    """A further owner of some of a span's pages: what a checkpoint or a fork keeps of a plane.

    Args:
        pool: the pages', entered by the caller.
        pages: by place in the span.
    """

    def __init__(self, pool: PagePool, pages: Sequence[tuple[int, Page]]) -> None:
        self.pages = tuple(pages)
        for _, page in self.pages:
            page.owners += 1
        weakref.finalize(self, pool.later, _Dropped(pool, self.pages)).atexit = False


@dataclass(frozen=True, slots=True)
class _Dropped:
    pool: PagePool
    pages: tuple[tuple[int, Page], ...]

    def __call__(self) -> None:
        for _, page in self.pages:
            self.pool.drop(page)
