"""Memory unrolled and shared by the memory unit (Linux).

A ring's pages are mapped twice, back to back: its window is one contiguous span at any rotation.

    addresses   [ page 0 | page 1 | page 2 | page 0 | page 1 | page 2 ]
    window                      [ oldest ... newest ]

A full plane reserves addresses for max_context and takes pages as rows are written. Forks and
checkpoints share pages until one side writes; whoever writes first copies the page first.
"""

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvplane.memory.address import PAGE_NBYTES, AddressRange, available
from kvplane.memory.pages import Extent, PageFile


class PageHold:
    """A further owner of some of a span's pages: what a checkpoint or a fork keeps of a plane.

    Args:
        file: the pages' file, entered by the caller.
        extents: the pages.
    """

    def __init__(self, file: PageFile, extents: Sequence[Extent]) -> None:
        self.file = file
        self.extents = tuple(extents)
        for extent in self.extents:
            file.share(extent.page, extent.page + extent.stop - extent.first)
        weakref.finalize(self, file.let_go, self.extents).atexit = False


class MappedSpan:
    """One plane's bytes as pages of a memory file.

    Args:
        file: the session's.
        nbytes: of the plane; of whole pages when it is unrolled.
        unrolled: map the pages twice, back to back.

    Raises:
        MemoryUnavailable: addresses or mappings cannot be had; nothing is left behind.
    """

    def __init__(self, file: PageFile, nbytes: int, *, unrolled: bool) -> None:
        self.nbytes = nbytes
        self.unrolled = unrolled
        self.backed_by_need = True
        self._file = file
        self._num_pages = -(-nbytes // PAGE_NBYTES)
        size = self._num_pages * PAGE_NBYTES
        self._range = AddressRange(2 * size if unrolled else size)
        # by range of `back`: pages known to be there and this span's alone
        self._own: list[range] = []
        with file.enter():
            self._region = [file.region(self._num_pages), self._num_pages]
            self._extents = [Extent(0, self._num_pages, self._region[0])]
            self._closing = weakref.finalize(
                self, _close, file, self._extents, self._region, self._range
            )
            self._closing.atexit = False
            self._map(self._extents[0])

    def tensor(self) -> Tensor:
        """Uint8, [nbytes] or [2 * nbytes]; zeros once the span is closed."""
        return self._range.tensor[: 2 * self.nbytes if self.unrolled else self.nbytes]

    def back(self, ranges: Sequence[range]) -> None:
        """Give byte ranges pages of their own: new ones, or copies of shared ones."""
        if len(self._own) != len(ranges):
            self._own = [range(0)] * len(ranges)
        for place, part in enumerate(ranges):
            own = self._own[place]
            first, stop = part.start // PAGE_NBYTES, -(-part.stop // PAGE_NBYTES)
            if own.start <= first and stop <= own.stop:
                continue
            with self._file.enter():
                self._take(first, stop)
            if own and first <= own.stop and own.start <= stop:
                self._own[place] = range(min(first, own.start), max(stop, own.stop))
            else:
                self._own[place] = range(first, stop)
        # a ring that has turned once needs nothing any more
        self.backed_by_need = len(self._own[0]) < self._num_pages

    def _take(self, first: int, stop: int) -> None:
        owners = self._file.owners
        for extent in list(self._within(first, stop)):
            for page in range(extent.page, extent.page + extent.stop - extent.first):
                if owners[page] > 1:
                    self._copy(extent.first + page - extent.page, page)
                    owners = self._file.owners
        for extent in self._within(first, stop):
            self._file.take(extent.page, extent.page + extent.stop - extent.first)

    def _copy(self, page: int, shared: int) -> None:
        """Put a copy under one of this span's pages and let go of the shared one."""
        at = slice(page * PAGE_NBYTES, (page + 1) * PAGE_NBYTES)
        content = self._range.tensor[at].clone()
        copy = Extent(page, page + 1, self._file.copy_page())
        try:
            self._map(copy)
        except BaseException:
            self._file.drop(copy.page, copy.page + 1)
            raise
        self._range.tensor[at] = content
        self._put(copy)
        self._file.drop(shared, shared + 1)

    def hold(self, ranges: Sequence[range]) -> PageHold:
        """One more owner of the pages behind byte ranges."""
        with self._file.enter():
            held = [e for first, stop in _pages(ranges) for e in self._within(first, stop)]
            self._forget_own()
            return PageHold(self._file, held)

    def show(self, hold: PageHold) -> None:
        """Have these pages here, shared with whoever holds them: MemoryUnavailable."""
        file = self._file
        with file.enter():
            self._forget_own()
            for wanted in hold.extents:
                for now in list(self._within(wanted.first, wanted.stop)):
                    page = wanted.page + now.first - wanted.first
                    if now.page == page:
                        continue
                    extent = Extent(now.first, now.stop, page)
                    self._map(extent)
                    self._put(extent)
                    file.share(page, page + now.stop - now.first)
                    file.drop(now.page, now.page + now.stop - now.first)

    def discard(self) -> None:
        """Let go of every page; the bytes are zero again: MemoryUnavailable."""
        file = self._file
        with file.enter():
            self._forget_own()
            fresh = file.region(self._num_pages)
            whole = Extent(0, self._num_pages, fresh)
            self._map(whole)
            file.let_go(tuple(self._extents), tuple(self._region))
            self._extents[:] = [whole]
            self._region[0] = fresh

    def close(self) -> None:
        """Let go of every page; tensors that are left read zeros. Idempotent."""
        self._closing()

    def counts(self) -> tuple[int, int]:
        """Bytes of pages held, and of those that others own too."""
        held = shared = 0
        with self._file.enter():
            for extent in self._extents if self._closing.alive else ():
                owners = self._file.owners[extent.page : extent.page + extent.stop - extent.first]
                held += int((owners > 0).sum())
                shared += int((owners > 1).sum())
        return held * PAGE_NBYTES, shared * PAGE_NBYTES

    def _forget_own(self) -> None:
        self._own = []
        self.backed_by_need = True

    def _map(self, extent: Extent) -> None:
        at, nbytes = extent.first * PAGE_NBYTES, (extent.stop - extent.first) * PAGE_NBYTES
        offset = extent.page * PAGE_NBYTES
        self._range.map(at, nbytes, self._file.fd, offset)
        if self.unrolled:
            self._range.map(self.nbytes + at, nbytes, self._file.fd, offset)

    def _within(self, first: int, stop: int) -> Iterator[Extent]:
        for extent in self._extents:
            begin, end = max(first, extent.first), min(stop, extent.stop)
            if begin < end:
                yield Extent(begin, end, extent.page + begin - extent.first)

    def _put(self, new: Extent) -> None:
        kept = [*self._within(0, new.first), new, *self._within(new.stop, self._num_pages)]
        joined: list[Extent] = []
        for extent in kept:
            last = joined[-1] if joined else None
            if last is not None and last.page + last.stop - last.first == extent.page:
                joined[-1] = Extent(last.first, extent.stop, last.page)
            else:
                joined.append(extent)
        self._extents[:] = joined


class MappedArena:
    """The memory of one session; a fork's arena lives in the same file."""

    def __init__(self, file: PageFile | None = None) -> None:
        self._file = PageFile() if file is None else file
        self._spans: list[MappedSpan] = []

    def reserve(self, nbytes: int, *, ring: bool) -> MappedSpan:
        """A span of zero bytes; a ring of whole pages is unrolled."""
        unrolled = ring and nbytes % PAGE_NBYTES == 0
        span = MappedSpan(self._file, nbytes, unrolled=unrolled)
        self._spans.append(span)
        return span

    def fork(self) -> "MappedArena":
        """Memory for a session that shares pages with this one."""
        return MappedArena(self._file)

    def held(self) -> tuple[int, int]:
        """The file, and the bytes of its pages: this session's and its forks'."""
        with self._file.enter():
            return self._file.fd, self._file.held_nbytes

    def release(self) -> None:
        """Let go of every page. Idempotent."""
        for span in self._spans:
            span.close()
        self._spans.clear()


class MappedBackend:
    """Memory files."""

    name = "mapped"
    page_nbytes = PAGE_NBYTES
    ring_page_nbytes = PAGE_NBYTES
    fork = "copies rings, shares the pages of full planes until one side writes"

    def arena(self) -> MappedArena:
        """Memory for one more session."""
        return MappedArena()


def unavailable(device: torch.device) -> str | None:
    """None where this backend works; else why not."""
    return available() if device.type == "cpu" else f"is for the CPU, not for {device.type}"


def _pages(ranges: Sequence[range]) -> Iterator[tuple[int, int]]:
    stop = 0
    for part in ranges:
        first = max(stop, part.start // PAGE_NBYTES)
        stop = max(stop, -(-part.stop // PAGE_NBYTES))
        if first < stop:
            yield first, stop


def _close(
    file: PageFile, extents: list[Extent], region: list[int], addresses: AddressRange
) -> None:
    addresses.detach()
    file.let_go(tuple(extents), tuple(region))
