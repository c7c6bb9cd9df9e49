"""Memory of a GPU unrolled and shared by its memory unit.

As `mapped_cpu`: a ring's pages are mapped twice, back to back; a full plane reserves addresses for
max_context and takes pages as rows are written, so that they never move and a captured graph stays
valid; forks share pages until one side writes. What differs on a GPU:

    pages       2 MiB: a span that fills none lives on the heap
    ahead       a plane's next page is there before its first row is asked for, one plane a token
    queued work may still read a page: whoever takes one from under an address waits first
    reading     of rows that nobody made writable is an error of the device, not a zero
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvplane.errors import MemoryUnavailable
from kvplane.memory.base import Span
from kvplane.memory.driver_cuda import AddressSpan, CudaDriver, Driver, why_not
from kvplane.memory.heap import HeapSpan
from kvplane.memory.pages_cuda import Page, PageHold, PagePool

# how long before a page is needed it is there, in parts of a page; planes take theirs in turn
AHEAD, APART, TURNS = 32, 64, 24


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
        self._pages: list[Page | None] = [None] * self._num_pages
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
        for place in range(first, stop):
            page = self._pages[place]
            if page is not None and page.owners > 1:
                self._copy(place, page)
        for begin, end in _runs([page is None for page in self._pages[first:stop]], first):
            fresh: list[Page] = []
            try:
                while len(fresh) < end - begin:
                    fresh.append(self._pool.take())
                self._map(begin, fresh)
            except BaseException:
                for page in fresh:
                    self._pool.drop(page)
                raise
            self._pages[begin:end] = fresh
            at = slice(begin * self._page_nbytes, end * self._page_nbytes)
            self._range.tensor[at].zero_()

    def _copy(self, place: int, shared: Page) -> None:
        """Put a copy under one of this span's addresses and let go of the shared page."""
        driver, size = self._pool.driver, self._page_nbytes
        at = slice(place * size, (place + 1) * size)
        page = self._pool.take()
        content = self._range.tensor[at].clone()
        # nothing queued reads the old page at this address any more, and the copy is made
        driver.settle()
        self._unmap(place)
        try:
            self._map(place, [page])
        except BaseException:
            self._map(place, [shared])
            self._pool.drop(page)
            raise
        self._pages[place] = page
        self._range.tensor[at] = content
        self._pool.drop(shared)

    def hold(self, ranges: Sequence[range]) -> PageHold:
        """One more owner of the pages behind byte ranges."""
        with self._pool.enter():
            return PageHold(self._pool, self.lent(ranges))

    def show(self, hold: PageHold) -> None:
        """Have these pages here, shared with whoever holds them: MemoryUnavailable."""
        with self._pool.enter():
            self._show(hold.pages)

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

    def lent(self, ranges: Sequence[range]) -> list[tuple[int, Page]]:
        """The pages behind byte ranges, which are not this span's alone from now on."""
        self._forget_own()
        places = _places(ranges, self._page_nbytes)
        return [(place, page) for place in places if (page := self._pages[place]) is not None]

    def _show(self, pages: Sequence[tuple[int, Page]]) -> None:
        self._forget_own()
        wanted = [(place, page) for place, page in pages if self._pages[place] is not page]
        if any(self._pages[place] is not None for place, _ in wanted):
            self._pool.driver.settle()
        for run in _neighbours(wanted):
            first = run[0][0]
            before = self._pages[first : first + len(run)]
            for place, old in enumerate(before, first):
                if old is not None:
                    self._unmap(place)
                    self._pages[place] = None
                    self._pool.drop(old)
            self._map(first, [page for _, page in run])
            for place, page in run:
                page.owners += 1
                self._pages[place] = page

    def discard(self) -> None:
        """Let go of every page; the bytes are zero again."""
        with self._pool.enter():
            self._forget_own()
            self._pool.driver.settle()
            for place, page in enumerate(self._pages):
                if page is not None:
                    self._unmap(place)
                    self._pages[place] = None
                    self._pool.drop(page)

    def close(self) -> None:
        """Let go of every page; tensors that are left read zeros. Idempotent."""
        self._closing()

    def counts(self) -> tuple[int, int]:
        """Bytes of pages held, and of those that others own too."""
        with self._pool.enter():
            pages = [page for page in self._pages if page is not None]
            shared = sum(page.owners > 1 for page in pages)
        return len(pages) * self._page_nbytes, shared * self._page_nbytes

    def _forget_own(self) -> None:
        self._own = []
        self.backed_by_need = True

    def _map(self, place: int, pages: Sequence[Page]) -> None:
        _shown(self._range, place, [page.handle for page in pages], self._sizes)

    def _unmap(self, place: int) -> None:
        for size in self._sizes:
            self._range.unmap(size + place * self._page_nbytes, self._page_nbytes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Where the span's pages begin: once, or twice."""
        return (0, self.nbytes) if self.unrolled else (0,)


def _shown(
    addresses: AddressSpan, place: int, handles: Sequence[object], begins: Sequence[int]
) -> None:
    """Show pages from a place on, at each of the beginnings, or at none."""
    size = addresses.page_nbytes
    done: list[int] = []
    try:
        for begin in begins:
            addresses.map(begin + place * size, handles)
            done.append(begin)
    except BaseException:
        for begin in done:
            addresses.unmap(begin + place * size, len(handles) * size)
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
        pages: list[Page | None],
        *,
        unrolled: bool,
    ) -> None:
        self._pool = pool
        self._addresses = addresses
        self._pages = pages
        self._times = 2 if unrolled else 1

    def __call__(self) -> None:
        size = self._addresses.page_nbytes
        held = [(place, page) for place, page in enumerate(self._pages) if page is not None]
        if not held:
            return
        self._pool.driver.settle()
        for time in range(self._times):
            begin = time * len(self._pages) * size
            for run in _neighbours(held):
                first, nbytes = begin + run[0][0] * size, len(run) * size
                self._addresses.unmap(first, nbytes)
                # tensors that are left must have something to read
                self._addresses.blank(first, nbytes)
        for place, page in held:
            self._pages[place] = None
            self._pool.drop(page)


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
        span = CudaMappedSpan(self._pool, nbytes, unrolled=ring, turn=len(self._spans))
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
        self._driver = driver or CudaDriver(device)
        self.page_nbytes = self.ring_page_nbytes = self._driver.page_nbytes

    def arena(self) -> CudaMappedArena:
        """Memory for one more session."""
        return CudaMappedArena(PagePool(self._driver), self._device)


def unavailable(device: torch.device) -> str | None:
    """None where this backend works; else why not."""
    return why_not(device)


def _places(ranges: Sequence[range], page_nbytes: int) -> list[int]:
    places: set[int] = set()
    for part in ranges:
        places.update(range(part.start // page_nbytes, -(-part.stop // page_nbytes)))
    return sorted(places)


def _runs(flags: Sequence[bool], first: int) -> Iterator[tuple[int, int]]:
    """The runs of true flags, as (begin, end), counted from `first`."""
    begin = None
    for place, flag in enumerate([*flags, False], first):
        if flag and begin is None:
            begin = place
        elif not flag and begin is not None:
            yield begin, place
            begin = None


def _neighbours(pages: Sequence[tuple[int, Page]]) -> list[list[tuple[int, Page]]]:
    """Pages in runs of consecutive places."""
    runs: list[list[tuple[int, Page]]] = []
    for place, page in pages:
        if runs and runs[-1][-1][0] + 1 == place:
            runs[-1].append((place, page))
        else:
            runs.append([(place, page)])
    return runs
