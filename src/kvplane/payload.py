"""What leaves a store, as arithmetic: the rows of a handoff, of saved sessions and of cuts.

cut    a position at which a session can be resumed: full rows [0, cut) and, per sliding group,
       rows [max(0, cut - (window - 1)), cut)
"""

from dataclasses import dataclass

from kvplane.errors import ArgumentError
from kvplane.geometry import ModelGeometry

BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Bytes of rows that go together.

    Args:
        full: of full layers.
        sliding: of sliding layers.
    """

    full: int
    sliding: int

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return self.full + self.sliding


def handoff(geometry: ModelGeometry, position: int, *, cut: int = 0) -> Payload:
    """The rows that a session at `position` sends to a receiver that holds its prefix [0, cut).

    The receiver runs the last prompt token itself, so `position` is one less than the prompt. Full
    layers send [cut, position), sliding layers [max(cut, position - window), position): the whole
    ring once that many tokens follow the cut (the chapter's section 15.7).

    Raises:
        ArgumentError: `cut` is neither 0 nor a multiple of 256, or not below `position`.
    """
    if type(position) is not int or position < 1:
        raise ArgumentError(argument="position", expected="at least 1", got=position)
    if type(cut) is not int or not 0 <= cut < position or cut % BLOCK:
        expected = f"a multiple of {BLOCK} within [0, {position})"
        raise ArgumentError(argument="cut", expected=expected, got=cut)
    num_tokens = position - cut
    return Payload(full=_full(geometry, num_tokens), sliding=_sliding(geometry, num_tokens))


def saved_session(geometry: ModelGeometry, position: int, *, slack: int = 0) -> Payload:
    """The rows of a saved session: everything live, slack included; file headers come on top.

    Raises:
        ArgumentError: `position` or `slack` is negative.
    """
    _check_position(position)
    if type(slack) is not int or slack < 0:
        raise ArgumentError(argument="slack", expected="at least 0", got=slack)
    return Payload(
        full=_full(geometry, position), sliding=_sliding(geometry, position, beyond=slack)
    )


def cut_every(geometry: ModelGeometry) -> int:
    """Tokens between the cuts that a pack takes by itself: max(2048, 4 x largest window)."""
    windows = [group.sliding_window for group in geometry.groups if group.sliding_window]
    return -(-max([2048, *(4 * window for window in windows)]) // BLOCK) * BLOCK


def cut_positions(geometry: ModelGeometry, position: int) -> list[int]:
    """Where a prompt of `position` tokens is cut: regularly, at its last block, and at its end.

    Raises:
        ArgumentError: `position` is negative.
    """
    _check_position(position)
    every = cut_every(geometry)
    ends = {position, position - position % BLOCK}
    return sorted({*range(every, position, every), *ends} - {0})


def published(geometry: ModelGeometry, position: int) -> Payload:
    """The rows of a published prompt: full layers once, sliding layers at each of its cuts.

    Raises:
        ArgumentError: `position` is negative.
    """
    cuts = cut_positions(geometry, position)
    return Payload(
        full=_full(geometry, position),
        sliding=sum(_sliding(geometry, cut, beyond=-1) for cut in cuts),
    )


def _full(geometry: ModelGeometry, num_tokens: int) -> int:
    """Bytes of the full layers' rows of so many tokens."""
    return sum(
        num_tokens * group.row_nbytes * len(group.layers)
        for group in geometry.groups
        if group.sliding_window is None
    )


def _sliding(geometry: ModelGeometry, num_tokens: int, *, beyond: int = 0) -> int:
    """Bytes of the sliding layers' rows of the newest tokens: a window and `beyond` at most."""
    return sum(
        min(num_tokens, group.sliding_window + beyond) * group.row_nbytes * len(group.layers)
        for group in geometry.groups
        if group.sliding_window is not None
    )


def _check_position(position: int) -> None:
    if type(position) is not int or position < 0:
        raise ArgumentError(argument="position", expected="at least 0", got=position)
