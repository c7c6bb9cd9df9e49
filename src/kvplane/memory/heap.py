"""Zero-filled memory of the process: any device, any system.

On the CPU a span is an anonymous private mapping: the system gives its pages, zeroed, as they are
touched, and takes them back at once when the span goes, so what is held is what was written. On
other devices it is one zero-filled tensor.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

from kvplane.errors import MemoryUnavailable
from kvplane.memory.base import Hold, Span

LARGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def _large_page_nbytes() -> int | None:
    try:
        return int(LARGE_PAGE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


LARGE_PAGE_NBYTES = _large_page_nbytes() if hasattr(mmap, "MADV_HUGEPAGE") else None
# below it a mapping costs more than what the allocator keeps of a block that was let go
SCRATCH_NBYTES = 128 * 1024


class HeapSpan:
    """One plane's bytes in an anonymous mapping, or in a tensor of another device."""

    unrolled = False
    backed_by_need = False

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._mapping: mmap.mmap | None = None
        self._offset = 0
        try:
            if device.type == "cpu" and hasattr(mmap, "MAP_ANONYMOUS"):
                self._mapping, self._offset = _lazy_zeros(nbytes, align=LARGE_PAGE_NBYTES)
                self._tensor = torch.frombuffer(
                    self._mapping, dtype=torch.uint8, offset=self._offset, count=nbytes
                )
            else:
                self._tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        except (OSError, ValueError, RuntimeError, OverflowError) as error:
            message = f"{nbytes} bytes on {device} cannot be had: {error}"
            raise MemoryUnavailable(message) from error

    def tensor(self) -> torch.Tensor:
        """Uint8, [nbytes]."""
        return self._tensor

    def back(self, ranges: Sequence[range]) -> None:
        """Ask for large pages where whole ones are about to be written: nothing more is held.

        Pages come as they are touched, 4 KiB at a time, which costs more than a copy of the rows;
        a large one costs as much as its zeros. Where there are none, nothing is lost.
        """
        if self._mapping is None or LARGE_PAGE_NBYTES is None:
            return
        base = self._tensor.data_ptr()
        for part in ranges:
            first = -(-(base + part.start) // LARGE_PAGE_NBYTES) * LARGE_PAGE_NBYTES - base
            stop = (base + part.stop) // LARGE_PAGE_NBYTES * LARGE_PAGE_NBYTES - base
            if first < stop:
                with contextlib.suppress(OSError):
                    self._mapping.madvise(mmap.MADV_HUGEPAGE, self._offset + first, stop - first)

    def hold(self, ranges: Sequence[range]) -> Hold | None:
        """None: the heap shares no pages."""
        del ranges
        return None

    def show(self, hold: Hold) -> None:
        """Never called: there are no holds."""

    def share(self, source: Span, ranges: Sequence[range]) -> bool:
        """False: the heap shares no pages."""
        del source, ranges
        return False

    def counts(self) -> tuple[int, int] | None:
        """None: the system does not say which pages were touched."""
        return None

    def discard(self) -> None:
        """Zero everything, and let the system have the pages."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)
        else:
            self._tensor.zero_()


class HeapArena:
    """Spans that share nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reserve(self, nbytes: int, *, ring: bool) -> Span:
        """A zero-filled span; a ring is not unrolled here."""
        del ring
        return HeapSpan(nbytes, self._device)

    def fork(self) -> "HeapArena":
        """Memory for a fork: as for any session."""
        return HeapArena(self._device)

    def held(self) -> tuple[int, int] | None:
        """None: the system does not say which pages were touched."""
        return None

    def release(self) -> None:
        """Nothing to do: a span goes with its last tensor."""


class HeapBackend:
    """Zero-filled tensors.

    Args:
        device: where they live.
    """

    name = "heap"
    ring_page_nbytes = 1
    fork = "copies every row"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # what the system gives at a time; other devices give a whole tensor at once
        self.page_nbytes = mmap.PAGESIZE if device.type == "cpu" else 1

    def arena(self) -> HeapArena:
        """Memory for one more session."""
        return HeapArena(self._device)


def scratch(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Memory for rows that are let go soon, of another tensor's dtype and device; not zeroed.

    A large one is a mapping of its own, which the system has back at once. What is let go to the
    allocator stays with the process: a window a layer, after every chunk.
    """
    nbytes = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or nbytes < SCRATCH_NBYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return like.new_empty(shape)
    try:
        mapping, _ = _lazy_zeros(nbytes, align=None)
    except (OSError, ValueError, OverflowError) as error:
        message = f"{nbytes} bytes for rows kept aside cannot be had: {error}"
        raise MemoryUnavailable(message) from error
    return torch.frombuffer(mapping, dtype=like.dtype).view(shape)


def _lazy_zeros(nbytes: int, *, align: int | None) -> tuple[mmap.mmap, int]:
    """A mapping with room for `nbytes`, and where they begin: at a multiple of `align` if large."""
    spare = 0 if align is None or nbytes < align else align - mmap.PAGESIZE
    mapping = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # a huge page would hold 2 MiB for the first row
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    if not spare or align is None:
        return mapping, 0
    return mapping, -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % align
