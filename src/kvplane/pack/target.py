"""Where loaded rows go: a group's live rows as places in detached planes."""

from collections.abc import Sequence
from typing import NamedTuple

from kvplane.builder import SessionBuilder
from kvplane.geometry import LayerGroup
from kvplane.ledger import Span
from kvplane.pack.copies import Place, Words, copy_in, place_of


class Part(NamedTuple):
    """Rows side by side: in a run of the planes, and in a blob."""

    run: int
    rows: slice
    source: slice


class Target:
    """Where a group's live rows go: writable views of its planes.

    Pages are had here, in one thread, before any reader writes to them.
    """

    def __init__(self, group: LayerGroup, builder: SessionBuilder) -> None:
        self.group = group
        self.live = builder.cursors[group.id].live
        self._places: dict[int, list[tuple[Place, Place]]] = {
            layer: [
                (place_of(key[0]), place_of(value[0]))
                for key, value in builder.rows(layer, self.live.start, self.live.stop)
            ]
            for layer in group.layers
        }

    def parts(self, held: range, first: int, stop: int) -> list[Part]:
        """Positions [first, stop) of a blob that holds `held`: two parts across the ring's seam."""
        parts = []
        base = self.live.start
        for run, (key, _) in enumerate(self._places[self.group.layers[0]]):
            begin, end = max(first, base), min(stop, base + key.shape[0])
            if begin < end:
                rows = slice(begin - base, end - base)
                source = slice(begin - held.start, end - held.start)
                parts.append(Part(run, rows, source))
            base += key.shape[0]
        return parts

    def take(self, layer: int, key: Words, value: Words, parts: Sequence[Part]) -> None:
        """Copy parts of a layer's rows in: `[rows, kv_heads, words]` each."""
        runs = self._places[layer]
        for run, rows, source in parts:
            keys, values = runs[run]
            copy_in(keys[rows], key[source])
            copy_in(values[rows], value[source])


class Task(NamedTuple):
    """Rows [first, stop) of a group, to read out of one blob."""

    target: Target
    span: Span
    first: int
    stop: int


def tasks_of(target: Target, spans: Sequence[Span]) -> list[Task]:
    """What is to be read of a group's blobs: only rows that are live."""
    tasks = []
    for span in spans:
        first, stop = max(span.first, target.live.start), min(span.stop, target.live.stop)
        if first < stop:
            tasks.append(Task(target, span, first, stop))
    return tasks
