"""What a session knows about its own rows: who made them, and which blobs already hold them.

Plain data, no tensors and no files: the store keeps it in step with the positions (a rewind cuts
it, a fork copies it), packs read and extend it.

    canonical   the rows [0, canonical) were made in steps of exactly `chunk` tokens on its
                multiples by one numerics: a cold run on that schedule has the same bits
    numerics    runs (stop, numerics): the rows up to `stop` were made by that numerics
    spans       by layer group: (first, stop, blob), positions already written or loaded
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

Numerics = Mapping[str, Any]


class Span(NamedTuple):
    """Positions [first, stop) of a layer group, held by the blob of that name."""

    first: int
    stop: int
    blob: str


@dataclass(slots=True)
class Ledger:
    """The provenance of one session's rows.

    Args:
        first_position: where the session began.
        canonical: end of the rows made on the canonical schedule.
        numerics: (stop, numerics) runs, ascending; the last stop is the session's position.
        spans: by group id, ascending, without overlap.
    """

    first_position: int = 0
    canonical: int = 0
    numerics: list[tuple[int, Numerics]] = field(default_factory=list)
    spans: dict[str, list[Span]] = field(default_factory=dict)

    def record(self, first: int, stop: int, numerics: Numerics) -> None:
        """Note that a step wrote positions [first, stop) with `numerics`."""
        chunk = int(numerics["chunk"])
        on_schedule = (
            self.canonical == first
            and self.first_position == 0
            and first % chunk == 0
            and stop - first == chunk
            and all(run == numerics for _, run in self.numerics)
        )
        if on_schedule:
            self.canonical = stop
        if self.numerics and self.numerics[-1][1] == numerics:
            self.numerics[-1] = (stop, numerics)
        else:
            self.numerics.append((stop, numerics))

    def cut(self, position: int) -> None:
        """Forget everything at and above `position`."""
        if self.canonical > position:
            # only whole chunks are canonical
            chunk = int(self.numerics[0][1]["chunk"])
            self.canonical = position - position % chunk
        kept = []
        begin = self.first_position
        for stop, numerics in self.numerics:
            if begin >= position:
                break
            kept.append((min(stop, position), numerics))
            begin = stop
        self.numerics = kept
        for group, spans in self.spans.items():
            self.spans[group] = [
                Span(span.first, min(span.stop, position), span.blob)
                for span in spans
                if span.first < position
            ]

    def copy(self) -> Self:
        """An equal ledger of its own."""
        return type(self)(
            first_position=self.first_position,
            canonical=self.canonical,
            numerics=list(self.numerics),
            spans={group: list(spans) for group, spans in self.spans.items()},
        )
