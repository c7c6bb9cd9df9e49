"""A group's rows as a strip of pieces over [0, position): held here alone, shared, or not held."""

from typing import NamedTuple

from kvplane.inspect.facts import GroupFacts, Inspection

GAP = "gap"


class Piece(NamedTuple):
    """Neighbouring positions that are alike: "own", "shared" or "gap"."""

    kind: str
    percent: float


Run = tuple[str, int, int]
# a strip is about this many pixels wide
COLUMNS = 512


def blocks_of(part: GroupFacts, found: Inspection) -> list[Piece]:
    """The pieces in the order of positions."""
    position = found.content.state.position
    return [
        Piece(kind, 100 * (stop - first) / position)
        for kind, first, stop in _coarse(_runs(part, found), position)
    ]


def shared_nbytes(part: GroupFacts, found: Inspection) -> int:
    """Bytes of the group's rows in blobs that others name too."""
    users = found.sharing.users
    rows = sum(span.stop - span.first for span in part.spans if users.get(span.blob))
    return rows * part.group.row_nbytes * len(part.group.layers)


def _runs(part: GroupFacts, found: Inspection) -> list[Run]:
    runs: list[Run] = []
    at = 0
    for span in part.spans:
        if span.first > at:
            _join(runs, GAP, at, span.first)
        kind = "shared" if found.sharing.users.get(span.blob) else "own"
        _join(runs, kind, span.first, span.stop)
        at = span.stop
    return runs


def _coarse(runs: list[Run], position: int) -> list[Run]:
    """As many runs as a strip can show: of a column that has several, the largest."""
    if len(runs) <= COLUMNS:
        return runs
    width = -(-position // COLUMNS)
    coarse: list[Run] = []
    shares: dict[str, int] = {}
    column = 0
    for kind, first, stop in runs:
        at = first
        while at < stop:
            end = min(stop, (column + 1) * width)
            shares[kind] = shares.get(kind, 0) + end - at
            at = end
            if at == (column + 1) * width or at == position:
                _join(coarse, max(shares, key=lambda name: shares[name]), column * width, at)
                shares, column = {}, column + 1
    return coarse


def _join(runs: list[Run], kind: str, first: int, stop: int) -> None:
    if runs and runs[-1][0] == kind:
        first = runs.pop()[1]
    runs.append((kind, first, stop))
