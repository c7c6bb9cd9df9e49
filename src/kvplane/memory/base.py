"""Where a plane's bytes live.

A backend hands out one arena a session; an arena hands out spans, one a plane. A span is a range
of bytes that are zero until somebody writes them. Everything above sees a flat uint8 tensor.

    reserve    address space for a plane; no page is held yet where the system can wait
    back       pages for a range about to be written, of one owner
    unrolled   the same pages follow themselves: byte b and byte b + nbytes are one byte
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class Span(Protocol):
    """The bytes of one plane."""

    nbytes: int
    unrolled: bool
    # whether `back` must be called before bytes are written
    backed_by_need: bool

    def tensor(self) -> torch.Tensor:
        """Uint8, [nbytes], or [2 * nbytes] when unrolled; zero where nothing was written.

        The memory lives until the last tensor over it is gone, also after `release`.
        """
        ...

    def back(self, ranges: Sequence[range]) -> None:
        """Make byte ranges writable: their pages exist and have one owner.

        Raises:
            MemoryUnavailable: they cannot be had. Nothing was written.
        """
        ...

    def discard(self) -> None:
        """Give all pages back; the bytes are zero again."""
        ...


class Arena(Protocol):
    """The memory of one session."""

    def reserve(self, nbytes: int, *, ring: bool) -> Span:
        """A span of zero bytes; `ring` asks for an unrolled one where that can be had.

        Raises:
            MemoryUnavailable: it cannot be had.
        """
        ...

    def share(self, span: Span, ranges: Sequence[range]) -> Span | None:
        """A span of this arena that shares pages with another arena's `span`.

        None where pages cannot be shared: the caller copies the rows.
        """
        ...

    def release(self) -> None:
        """Give everything back once no tensor uses it. Idempotent."""
        ...


class Backend(Protocol):
    """A kind of memory."""

    name: str
    page_nbytes: int

    def arena(self) -> Arena:
        """Memory for one more session."""
        ...
