"""Memory of a GPU unrolled and shared by its memory unit.

As `mapped_cpu`: a ring's pages are mapped twice, back to back; a full plane reserves addresses for
max_context and takes pages as rows are written, so that they never move and a captured graph stays
valid; forks share pages until one side writes. What differs on a GPU:

    pages       2 MiB: a span that fills none lives on the heap; of many that are needed at once,
                before the last, up to 16 are one allocation, mapped and shared as fast as one
    ahead       a plane's next page is there before its first row is asked for, one plane a token
    queued work may still read a page: whoever takes one from under an address waits first
    reading     of rows that nobody made writable is an error of the device, not a zero
"""

import contextlib
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kvplane.errors import MemoryUnavailable
from kvplane.memory.base import Span
from kvplane.memory.driver_cuda import AddressSpan, Driver, driver_of, why_not
from kvplane.memory.heap import HeapSpan
from kvplane.memory.pages_cuda import (
    Extent,
    PageHold,
    PagePool,
    distinct,
    neighbours,
    places_of,
    runs_of,
    together,
)

# how long before a page is needed it is there, in parts of a page; planes take theirs in turn
AHEAD, APART, TURNS = 128, 256, 16


class CudaMappedSpan:
    """One plane's bytes as pages of a device.

    Args:
        pool: the session's.
        nbytes: of the plane; of whole pages when it is unrolled.
        unrolled: map the pages twice, back to back.
        turn: of the planes of a session, which this one is.

    Raises:
        MemoryUnavailable: addresses cannot be had; nothing is left behind.
    """

    def __init__(self, pool: PagePool, nbytes: int, *, unrolled: bool, turn: int = 0) -> None:
        self.nbytes = nbytes
        self.unrolled = unrolled
        self.backed_by_need = True
        self._pool = pool
        self._page_nbytes = page = pool.driver.page_nbytes
        self._num_pages = -(-nbytes // page)
        self._ahead = page // AHEAD + turn % TURNS * (page // APART)
        size = self._num_pages * page
        self._range = pool.driver.reserve(2 * size if unrolled else size)
        # by page: the allocation behind it
        self._pages: list[Extent | None] = [None] * self._num_pages
        # by range of `back`: pages known to be there and this span's alone
        self._own: list[range] = []
        closing = _Closing(pool, self._range, self._pages, unrolled=unrolled)
        self._closing = weakref.finalize(self, pool.later, closing)
        self._closing.atexit = False

    def tensor(self) -> Tensor:
        """Uint8, [nbytes] or [2 * nbytes]; zeros once the span is closed."""
        return self._range.tensor[: 2 * self.nbytes if self.unrolled else self.nbytes]

    def back(self, ranges: Sequence[range]) -> None:
        """Give byte ranges pages of their own: zeroed new ones, or copies of shared ones."""
        if len(self._own) != len(ranges):
            self._own = [range(0)] * len(ranges)
        for place, part in enumerate(ranges):
            own = self._own[place]
            first, stop = part.start // self._page_nbytes, -(-part.stop // self._page_nbytes)
            wanted = min(self._num_pages, -(-(part.stop + self._ahead) // self._page_nbytes))
            if own.start <= first and wanted <= own.stop:
                continue
            with self._pool.enter():
                self._take(first, stop)
                if wanted > stop:
                    # what fails here fails when it is needed
                    with contextlib.suppress(MemoryUnavailable):
                        self._take(stop, stop + 1)
                        stop += 1
            if own and first <= own.stop and own.start <= stop:
                self._own[place] = range(min(first, own.start), max(stop, own.stop))
            else:
                self._own[place] = range(first, stop)
        # a ring that has turned once needs nothing any more
        self.backed_by_need = len(self._own[0]) < self._num_pages

    def _take(self, first: int, stop: int) -> None:
        for extent in distinct(self._pages[first:stop]):
            if extent.owners > 1:
                self._copy(extent)
        for begin, end in runs_of([page is None for page in self._pages[first:stop]], first):
            fresh: list[Extent] = []
            try:
                while not fresh or fresh[-1].stop < end:
                    place = fresh[-1].stop if fresh else begin
                    fresh.append(self._pool.take(place, together(place, end)))
                self._map(begin, fresh)
            except BaseException:
                for extent in fresh:
                    self._pool.drop(extent)
                raise
            self._put(fresh)
            self._range.tensor[begin * self._page_nbytes : end * self._page_nbytes].zero_()

    def _put(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self._pages[extent.first : extent.stop] = [extent] * extent.num_pages

    def _copy(self, shared: Extent) -> None:
        """Put a copy under this span's addresses and let go of the shared pages."""
        size = self._page_nbytes
        at = slice(shared.first * size, shared.stop * size)
        extent = self._pool.take(shared.first, shared.num_pages)
        content = self._range.tensor[at].clone()
        # nothing queued reads the old pages at these addresses any more, and the copy is made
        self._pool.driver.settle()
        self._unmap(shared)
        try:
            self._map(shared.first, [extent])
        except BaseException:
            self._map(shared.first, [shared])
            self._pool.drop(extent)
            raise
        self._put([extent])
        self._range.tensor[at] = content
        self._pool.drop(shared)

    def hold(self, ranges: Sequence[range]) -> PageHold:
        """One more owner of the pages behind byte ranges."""
        with self._pool.enter():
            return PageHold(self._pool, self.lent(ranges))

    def show(self, hold: PageHold) -> None:
        """Have these pages here, shared with whoever holds them: MemoryUnavailable."""
        with self._pool.enter():
            self._show(hold.extents)

    def share(self, source: Span, ranges: Sequence[range]) -> bool:
        """Have the pages of another plane here too; a ring is copied instead: it is written next.

        Raises:
            MemoryUnavailable: as in `show`.
        """
        if not isinstance(source, CudaMappedSpan) or source.pool is not self._pool or self.unrolled:
            return False
        with self._pool.enter():
            self._show(source.lent(ranges))
        return True

    @property
    def pool(self) -> PagePool:
        """Whose pages these are."""
        return self._pool

    def lent(self, ranges: Sequence[range]) -> list[Extent]:
        """The pages behind byte ranges, which are not this span's alone from now on."""
        self._forget_own()
        return distinct([self._pages[place] for place in places_of(ranges, self._page_nbytes)])

    def _show(self, extents: Sequence[Extent]) -> None:
        self._forget_own()
        wanted = [extent for extent in extents if self._pages[extent.first] is not extent]
        before = distinct(
            [page for extent in wanted for page in self._pages[extent.first : extent.stop]]
        )
        self._let_go(before)
        for run in neighbours(wanted):
            self._map(run[0].first, run)
            for extent in run:
                extent.owners += 1
            self._put(run)

    def _let_go(self, extents: Sequence[Extent]) -> None:
        """Show these pages no more, and own them no more."""
        if extents:
            self._pool.driver.settle()
        for extent in extents:
            self._unmap(extent)
            self._pages[extent.first : extent.stop] = [None] * extent.num_pages
            self._pool.drop(extent)

    def discard(self) -> None:
        """Let go of every page; the bytes are zero again."""
        with self._pool.enter():
            self._forget_own()
            self._let_go(distinct(self._pages))

    def close(self) -> None:
        """Let go of every page; tensors that are left read zeros. Idempotent."""
        self._closing()

    def counts(self) -> tuple[int, int]:
        """Bytes of pages held, and of those that others own too."""
        with self._pool.enter():
            extents = distinct(self._pages)
        held = sum(extent.num_pages for extent in extents)
        shared = sum(extent.num_pages for extent in extents if extent.owners > 1)
        return held * self._page_nbytes, shared * self._page_nbytes

    def _forget_own(self) -> None:
        self._own = []
        self.backed_by_need = True

    def _map(self, place: int, extents: Sequence[Extent]) -> None:
        shown = [(extent.handle, extent.num_pages) for extent in extents]
        _shown(self._range, place * self._page_nbytes, shown, self._sizes)

    def _unmap(self, extent: Extent) -> None:
        size = self._page_nbytes
        for begin in self._sizes:
            self._range.unmap(begin + extent.first * size, extent.num_pages * size)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Where the span's pages begin: once, or twice."""
        return (0, self.nbytes) if self.unrolled else (0,)


def _shown(
    addresses: AddressSpan,
    first: int,
    shown: Sequence[tuple[object, int]],
    begins: Sequence[int],
) -> None:
    """Show allocations from a byte on, at each of the beginnings, or at none."""
    nbytes = sum(num_pages for _, num_pages in shown) * addresses.page_nbytes
    done: list[int] = []
    try:
        for begin in begins:
            addresses.map(begin + first, shown)
            done.append(begin)
    except BaseException:
        for begin in done:
            addresses.unmap(begin + first, nbytes)
        raise


class _Closing:
    """What is done once, when a span is closed or collected.

    Args:
        pool: the pages'.
        addresses: which tensors may be left over.
        pages: the span's, by place.
        unrolled: whether they are shown twice.
    """

    def __init__(
        self,
        pool: PagePool,
        addresses: AddressSpan,
        pages: list[Extent | None],
        *,
        unrolled: bool,
    ) -> None:
        self._pool = pool
        self._addresses = addresses
        self._pages = pages
        self._times = 2 if unrolled else 1

    def __call__(self) -> None:
        size = self._addresses.page_nbytes
        held = distinct(self._pages)
        if not held:
            return
        self._pool.driver.settle()
        for time in range(self._times):
            begin = time * len(self._pages) * size
            for run in neighbours(held):
                first, nbytes = begin + run[0].first * size, (run[-1].stop - run[0].first) * size
                self._addresses.unmap(first, nbytes)
                # tensors that are left must have something to read
                self._addresses.blank(first, nbytes)
        self._pages[:] = [None] * len(self._pages)
        for extent in held:
            self._pool.drop(extent)


class WholeSpan(HeapSpan):
    """A plane that fills no page: one tensor, held from the beginning."""

    def counts(self) -> tuple[int, int] | None:
        """All of its bytes, of one owner."""
        return self.nbytes, 0


class CudaMappedArena:
    """The memory of one session; a fork's arena has pages of the same pool."""

    def __init__(self, pool: PagePool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._spans: list[CudaMappedSpan] = []
        self._heap_nbytes = 0

    def reserve(self, nbytes: int, *, ring: bool) -> Span:
        """A span of zero bytes; rings of whole pages are unrolled, small planes are on the heap."""
        whole = nbytes % self._pool.driver.page_nbytes == 0
        if (ring and not whole) or nbytes < self._pool.driver.page_nbytes:
            self._heap_nbytes += nbytes
            self._pool.heap_nbytes += nbytes
            return WholeSpan(nbytes, self._device)
        # planes that grow take turns
        turn = sum(not span.unrolled for span in self._spans)
        span = CudaMappedSpan(self._pool, nbytes, unrolled=ring, turn=turn)
        self._spans.append(span)
        return span

    def fork(self) -> "CudaMappedArena":
        """Memory for a session that shares pages with this one."""
        return CudaMappedArena(self._pool, self._device)

    def held(self) -> tuple[int, int]:
        """The pool, and the bytes of its pages: this session's and its forks'."""
        with self._pool.enter():
            pages = self._pool.num_pages * self._pool.driver.page_nbytes
            return id(self._pool), pages + self._pool.heap_nbytes

    def release(self) -> None:
        """Let go of every page. Idempotent."""
        for span in self._spans:
            span.close()
        self._spans.clear()
        self._pool.heap_nbytes -= self._heap_nbytes
        self._heap_nbytes = 0


class CudaMappedBackend:
    """Pages of a GPU.

    Args:
        device: which.
        driver: its; for tests another.
    """

    name = "mapped"
    fork = "copies rings, shares the pages of full planes until one side writes"

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        self._device = device
        self._driver = driver or driver_of(device)
        self.page_nbytes = self.ring_page_nbytes = self._driver.page_nbytes

    def arena(self) -> CudaMappedArena:
        """Memory for one more session."""
        return CudaMappedArena(PagePool(self._driver), self._device)


def unavailable(device: torch.device) -> str | None:
    """None where this backend works; else why not."""
    return why_not(device)
