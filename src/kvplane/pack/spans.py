"""Which blobs name a range of rows, and which pieces are still to be put; arithmetic only.

known      |--A--|--B--|     |-C-|
wanted        [ first ............... stop )
planned       |A|--B--| put |-C-| put |          pieces end at blocks' edges
"""

from collections.abc import Iterator, Sequence

from kvplane.ledger import Span
from kvplane.pack.limits import BLOCK, ROUND_DOWN


def planned(known: Sequence[Span], first: int, stop: int) -> list[Span | range]:
    """Positions [first, stop) as spans that are stored already and pieces that are not.

    Args:
        known: stored spans, ascending, without overlap.
        first: position.
        stop: position.
    """
    parts: list[Span | range] = []
    at = first
    for span in known:
        begin, end = max(at, span.first), min(stop, span.stop)
        if begin < end:
            parts += _pieces(at, begin)
            parts.append(Span(begin, end, span.blob))
            at = end
    parts += _pieces(at, stop)
    return parts


def rounded_down(piece: range, known: Sequence[Span], *, oldest: int) -> range:
    """A group's first piece from its block's edge on, when few rows are missing there.

    Neighbouring cuts then share one blob, whose rows each name in part.

    Args:
        piece: inside one block.
        known: stored spans: none of their rows is put twice.
        oldest: the oldest row at hand.
    """
    edge = piece.start - piece.start % BLOCK
    stored = any(span.first < piece.start and span.stop > edge for span in known)
    if piece.start - edge > ROUND_DOWN or oldest > edge or stored:
        return piece
    return range(edge, piece.stop)


def overlapping(known: Sequence[Span], first: int, stop: int) -> list[Span]:
    """The spans that hold some of [first, stop)."""
    return [span for span in known if span.first < stop and span.stop > first]


def _pieces(first: int, stop: int) -> Iterator[range]:
    while first < stop:
        end = min(stop, first - first % BLOCK + BLOCK)
        yield range(first, end)
        first = end
