"""The canonical schedule: in which calls a prompt is read, so that cold and warm runs agree.

A model's own matrix products depend on the shape of a call. Chunks of exactly `chunk` tokens on its
multiples, the rest once: the rows of whole chunks then do not depend on what follows, and a run
that starts from rows of such chunks makes the calls that a cold run makes.
"""

from collections.abc import Iterator

from kvplane.errors import ArgumentError

CHUNK = 256


def canonical(first: int, stop: int, *, chunk: int = CHUNK) -> Iterator[range]:
    """The calls that read positions [first, stop): each ends on a multiple of chunk, or at stop.

    Raises:
        ArgumentError: a negative range or chunk.
    """
    if chunk < 1 or first < 0 or stop < first:
        raise ArgumentError(
            argument="schedule", expected="0 <= first <= stop, chunk >= 1", got=(first, stop, chunk)
        )
    while first < stop:
        end = min(stop, first - first % chunk + chunk)
        yield range(first, end)
        first = end
