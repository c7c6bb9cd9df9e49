"""Which physical row holds which logical position.

Integers only: no tensors, no devices. A row is never derived from an absolute position
(`position % capacity`): a skipped or replayed position would then silently alias a live row.

    position    index of a token in its session, from 0, unbounded: logical
    row         index of a row in the plane's buffer, in [0, capacity): physical
    live        the positions still held: [origin_logical, origin_logical + length)

The row of a position never changes while a cursor lives: whatever is appended, forgotten or
rewound, `origin_physical - origin_logical` stays the same modulo the capacity.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from kvplane.errors import ArgumentError, CacheDiscontinuity, ContextFull, EvictedPosition


class Source(NamedTuple):
    """Which tokens of a batch are still live after it: [source_first, source_first + count)."""

    source_first: int
    source_count: int


@dataclass(slots=True)
class RingCursor:
    """The two origins of one layer group's planes, and how many of their rows are live.

    A full-attention group uses the same cursor with `capacity >= max_context`: it never fills,
    so it never wraps and the ring is a growing array (the chapter's section 15.5, point 2).

    Args:
        capacity: rows of each plane.
        length: live rows.
        origin_logical: the oldest live position.
        origin_physical: the row that holds it.
        max_context: positions end below it; None for no end. Checked by itself: a capacity
            rounded up admits no further token.

    Raises:
        ArgumentError: numbers that no cursor can have.
    """

    capacity: int
    length: int = 0
    origin_logical: int = 0
    origin_physical: int = 0
    max_context: int | None = None

    def __post_init__(self) -> None:
        for argument in ("capacity", "length", "origin_logical", "origin_physical"):
            _check_whole(argument, getattr(self, argument))
        if self.capacity < 1:
            raise ArgumentError(argument="capacity", expected="at least 1", got=self.capacity)
        if not 0 <= self.length <= self.capacity:
            raise ArgumentError(
                argument="length", expected=f"within [0, {self.capacity}]", got=self.length
            )
        if self.origin_logical < 0:
            raise ArgumentError(
                argument="origin_logical", expected="at least 0", got=self.origin_logical
            )
        if not 0 <= self.origin_physical < self.capacity:
            raise ArgumentError(
                argument="origin_physical",
                expected=f"within [0, {self.capacity})",
                got=self.origin_physical,
            )
        if self.max_context is not None:
            _check_whole("max_context", self.max_context)
            if self.next_position > self.max_context:
                expected = f"at least {self.next_position}, the next position"
                raise ArgumentError(argument="max_context", expected=expected, got=self.max_context)

    @property
    def next_position(self) -> int:
        """The only position `append` accepts."""
        return self.origin_logical + self.length

    @property
    def live(self) -> range:
        """The positions held."""
        return range(self.origin_logical, self.next_position)

    def append(self, position: int) -> int:
        """Reserve the row of the token at `position` (the chapter's section 15.5).

        Returns:
            The row to write, in [0, capacity).

        Raises:
            CacheDiscontinuity: `position` is not the next one. The cursor is unchanged.
            ContextFull: `position` is not below max_context. The cursor is unchanged.
            ArgumentError: `position` is no whole number. The cursor is unchanged.
        """
        self._check(position, 1)
        row = self._row(position)
        self._hold(position + 1)
        return row

    def append_batch(self, first: int, num_tokens: int) -> Source:
        """Reserve rows for positions [first, first + num_tokens).

        Returns:
            Which of the tokens are live afterwards: of a batch longer than the ring only its end.

        Raises:
            CacheDiscontinuity: `first` is not the next position. The cursor is unchanged.
            ContextFull: the batch would pass max_context. The cursor is unchanged.
            ArgumentError: a number is not whole, or `num_tokens` negative. The cursor is unchanged.
        """
        _check_whole("num_tokens", num_tokens)
        if num_tokens < 0:
            raise ArgumentError(argument="num_tokens", expected="at least 0", got=num_tokens)
        self._check(first, num_tokens)
        self._hold(first + num_tokens)
        # a batch longer than the ring leaves its own head behind
        source_count = min(num_tokens, self.capacity)
        return Source(num_tokens - source_count, source_count)

    def row_of(self, position: int) -> int:
        """The row that holds `position`.

        Raises:
            EvictedPosition: `position` is not live.
            ArgumentError: it is no whole number.
        """
        _check_whole("position", position)
        if not self.origin_logical <= position < self.next_position:
            raise EvictedPosition(
                position=position, first=self.origin_logical, stop=self.next_position
            )
        return self._row(position)

    def row_at(self, position: int) -> int:
        """The row of any position, live or not: where it lay, or will lie; ArgumentError."""
        _check_whole("position", position)
        return self._row(position)

    def rows_of(self, first: int, stop: int) -> list[range]:
        """The rows of positions [first, stop), in logical order: one run, two across the seam.

        Raises:
            EvictedPosition: one of the positions is not live; it is named.
            ArgumentError: `stop` lies before `first`.
        """
        _check_whole("first", first)
        _check_whole("stop", stop)
        if stop < first:
            raise ArgumentError(argument="stop", expected=f"at least {first}", got=stop)
        if first == stop:
            return []
        if first < self.origin_logical or stop > self.next_position:
            # the one that is named first
            self.row_of(first)
            self.row_of(stop - 1)
        row = self._row(first)
        before_seam = min(stop - first, self.capacity - row)
        after_seam = stop - first - before_seam
        runs = [range(row, row + before_seam)]
        if after_seam:
            runs.append(range(after_seam))
        return runs

    def keep(self, first: int, stop: int) -> None:
        """Forget all positions but [first, stop); the next position is then `stop`.

        `stop` may lie anywhere when nothing is kept: the rows of later positions are the same as
        ever.

        Raises:
            EvictedPosition: one of the positions to keep is not live. The cursor is unchanged.
            ArgumentError: `stop` lies before `first`, or `first` is negative.
        """
        _check_whole("first", first)
        _check_whole("stop", stop)
        if stop < first or first < 0:
            raise ArgumentError(argument="[first, stop)", expected="a range", got=(first, stop))
        if first < stop:
            self.row_of(first)
            self.row_of(stop - 1)
        self.origin_physical = self._row(first)
        self.origin_logical = first
        self.length = stop - first

    def copy(self) -> Self:
        """An equal cursor of its own."""
        # what is copied was checked when it was made: every step copies each group's cursor
        twin = object.__new__(type(self))
        twin.capacity, twin.length = self.capacity, self.length
        twin.origin_logical, twin.origin_physical = self.origin_logical, self.origin_physical
        twin.max_context = self.max_context
        return twin

    def as_tuple(self) -> tuple[int, int, int, int]:
        """(capacity, length, origin_logical, origin_physical)."""
        return self.capacity, self.length, self.origin_logical, self.origin_physical

    def _check(self, first: int, num_tokens: int) -> None:
        _check_whole("position", first)
        if first != self.next_position:
            raise CacheDiscontinuity(expected=self.next_position, got=first)
        if self.max_context is not None and first + num_tokens > self.max_context:
            raise ContextFull(position=first, num_tokens=num_tokens, max_context=self.max_context)

    def _hold(self, stop: int) -> None:
        # when full, the oldest rows are given up, so both origins move together
        oldest = max(self.origin_logical, stop - self.capacity)
        self.origin_physical = self._row(oldest)
        self.origin_logical = oldest
        self.length = stop - oldest

    def _row(self, position: int) -> int:
        return (self.origin_physical + position - self.origin_logical) % self.capacity


def _check_whole(argument: str, number: int) -> None:
    # True is 1 and 3.0 is 3 to every comparison below
    if type(number) is not int:
        raise ArgumentError(argument=argument, expected="a whole number", got=number)
