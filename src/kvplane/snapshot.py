"""Detached copies of a session's rows: immutable, complete, with the rotation as a field.

Attention that scans rows in physical order sums in that order, so where the rows lay is part of
the data (the chapter's section 15.6).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvplane.geometry import ModelGeometry

Cursor = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A session at one position; `KVStore.restore` makes sessions of it.

    Args:
        geometry: the model's.
        dtype: of the rows.
        position: the next position.
        first_position: where the session began.
        batch: sequences in lockstep, or None for an ordinary session.
        tokens: ids, one list a sequence, when the session remembered them.
        cursors: by group id: (capacity, length, origin_logical, origin_physical).
        rows: by layer: key and value of the live positions, oldest first,
            `[batch, length, kv_head, dim]`. Read-only: write to a copy.
        numerics: who made the rows.
    """

    geometry: ModelGeometry
    dtype: torch.dtype
    position: int
    first_position: int
    batch: int | None
    tokens: tuple[tuple[int, ...], ...] | None
    cursors: Mapping[str, Cursor]
    rows: Mapping[int, tuple[Tensor, Tensor]]
    numerics: tuple[tuple[int, Mapping[str, Any]], ...]
    canonical: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(key.nbytes + value.nbytes for key, value in self.rows.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The sliding rows that resuming at `position` needs, copied as a step crossed it.

    Args:
        position: the cut.
        rows: by sliding layer: key and value of positions [max(0, cut - (window - 1)), cut),
            `[batch, rows, kv_head, dim]`.
    """

    position: int
    rows: Mapping[int, tuple[Tensor, Tensor]]
