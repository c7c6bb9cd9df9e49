"""What one step does to the rows of one layer group, and how it is taken back.

Reserving is arithmetic on a copy of the cursor; rows change only in `flush`.

    positions        lost          kept                     the step's own
    before    |  ol ........ first-(W-1) .............. first
    after               overwritten, journalled  |  held  |  first .............. stop

Of the rows a step overwrites, those in [first - (W-1), first) are still needed should it not be
kept: they are copied to the journal just before. With n <= 1 + slack there are none. A chunk that
overwrites such rows, or is longer than the ring, waits until the next layer is written, so that
its own queries can read the old window (the chapter's section 15.9: no staging of the ring).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from kvplane.errors import LayerRepeated, TensorMismatch
from kvplane.geometry import LayerGroup, ModelGeometry
from kvplane.memory.heap import scratch
from kvplane.plane import Plane
from kvplane.ring import RingCursor, Source

KeyValue = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Saved:
    """Rows of one layer kept beside its plane: positions [first, first + rows)."""

    first: int
    key: Tensor
    value: Tensor

    def slice(self, first: int, stop: int) -> KeyValue:
        """Rows of positions [first, stop)."""
        offset, count = first - self.first, stop - first
        return self.key.narrow(1, offset, count), self.value.narrow(1, offset, count)

    @property
    def stop(self) -> int:
        """One past the last position kept."""
        return self.first + self.key.shape[1]


@dataclass(slots=True)
class GroupStep:
    """One layer group's part in a step over positions [first, stop).

    Args:
        group: the layers and their window.
        before: the committed cursor; never changed here.
        first_position: where the session began: nothing older is ever needed.
        num_tokens: tokens of the step.
        keep_unstored: also keep what a chunk longer than the ring never stores (speculative).
        keep_all: keep every row that is overwritten, for rewinds over several steps (recording).

    Attributes:
        after: the cursor when all tokens are kept.
        source: which of the tokens are live then.
        rows: the rows they take, in logical order.
        lost: positions that are still needed should the step not be kept, and overwritten by it.
        journalled: positions whose rows are copied aside before they are overwritten: `lost`, or
            everything that goes when the session records.
        oldest_visible: the oldest position that the step's first token sees, if it has any.
        waits: whether the chunk must wait until its queries have read the old window.
        row: the one row that a token takes, when nothing of the plane must be kept for it.
        stored: whether any row of the group may have changed.
    """

    group: LayerGroup
    before: RingCursor
    first_position: int
    num_tokens: int
    keep_unstored: bool
    keep_all: bool = False
    after: RingCursor = field(init=False)
    source: Source = field(init=False)
    lost: range = field(init=False)
    journalled: range = field(init=False)
    waits: bool = field(init=False)
    rows: list[range] = field(init=False)
    oldest_visible: int = field(init=False)
    row: int | None = field(init=False, default=None)
    stored: bool = field(init=False, default=False)
    _saved: dict[int, list[Saved]] = field(init=False, default_factory=dict)
    _visible: dict[bool, list[range]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        first = self.before.next_position
        self.after = self.before.copy()
        self.source = self.after.append_batch(first, self.num_tokens)
        needed = self.oldest_visible = self.oldest_needed(first)
        self.lost = range(needed, min(first, self.after.origin_logical))
        self.journalled = self.lost
        if self.keep_all:
            gone = min(first, self.after.origin_logical)
            self.journalled = range(self.before.origin_logical, gone)
            self.keep_unstored = True
        self.waits = len(self.lost) > 0 or self.source.source_first > 0
        self.rows = self.after.rows_of(first + self.source.source_first, self.after.next_position)
        if self.num_tokens == 1 and not self.journalled:
            self.row = self.rows[0].start

    @property
    def first(self) -> int:
        """The step's first position."""
        return self.before.next_position

    def oldest_needed(self, position: int) -> int:
        """The oldest position that a token at `position` sees beside itself."""
        if self.group.sliding_window is None:
            return self.first_position
        return max(self.first_position, position - (self.group.sliding_window - 1))

    def visible(self, *, stored: bool) -> list[range]:
        """Rows that the step's tokens see, in logical order, with their own when `stored`."""
        runs = self._visible.get(stored)
        if runs is None:
            cursor = self.after if stored else self.before
            runs = cursor.rows_of(self.oldest_visible, cursor.next_position)
            self._visible[stored] = runs
        return runs

    @property
    def journal_rows(self) -> int:
        """Rows a layer keeps beside its plane while the step is open."""
        return len(self.journalled) + (self.source.source_first if self.keep_unstored else 0)

    def flush(self, layer: int, plane: Plane, key: Tensor, value: Tensor) -> None:
        """Write a layer's rounded rows, `[batch, tokens, kv_head, dim]`, into its plane."""
        if self.journal_rows:
            # committed to the journal before any row changes: an interrupted store can be undone.
            # one that is tried again finds the old rows here, no longer in the plane
            saved = [rows for rows in self._saved.get(layer, ()) if rows.first < self.first]
            if self.journalled and not saved:
                runs = self.before.rows_of(self.journalled.start, self.journalled.stop)
                saved.append(Saved(self.journalled.start, *_aside(plane.spans(runs))))
            if self.keep_unstored and self.source.source_first:
                unstored = self.source.source_first
                saved.append(Saved(self.first, *_aside([(key[:, :unstored], value[:, :unstored])])))
            self._saved[layer] = saved
        self.stored = True
        first, count = self.source
        if first:
            key, value = key.narrow(1, first, count), value.narrow(1, first, count)
        plane.store(self.rows, key, value)

    def settled(self, accepted: int) -> RingCursor:
        """The cursor when `accepted` of the step's tokens are kept; rows are not touched.

        The live range may be shorter than before: what the step overwrote outside the window is
        gone. It always holds what the position needs.
        """
        if accepted == self.num_tokens:
            return self.after.copy()
        cursor = self.before.copy()
        if not self.stored:
            return cursor
        # old rows are held from where the journal begins, or else from where the ring does
        held = self.journalled
        oldest = held.start if held else min(self.after.origin_logical, self.first)
        cursor.keep(oldest, self.first)
        if accepted:
            cursor.append_batch(self.first, accepted)
        return cursor

    def put_back(self, layer: int, plane: Plane, settled: RingCursor) -> None:
        """Write the saved rows that `settled` holds back where they were."""
        for saved in self._saved.get(layer, ()):
            first = max(saved.first, settled.origin_logical)
            stop = min(saved.stop, settled.next_position)
            if first < stop:
                plane.store(settled.rows_of(first, stop), *saved.slice(first, stop))

    def outlived(self, layer: int, settled: RingCursor) -> list[Saved]:
        """The saved rows that `settled` no longer holds, oldest first."""
        kept = []
        for saved in self._saved.get(layer, ()):
            stop = min(saved.stop, settled.origin_logical)
            if saved.first < stop:
                kept.append(Saved(saved.first, *saved.slice(saved.first, stop)))
        return kept

    def captured(self, cut: int, plane: Plane, key: Tensor, value: Tensor) -> KeyValue:
        """Copies of the rows [max(first_position, cut - (W-1)), cut), before the chunk is stored.

        Args:
            cut: a position inside the step.
            plane: the layer's, still with its old window.
            key: the step's rounded keys.
            value: the step's rounded values.
        """
        first = self.oldest_needed(cut)
        parts = (
            [plane.copy_of(self.before.rows_of(first, self.first))] if first < self.first else []
        )
        begin = max(first, self.first) - self.first
        count = cut - self.first - begin
        parts.append((key.narrow(1, begin, count), value.narrow(1, begin, count)))
        return joined(parts)


def refuse_layer(geometry: ModelGeometry, layer: int) -> NoReturn:
    """Say why a layer's rows cannot be written: LayerRepeated, or TensorMismatch when it has none.

    A layer that is not in the geometry: ArgumentError.
    """
    owner = geometry.owner(layer)
    if owner != layer:
        expected = f"none: the layer shares the rows of layer {owner}"
        raise TensorMismatch(layer=layer, what="key", expected=expected, got="a tensor")
    # every other layer there is has a plane
    raise LayerRepeated(layer=layer)


def _aside(parts: Sequence[KeyValue]) -> KeyValue:
    """Copies that are let go with the step."""
    keys, values = [key for key, _ in parts], [value for _, value in parts]
    rows = sum(key.shape[1] for key in keys)
    key = scratch(keys[0], (keys[0].shape[0], rows, *keys[0].shape[2:]))
    value = scratch(values[0], (values[0].shape[0], rows, *values[0].shape[2:]))
    return torch.cat(keys, dim=1, out=key), torch.cat(values, dim=1, out=value)


def joined(parts: Sequence[KeyValue]) -> KeyValue:
    """One fresh key and one fresh value tensor of several, along the rows."""
    keys = torch.cat([key for key, _ in parts], dim=-3)
    return keys, torch.cat([value for _, value in parts], dim=-3)
