"""Memory unrolled and shared by the memory unit (Linux).

A ring's pages are mapped twice, back to back: its window is one contiguous span at any rotation.

    addresses   [ page 0 | page 1 | page 2 | page 0 | page 1 | page 2 ]
    window                      [ oldest ... newest ]

A full plane reserves addresses for max_context and takes pages as rows are written. Forks and
checkpoints share pages until one side writes; whoever writes first copies the page first:

    parent      [ a | b | c ]          [ a | b | c ]            [ a | b | c ]
    fork                               [ a | b | c ]  shared    [ a | B | c ]  wrote to b

A copy goes to the same place in a region of the writer's own: neighbours are one mapping.
"""

import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from kvplane.errors import MemoryUnavailable
from kvplane.memory import address
from kvplane.memory.address import PAGE_NBYTES, AddressRange, available
from kvplane.memory.base import Span
from kvplane.memory.pages import Extent, PageFile, Region, runs_of

# pages of a plane that is looked over for others that are its own already
MAX_SCAN_PAGES = 4096


class PageHold:
    """A further owner of some of a span's pages, in a file that the caller has entered."""

    def __init__(self, file: PageFile, extents: Sequence[Extent]) -> None:
        self.file = file
        self.extents = tuple(extents)
        for extent in self.extents:
            file.share(extent.page, extent.page_stop)
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
        self.file = file
        self._num_pages = -(-nbytes // PAGE_NBYTES)
        size = self._num_pages * PAGE_NBYTES
        self._range = AddressRange(2 * size if unrolled else size)
        # by range of `back`: pages known to be there and this span's alone
        self._own: list[range] = []
        # copies that are shown in the first place of a ring and could not be in the second
        self._torn: list[Extent] = []
        with file.enter():
            self._regions = [file.region(self._num_pages)]
            self._extents = [Extent(0, self._num_pages, self._regions[0].first)]
            self._closing = weakref.finalize(
                self, _close, file, self._extents, self._torn, self._regions, self._range
            )
            self._closing.atexit = False
            file.spans.add(self)
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
            with self.file.enter():
                self._take(first, stop)
                self._own[place] = self._alone(first, stop)
        # a ring that has turned once needs nothing any more
        self.backed_by_need = len(self._own[0]) < self._num_pages

    def _take(self, first: int, stop: int) -> None:
        self._mend()
        for extent in list(self._within(first, stop)):
            shared = self.file.owners[extent.page : extent.page_stop] > 1
            for begin, end in runs_of(shared):
                at = extent.first + begin
                self._copy(Extent(at, at + end - begin, extent.page + begin))
        for extent in self._within(first, stop):
            self.file.take(extent.page, extent.page_stop)

    def _alone(self, first: int, stop: int) -> range:
        """The pages around [first, stop), which are this span's alone, that are so too."""
        if self._num_pages > MAX_SCAN_PAGES:
            return range(first, stop)
        owners = [self.file.owners[extent.page : extent.page_stop] for extent in self._extents]
        others = np.flatnonzero(np.concatenate(owners) != 1)
        after = int(np.searchsorted(others, first))
        return range(
            int(others[after - 1]) + 1 if after else 0,
            int(others[after]) if after < len(others) else self._num_pages,
        )

    def _copy(self, shared: Extent) -> None:
        """Put a copy under pages of this span; let go of the shared ones."""
        copy = Extent(shared.first, shared.stop, self._unowned(shared.first, shared.stop))
        self.file.take(copy.page, copy.page_stop)
        # all of it is there before the first page is shown
        content = self._range.bytes[copy.first * PAGE_NBYTES : copy.stop * PAGE_NBYTES]
        address.write(self.file.fd, copy.page * PAGE_NBYTES, content)
        self._map_owned(copy)
        self._put([copy])
        self.file.drop(shared.page, shared.page_stop)

    def _unowned(self, first: int, stop: int) -> int:
        """Where pages [first, stop) of this span can be in one of its regions."""
        for region in self._regions:
            page = region.first + first
            if not self.file.owners[page : page + stop - first].any():
                return page
        self._regions.append(self.file.region(self._num_pages))
        return self._regions[-1].first + first

    def hold(self, ranges: Sequence[range]) -> PageHold:
        """One more owner of the pages behind byte ranges."""
        with self.file.enter():
            return PageHold(self.file, self.lent(ranges))

    def show(self, hold: PageHold) -> None:
        """Have these pages here, shared with whoever holds them: MemoryUnavailable."""
        with self.file.enter():
            self._show(hold.extents)

    def share(self, source: Span, ranges: Sequence[range]) -> bool:
        """Have the pages behind another span's byte ranges here too: MemoryUnavailable."""
        if not isinstance(source, MappedSpan) or source.file is not self.file:
            return False
        with self.file.enter():
            self._show(source.lent(ranges))
        return True

    def lent(self, ranges: Sequence[range]) -> list[Extent]:
        """The pages behind byte ranges, which are not this span's alone from now on."""
        self.forget_own()
        return [
            Extent(extent.first + begin, extent.first + end, extent.page + begin)
            for first, stop in _pages(ranges)
            for extent in self._within(first, stop)
            # what nobody owns may become anybody's
            for begin, end in runs_of(self.file.owners[extent.page : extent.page_stop] > 0)
        ]

    def _show(self, extents: Sequence[Extent]) -> None:
        """Have pages that others own in the place of this span's; ascending."""
        self.forget_own()
        before: list[Extent] = []
        shown: list[Extent] = []
        try:
            for wanted in extents:
                for now in self._within(wanted.first, wanted.stop):
                    page = wanted.page + now.first - wanted.first
                    if now.page != page:
                        then = Extent(now.first, now.stop, page)
                        # an owner too many for a moment, never one too few
                        self.file.share(page, then.page_stop)
                        self._map_owned(then)
                        before.append(now)
                        shown.append(then)
        except BaseException:
            # in reverse, each finds the mappings that it needs
            for now, then in zip(reversed(before), reversed(shown), strict=True):
                self._map_back(now)
                self.file.drop(then.page, then.page_stop)
            raise
        self._put(shown)
        for now in before:
            self.file.drop(now.page, now.page_stop)

    def discard(self) -> None:
        """Let go of every page; the bytes are zero again: MemoryUnavailable."""
        file = self.file
        with file.enter():
            self.forget_own()
            self._mend()
            before = list(self._extents)
            if not all(self._is_alone_here(extent) for extent in before):
                whole = Extent(0, self._num_pages, self._unowned(0, self._num_pages))
                self._map(whole)
                self._extents[:] = [whole]
            for extent in before:
                file.drop(extent.page, extent.page_stop)

    def _is_alone_here(self, extent: Extent) -> bool:
        """Whether its pages are in a region of this span's, where no other has any of them."""
        places = [region.first + extent.first for region in self._regions]
        owners = self.file.owners[extent.page : extent.page_stop]
        return extent.page in places and not (owners > 1).any()

    def close(self) -> None:
        """Let go of every page; tensors left over read zeros. Idempotent."""
        self._closing()

    def counts(self) -> tuple[int, int]:
        """Bytes of pages held, and of those that others own too."""
        held = shared = 0
        with self.file.enter():
            for extent in self._extents if self._closing.alive else ():
                owners = self.file.owners[extent.page : extent.page_stop]
                held += int((owners > 0).sum())
                shared += int((owners > 1).sum())
        return held * PAGE_NBYTES, shared * PAGE_NBYTES

    def forget_own(self) -> None:
        """Look at the owners again before the next page is written."""
        self._own = []
        self.backed_by_need = True

    def _map(self, extent: Extent) -> None:
        """Show pages, in both places of a ring or in neither."""
        at, nbytes = extent.first * PAGE_NBYTES, (extent.stop - extent.first) * PAGE_NBYTES
        offset = extent.page * PAGE_NBYTES
        self._range.map(at, nbytes, self.file.fd, offset)
        if not self.unrolled:
            return
        try:
            self._range.map(self.nbytes + at, nbytes, self.file.fd, offset)
        except BaseException:
            # a copy and what it is of are the same until the next row is written
            self._torn.append(extent)
            self.forget_own()
            with suppress(MemoryUnavailable):
                self._show_again(extent)
                self._torn.remove(extent)
            raise

    def _map_owned(self, extent: Extent) -> None:
        """Show pages, which are owned already, or let go of them: MemoryUnavailable."""
        try:
            self._map(extent)
        except BaseException:
            if extent not in self._torn:
                self.file.drop(extent.page, extent.page_stop)
            raise

    def _show_again(self, extent: Extent) -> None:
        for was in self._within(extent.first, extent.stop):
            self._map_back(was)

    def _mend(self) -> None:
        """Let go of copies that only one place shows: MemoryUnavailable."""
        while self._torn:
            self._show_again(self._torn[-1])
            copy = self._torn.pop()
            self.file.drop(copy.page, copy.page_stop)

    def _map_back(self, extent: Extent) -> None:
        """Show pages again that were shown before."""
        at, nbytes = extent.first * PAGE_NBYTES, (extent.stop - extent.first) * PAGE_NBYTES
        for place in (at, self.nbytes + at) if self.unrolled else (at,):
            self._range.map_back(place, nbytes, self.file.fd, extent.page * PAGE_NBYTES)

    def _within(self, first: int, stop: int) -> Iterator[Extent]:
        place = bisect_right(self._extents, first, key=itemgetter(0)) - 1
        for extent in self._extents[max(0, place) :]:
            begin, end = max(first, extent.first), min(stop, extent.stop)
            if begin < end:
                yield Extent(begin, end, extent.page + begin - extent.first)
            elif extent.first >= stop:
                return

    def _put(self, new: Sequence[Extent]) -> None:
        extents: list[Extent] = []
        stop = 0
        for extent in new:
            extents.extend(self._within(stop, extent.first))
            extents.append(extent)
            stop = extent.stop
        extents.extend(self._within(stop, self._num_pages))
        joined: list[Extent] = []
        for extent in extents:
            last = joined[-1] if joined else None
            if last is not None and last.page_stop == extent.page:
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
    fork = "shares pages until one side writes"

    def arena(self) -> MappedArena:
        """Memory for one more session."""
        return MappedArena()


def unavailable(device: torch.device) -> str | None:
    """None where this backend works; else why not."""
    if device.type != "cpu":
        return f"is for the CPU, not for {device.type}"
    reason = available()
    if reason is None:
        try:
            _try_out()
        except MemoryUnavailable as error:
            reason = f"is refused by the system: {error}"
    return reason


@cache
def _try_out() -> None:
    """One page, shown twice: MemoryUnavailable. What has worked once is not tried again."""
    arena = MappedArena()
    span = arena.reserve(PAGE_NBYTES, ring=True)
    span.back([range(1)])
    span.tensor()[0] = 1
    twice = bool(span.tensor()[PAGE_NBYTES])
    arena.release()
    if not twice:
        message = "one page at two addresses is two"
        raise MemoryUnavailable(message)


def _pages(ranges: Sequence[range]) -> Iterator[tuple[int, int]]:
    stop = 0
    for part in ranges:
        first = max(stop, part.start // PAGE_NBYTES)
        stop = max(stop, -(-part.stop // PAGE_NBYTES))
        if first < stop:
            yield first, stop


def _close(
    file: PageFile,
    extents: list[Extent],
    torn: list[Extent],
    regions: list[Region],
    addresses: AddressRange,
) -> None:
    detached = addresses.detach()
    # pages that a tensor left over may still show are never another plane's
    file.let_go((*extents, *torn), tuple(regions) if detached else ())
