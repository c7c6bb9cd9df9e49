"""Where a plane's bytes live.

A backend hands out one arena a session; an arena hands out spans, one a plane. A span is a range
of bytes that are zero until somebody writes them. Everything above sees a flat uint8 tensor.

    reserve    address space for a plane; no page is held yet where the system can wait
    back       pages for a range about to be written, of one owner
    unrolled   the same pages follow themselves: byte b and byte b + nbytes are one byte
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

# a further owner of some of a span's pages, until it is collected; each backend has its own
Hold = Any


class Span(Protocol):
    """The bytes of one plane."""

    nbytes: int
    unrolled: bool
    # whether `back` must be called before bytes are written; else it is a hint for many at once
    backed_by_need: bool

    def tensor(self) -> torch.Tensor:
        """Uint8, [nbytes], or [2 * nbytes] when unrolled; zero where nothing was written.

        The addresses stay readable until the last tensor over them is gone, also after `close`.
        """
        ...

    def back(self, ranges: Sequence[range]) -> None:
        """Make byte ranges writable: their pages exist and have one owner.

        Raises:
            MemoryUnavailable: they cannot be had. Nothing was written.
        """
        ...

    def hold(self, ranges: Sequence[range]) -> Hold | None:
        """One more owner of the pages behind byte ranges; None where pages cannot be shared."""
        ...

    def show(self, hold: Hold) -> None:
        """Have the held pages here too, shared until one side writes: MemoryUnavailable."""
        ...

    def share(self, source: "Span", ranges: Sequence[range]) -> bool:
        """Have the pages behind another span's byte ranges here too, until one side writes.

        Returns:
            Whether they can be shared; when not, nothing was done.

        Raises:
            MemoryUnavailable: no further mapping can be had; some of them may be there.
        """
        ...

    def discard(self) -> None:
        """Let go of every page; the bytes are zero again: MemoryUnavailable."""
        ...

    def counts(self) -> tuple[int, int] | None:
        """Bytes of pages held, and of those with other owners; None where it cannot be told."""
        ...


class Arena(Protocol):
    """The memory of one session."""

    def reserve(self, nbytes: int, *, ring: bool) -> Span:
        """A span of zero bytes; `ring` asks for an unrolled one where that can be had.

        Raises:
            MemoryUnavailable: it cannot be had.
        """
        ...

    def fork(self) -> "Arena":
        """Memory for a session that may share pages with this one: MemoryUnavailable."""
        ...

    def held(self) -> tuple[int, int] | None:
        """Which memory this is, and the bytes of its pages; None where it cannot be told."""
        ...

    def release(self) -> None:
        """Give everything back. Idempotent."""
        ...


class Backend(Protocol):
    """A kind of memory.

    Attributes:
        page_nbytes: what is given and shared at a time.
        ring_page_nbytes: rings are unrolled where they fill whole pages of this size; 1 where they
            never are.
        fork: what a fork does, for `describe()`.
    """

    name: str
    page_nbytes: int
    ring_page_nbytes: int
    fork: str

    def arena(self) -> Arena:
        """Memory for one more session: MemoryUnavailable."""
        ...
