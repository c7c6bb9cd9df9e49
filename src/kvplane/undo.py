"""Rows that steps have overwritten, kept so that a rewind may go back over several of them.

While a session records, each ring's lost rows pile up here, at most a window of them a layer; a
rewind puts back what it needs. Assisted decoding asks for it: several single tokens, then one
rejection of them all.
"""

from kvplane.geometry import LayerGroup
from kvplane.journal import Saved
from kvplane.plane import Plane
from kvplane.ring import RingCursor


class Undo:
    """By layer: the rows just below its ring's oldest live position, as far back as they go."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Saved]] = {}

    def add(self, layer: int, saved: list[Saved], group: LayerGroup) -> None:
        """Keep rows that left the ring, and let go of what no rewind can need."""
        rows = self._rows.setdefault(layer, [])
        rows.extend(saved)
        window = group.sliding_window or 1
        while len(rows) > 1 and rows[-1].stop - rows[0].stop >= window - 1:
            del rows[0]

    def oldest(self, layer: int, origin_logical: int) -> int:
        """The oldest position that can be put back below a ring that begins at origin_logical."""
        oldest = origin_logical
        for saved in reversed(self._rows.get(layer, ())):
            if saved.stop < oldest:
                break
            oldest = min(oldest, saved.first)
        return oldest

    def put_back(self, layer: int, plane: Plane, cursor: RingCursor) -> None:
        """Write the rows that a rewound cursor holds, and forget those from its end on."""
        kept = []
        for saved in self._rows.get(layer, ()):
            first = max(saved.first, cursor.origin_logical)
            stop = min(saved.stop, cursor.next_position)
            if first < stop:
                plane.store(cursor.rows_of(first, stop), *saved.slice(first, stop))
            below = min(saved.stop, cursor.origin_logical)
            if saved.first < below:
                kept.append(Saved(saved.first, *saved.slice(saved.first, below)))
        self._rows[layer] = kept

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        rows = [saved for layer in self._rows.values() for saved in layer]
        return sum(saved.key.nbytes + saved.value.nbytes for saved in rows)
