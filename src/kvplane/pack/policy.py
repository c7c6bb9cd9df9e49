"""Where cuts are taken: everywhere would cost four times the full layers on some models.

prompt     |-------|-------|-------|---.       every `every(groups)`, the last chunk's edge, the end
turn       .......x                            its end
mark()     ....x                               wherever it was called
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvplane.errors import ArgumentError
from kvplane.geometry import LayerGroup
from kvplane.pack.limits import BLOCK

EVERY_LEAST = 2048
EVERY_WINDOWS = 4


class Crossed(NamedTuple):
    """Wished cuts inside a step: those whose rows are kept, and those left out."""

    taken: tuple[int, ...]
    left_out: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which cuts are wished.

    Args:
        prompt_end: of a prompt: at the last multiple of the chunk, and at the end itself.
        turn_end: when a turn was said.
        marks: at every `Session.mark()`.
        every: tokens between cuts of a long prompt; None: `every(groups)`; 0: none on the way.

    Raises:
        ArgumentError: `every` is negative or no multiple of a block.
    """

    prompt_end: bool = True
    turn_end: bool = True
    marks: bool = True
    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and (self.every < 0 or self.every % BLOCK):
            expected = f"a multiple of {BLOCK}, or 0"
            raise ArgumentError(argument="every", expected=expected, got=self.every)

    def prompt_cuts(
        self, first: int, stop: int, groups: Sequence[LayerGroup], *, chunk: int
    ) -> list[int]:
        """Where cuts are taken while positions [first, stop) of a prompt are read."""
        step = every(groups) if self.every is None else self.every
        wished = set(range(first - first % step + step, stop, step)) if step else set()
        if self.prompt_end:
            wished |= {stop - stop % chunk, stop}
        return sorted(cut for cut in wished if first < cut <= stop)

    def turn_cuts(self, position: int, marks: Collection[int]) -> list[int]:
        """Where cuts are taken when a turn has ended at a position."""
        wished = {mark for mark in marks if mark <= position} if self.marks else set()
        if self.turn_end:
            wished.add(position)
        return sorted(cut for cut in wished if cut > 0)


def every(groups: Sequence[LayerGroup]) -> int:
    """Between cuts of a long prompt: max(2048, 4 x largest window), rounded up to blocks."""
    largest = max((group.sliding_window or 0 for group in groups), default=0)
    return -(-max(EVERY_LEAST, EVERY_WINDOWS * largest) // BLOCK) * BLOCK


def wished_cuts(first: int, stop: int, groups: Sequence[LayerGroup], *, chunk: int) -> list[int]:
    """Where cuts are taken while positions [first, stop) of a prompt are read, by default."""
    return Policy().prompt_cuts(first, stop, groups, chunk=chunk)


def crossed(cuts: Collection[int], first: int, stop: int, *, allowed: int = 1) -> Crossed:
    """What a step over [first, stop) keeps of the wished cuts inside it: the deepest.

    A cut at `stop` needs nothing kept: its rows are in the planes afterwards.

    Args:
        cuts: wished positions.
        first: position.
        stop: position.
        allowed: cuts inside one step; each takes `window - 1` rows of every sliding layer.
    """
    inside = sorted(cut for cut in cuts if first < cut < stop)
    taken = inside[max(0, len(inside) - allowed) :]
    return Crossed(tuple(taken), tuple(inside[: len(inside) - len(taken)]))
