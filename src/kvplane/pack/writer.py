"""Rows of a session as blobs: what is named already is named again, only the rest is written."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvplane.errors import StorageMissing
from kvplane.geometry import LayerGroup
from kvplane.ledger import Span
from kvplane.pack.blob import blob_name, row_blob, state_blob
from kvplane.pack.documents import GroupRows, State
from kvplane.pack.encoding import digest
from kvplane.pack.limits import BLOCK, ROUND_DOWN
from kvplane.session import Session
from kvplane.storage import Storage

Rows = Sequence[tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Written:
    """What a save or publish did.

    Args:
        blobs_written: blobs that were not there.
        nbytes_written: their bytes.
        blobs_named: blobs that the document names.
    """

    blobs_written: int = 0
    nbytes_written: int = 0
    blobs_named: int = 0
    names: set[str] = field(default_factory=set)


class RowSource:
    """Rows of one sequence of a session, from its planes or from what was captured at a cut."""

    def __init__(
        self,
        session: Session,
        *,
        sequence: int = 0,
        captured: Mapping[int, tuple[Tensor, Tensor]] | None = None,
        cut: int | None = None,
    ) -> None:
        self._session = session
        self._sequence = sequence
        self._captured = captured
        self._cut = cut

    def first_held(self, group: LayerGroup) -> int:
        """The oldest position it has of a group."""
        if self._captured is not None and group.is_sliding and self._cut is not None:
            return self._cut - self._captured[group.layers[0]][0].shape[1]
        return self._session.cursors[group.id].origin_logical

    def rows(self, layer: int, first: int, stop: int) -> Rows:
        """Key and value of positions [first, stop), `[rows, kv_heads, dim]`, as spans."""
        if self._captured is not None and layer in self._captured and self._cut is not None:
            key, value = self._captured[layer]
            begin = first - (self._cut - key.shape[1])
            count = stop - first
            sequence = self._sequence
            return [
                (
                    key[sequence, begin : begin + count],
                    value[sequence, begin : begin + count],
                )
            ]
        spans = self._session.spans(layer, first, stop)
        if self._session.batch is None:
            return spans
        return [(key[self._sequence], value[self._sequence]) for key, value in spans]


def state_at(
    session: Session,
    storage: Storage,
    *,
    fingerprint: str,
    position: int,
    firsts: Mapping[str, int],
    source: RowSource,
    states: Mapping[str, Tensor] | None = None,
) -> tuple[State, Written]:
    """Put every blob that a state needs, and name them.

    Args:
        session: whose rows; its ledger learns the spans that were written.
        storage: an opened root.
        fingerprint: hex.
        position: the state's.
        firsts: by group id, the oldest row that it needs.
        source: where rows come from.
        states: of recurrent and convolution layers at that position.

    Raises:
        StorageError: something could not be written; nothing names what was.
    """
    written = Written()
    ledger = session.ledger
    groups = {}
    for group in session.groups:
        first = firsts[group.id]
        known = ledger.spans.get(group.id, []) if session.batch is None else []
        spans: list[Span] = []
        for piece in pieces(known, first, position, storage):
            if isinstance(piece, Span):
                spans.append(piece)
            else:
                spans.append(_put(group, piece, source, storage, written))
        if session.batch is None:
            ledger.spans[group.id] = merged(known, spans)
        written.blobs_named += len({span.blob for span in spans})
        groups[group.id] = GroupRows(first=first, spans=tuple(spans))
    name = None
    if states:
        data = state_blob(position, states)
        name = digest(data).hex()
        _store(storage, name, data, written)
    state = State(
        fingerprint=fingerprint,
        position=position,
        groups=groups,
        numerics=numerics_until(session, position),
        canonical=min(ledger.canonical, position - position % _chunk(session)),
        states=name,
    )
    return state, written


def numerics_until(session: Session, position: int) -> tuple[tuple[int, Mapping[str, object]], ...]:
    """Who made the rows below a position."""
    runs = []
    for stop, numerics in session.ledger.numerics:
        runs.append((min(stop, position), dict(numerics)))
        if stop >= position:
            break
    return tuple(runs) if position > session.first_position else ()


def _chunk(session: Session) -> int:
    runs = session.ledger.numerics
    return int(runs[0][1]["chunk"]) if runs else BLOCK


def pieces(
    known: Sequence[Span], first: int, stop: int, storage: Storage
) -> Iterator[Span | range]:
    """[first, stop) as spans that are stored already and ranges inside one block that are not."""
    at = first
    for span in sorted(known):
        begin, end = max(at, span.first), min(stop, span.stop)
        if begin >= end or not storage.exists(blob_name(span.blob)):
            continue
        yield from _blocks(at, begin)
        yield Span(begin, end, span.blob)
        at = end
    yield from _blocks(at, stop)


def _blocks(first: int, stop: int) -> Iterator[range]:
    while first < stop:
        end = min(stop, first - first % BLOCK + BLOCK)
        yield range(first, end)
        first = end


def merged(known: Sequence[Span], new: Sequence[Span]) -> list[Span]:
    """Both, ascending and without overlap; where they overlap the new one counts."""
    kept = list(new)
    for span in known:
        parts = [span]
        for other in new:
            rest = []
            for part in parts:
                if part.first < other.first:
                    rest.append(Span(part.first, min(part.stop, other.first), part.blob))
                if part.stop > other.stop:
                    rest.append(Span(max(part.first, other.stop), part.stop, part.blob))
            parts = [part for part in rest if part.first < part.stop]
        kept += parts
    return sorted(kept)


def _put(
    group: LayerGroup, piece: range, source: RowSource, storage: Storage, written: Written
) -> Span:
    first = piece.start
    edge = first - first % BLOCK
    if group.is_sliding and 0 < first - edge <= ROUND_DOWN and source.first_held(group) <= edge:
        # neighbouring cuts then share one blob
        first = edge
    rows = {layer: source.rows(layer, first, piece.stop) for layer in group.layers}
    data = row_blob(group, first, rows)
    name = digest(data).hex()
    _store(storage, name, data, written)
    return Span(piece.start, piece.stop, name)


def _store(storage: Storage, name: str, data: bytearray, written: Written) -> None:
    if storage.put(blob_name(name), data):
        written.blobs_written += 1
        written.nbytes_written += len(data)
    written.names.add(name)


def check_present(storage: Storage, state: State) -> list[str]:
    """Blobs of a state that are gone since they were named."""
    gone = []
    for blob in sorted(state.blobs):
        try:
            storage.size(blob_name(blob))
        except StorageMissing:
            gone.append(blob)
    return gone
