"""Norms of keys and values by layer and position, summed into a few columns as blobs go by.

positions   0 ................................................ position
columns     |   0   |   1   |   2   |   3   | ...  at most COLUMNS of equal width
cell        mean over its rows and heads of the Euclidean norm; none where no row is held
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 256
SIDES = ("key", "value")


class Sum(NamedTuple):
    """Norms of one layer's keys or values that fall into one column."""

    what: str
    layer: int
    column: int
    total: float
    num_rows: int


class Heat:
    """Sums of norms by layer and column.

    Args:
        layers: that own rows, ascending.
        position: the columns cover [0, position).
    """

    def __init__(self, layers: Sequence[int], position: int) -> None:
        self.layers = tuple(layers)
        self.width = max(1, -(-position // COLUMNS))
        self.num_columns = -(-position // self.width)
        self._cells: dict[tuple[str, int, int], tuple[float, int]] = {}

    def sums(self, rows: Mapping[str, Tensor], first: int) -> Iterator[Sum]:
        """What a blob's rows add; any thread may ask.

        Args:
            rows: by tensor name, `[rows, kv_heads, dim]`.
            first: position of the first row.
        """
        for name, tensor in rows.items():
            _, layer, what = name.split(".")
            norms = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32).mean(dim=-1)
            for column, part in self._parts(norms, first):
                # a row that is not finite is left out: it would take the whole cell with it
                good = part[torch.isfinite(part)]
                yield Sum(what, int(layer), column, float(good.sum()), good.numel())

    def add(self, found: Sum) -> None:
        """Count a sum in; one thread at a time."""
        place = found.what, found.layer, found.column
        total, count = self._cells.get(place, (0.0, 0))
        self._cells[place] = total + found.total, count + found.num_rows

    def cells(self, what: str, layer: int) -> list[float | None]:
        """A layer's mean norms by column; None where no row is held."""
        found = [
            self._cells.get((what, layer, column), (0.0, 0)) for column in range(self.num_columns)
        ]
        return [total / count if count else None for total, count in found]

    def _parts(self, norms: Tensor, first: int) -> Iterator[tuple[int, Tensor]]:
        at, stop = first, first + norms.shape[0]
        while at < stop:
            column = at // self.width
            end = min(stop, (column + 1) * self.width)
            yield column, norms[at - first : end - first]
            at = end
