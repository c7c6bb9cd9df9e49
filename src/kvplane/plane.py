"""One layer's keys and values for one session: bytes seen as rows.

    TOKEN_MAJOR (NHD)   [row, sequence, key heads then value heads]: a row is one span of bytes
    HEAD_MAJOR  (HND)   [kv_head, row] for keys, then for values: a head's history is one span

Both are strides over the same shape `[batch, row, kv_head, head_dim]`; whoever reads or writes
rows takes strides and never asks which it is. A plane knows rows, not positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self

import torch
from torch import Tensor

from kvplane.kernels.addressed import addresses_of, put_row
from kvplane.kernels.device import store_of
from kvplane.memory import Hold, Span


class Layout(Enum):
    """How a plane's rows lie in memory."""

    TOKEN_MAJOR = "NHD"  # noqa: S105 - no password
    HEAD_MAJOR = "HND"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneShape:
    """Everything a plane's bytes depend on."""

    batch: int
    capacity: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: torch.dtype
    layout: Layout

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of one sequence, key and value."""
        width = self.num_kv_heads * (self.head_dim + self.value_head_dim)
        return width * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole plane."""
        return self.batch * self.capacity * self.row_nbytes

    def byte_ranges(self, rows: range) -> list[range]:
        """Where the bytes of `rows` lie, as ascending disjoint ranges."""
        if not rows:
            return []
        if self.layout is Layout.TOKEN_MAJOR:
            row_nbytes = self.batch * self.row_nbytes
            return [range(rows.start * row_nbytes, rows.stop * row_nbytes)]
        ranges = []
        key_nbytes = self.batch * self.num_kv_heads * self.capacity * self.head_dim
        for base, dim in ((0, self.head_dim), (key_nbytes, self.value_head_dim)):
            for head in range(self.batch * self.num_kv_heads):
                first = base + (head * self.capacity + rows.start) * dim
                stop = first + len(rows) * dim
                ranges.append(range(first * self.dtype.itemsize, stop * self.dtype.itemsize))
        return ranges


class Plane:
    """Strided key and value tensors over one span of memory.

    Args:
        shape: what the bytes mean.
        span: the bytes; unrolled ones show every row a second time, `capacity` rows further.
    """

    __slots__ = ("_addresses", "_only", "key", "shape", "span", "unrolled", "value")

    key: Tensor
    value: Tensor

    def __init__(self, shape: PlaneShape, span: Span) -> None:
        self.shape = shape
        self.span = span
        self.unrolled = span.unrolled
        self.key, self.value = _rows(span.tensor(), shape, unrolled=span.unrolled)
        self._only = (self.key[0], self.value[0])
        self._addresses = addresses_of(self.key), addresses_of(self.value)

    def runs(self, runs: Sequence[range]) -> Sequence[range]:
        """The same rows in as few runs as this memory shows them: one when it is unrolled."""
        if self.unrolled and len(runs) == 2:  # noqa: PLR2004 - one before the seam, one after
            return [range(runs[0].start, runs[0].stop + len(runs[1]))]
        return runs

    def back(self, run: range) -> None:
        """Make rows writable: MemoryUnavailable."""
        if self.span.backed_by_need:
            self.span.back(self.shape.byte_ranges(run))

    def hold(self, runs: Sequence[range]) -> Hold | None:
        """One more owner of the pages behind rows; None where pages cannot be shared."""
        return self.span.hold(self._byte_ranges(runs))

    def share(self, source: Self, runs: Sequence[range]) -> bool:
        """Have rows of a plane of the same shape by sharing their pages, if that can be.

        Raises:
            MemoryUnavailable: no further mapping can be had.
        """
        return self.span.share(source.span, self._byte_ranges(runs))

    def _byte_ranges(self, runs: Sequence[range]) -> list[range]:
        ranges = [part for run in runs for part in self.shape.byte_ranges(run)]
        return sorted(ranges, key=lambda part: part.start)

    def put(self, row: int, key: Tensor, value: Tensor) -> bool:
        """Copy one token, `[..., 1, kv_head, dim]`, into a row where that is quicker by address.

        Returns:
            Whether both were copied; when not, `store` is to be called.
        """
        of_key, of_value = self._addresses
        return (
            of_key is not None
            and of_value is not None
            and put_row(of_key, row, key)
            and put_row(of_value, row, value)
        )

    def store(self, runs: Sequence[range], key: Tensor, value: Tensor) -> None:
        """Copy `[batch, tokens, kv_head, dim]` into rows, in the order of `runs`."""
        store_of(self.key.device.type)(self, self.runs(runs), key, value)

    def spans(self, runs: Sequence[range]) -> list[tuple[Tensor, Tensor]]:
        """Views of the rows, `[batch, rows, kv_head, dim]`, one for each run this memory needs."""
        return [
            (self.key.narrow(1, run.start, len(run)), self.value.narrow(1, run.start, len(run)))
            for run in self.runs(runs)
        ]

    def only_spans(self, runs: Sequence[range]) -> list[tuple[Tensor, Tensor]]:
        """The same without the batch axis, of a plane with one sequence."""
        key, value = self._only
        rows = [slice(run.start, run.stop) for run in self.runs(runs)]
        return [(key[part], value[part]) for part in rows]

    def copy_of(self, runs: Sequence[range]) -> tuple[Tensor, Tensor]:
        """The rows as fresh token-major tensors, in the order of `runs`."""
        parts = self.spans(runs)
        if not parts:
            return self.key[:, :0].clone(), self.value[:, :0].clone()
        return (
            torch.cat([key for key, _ in parts], dim=1),
            torch.cat([value for _, value in parts], dim=1),
        )


def _rows(flat: Tensor, shape: PlaneShape, *, unrolled: bool) -> tuple[Tensor, Tensor]:
    elements = flat.view(shape.dtype)
    heads, dim, value_dim = shape.num_kv_heads, shape.head_dim, shape.value_head_dim
    rows = shape.capacity * (2 if unrolled else 1)
    if shape.layout is Layout.TOKEN_MAJOR:
        width = heads * (dim + value_dim)
        # sequences advance in lockstep, so a row holds all of theirs
        strides = (width, shape.batch * width)
        key = elements.as_strided((shape.batch, rows, heads, dim), (*strides, dim, 1))
        value = elements.as_strided(
            (shape.batch, rows, heads, value_dim), (*strides, value_dim, 1), heads * dim
        )
        return key, value
    tensors = []
    base = 0
    for size in (dim, value_dim):
        head = shape.capacity * size
        tensors.append(
            elements.as_strided(
                (shape.batch, rows, heads, size), (heads * head, size, head, 1), base
            )
        )
        base += shape.batch * heads * head
    return tensors[0], tensors[1]
