"""Rows of a session as blobs: what is named already is named again, only the rest is written."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from kvplane.errors import PackTooLarge, StorageMissing
from kvplane.geometry import LayerGroup
from kvplane.ledger import Span
from kvplane.pack.blob import blob_name, row_blob, state_blob
from kvplane.pack.buffers import ThreadBuffer
from kvplane.pack.content import put_content
from kvplane.pack.encoding import digest
from kvplane.pack.lease import Lease
from kvplane.pack.limits import SPANS, TOKENS, WRITERS
from kvplane.pack.parallel import mapped
from kvplane.pack.source import RowSource
from kvplane.pack.spans import overlapping, planned, rounded_down
from kvplane.pack.state import GroupRows, Numerics, State
from kvplane.pack.zstd_bytes import LEAD_NBYTES, is_packed, packed
from kvplane.storage import Storage


class Codec(Enum):
    """How a blob holds rows: as they are, or packed by zstd."""

    RAW = "raw"
    ZSTD_BYTES = "zstd-bytes"


@dataclass(slots=True)
class Written:
    """What a save or publish did.

    Args:
        blobs_written: blobs that were not there.
        nbytes_written: their bytes.
        blobs_named: blobs that the document names.
        names: of all blobs that were put, there already or not.
    """

    blobs_written: int = 0
    nbytes_written: int = 0
    blobs_named: int = 0
    names: set[str] = field(default_factory=set)

    def add(self, more: "Written") -> None:
        """Count what a second attempt did as well."""
        self.blobs_written += more.blobs_written
        self.nbytes_written += more.nbytes_written
        self.names |= more.names


class Piece(NamedTuple):
    """Rows to put: `named` is what the document needs, `put` what the blob will hold."""

    group: LayerGroup
    named: range
    put: range


def state_at(
    source: RowSource,
    storage: Storage,
    lease: Lease,
    *,
    fingerprint: str,
    position: int,
    firsts: Mapping[str, int],
    states: Mapping[str, Tensor] | None = None,
    codec: Codec = Codec.RAW,
) -> tuple[State, Written]:
    """Put every blob that a state needs, and name them.

    Args:
        source: where rows come from; its session's ledger learns the spans that were written.
        storage: an opened root.
        lease: of the save, held until its document is there.
        fingerprint: hex.
        position: the state's.
        firsts: by group id, the oldest row that it needs.
        states: of recurrent and convolution layers at that position.
        codec: of the blobs of rows that are written.

    Raises:
        PackTooLarge: more positions or spans than a document holds.
        StorageError: something could not be written; nothing names what was.
    """
    if position > TOKENS:
        raise PackTooLarge(what="position", limit=TOKENS, got=position)
    written = Written()
    plans = {
        group: _planned(group, source, storage, firsts[group.id], position)
        for group in source.session.groups
    }
    total = sum(map(len, plans.values()))
    if total > SPANS:
        raise PackTooLarge(what="spans", limit=SPANS, got=total)
    pieces = [part for plan in plans.values() for part in plan if isinstance(part, Piece)]
    blobs = dict(zip(pieces, _put_all(pieces, source, storage, written, lease, codec), strict=True))
    groups = {
        group.id: GroupRows(
            first=firsts[group.id],
            spans=tuple(
                Span(part.named.start, part.named.stop, blobs[part])
                if isinstance(part, Piece)
                else part
                for part in plan
            ),
        )
        for group, plan in plans.items()
    }
    name = None
    if states:
        name = _store(storage, state_blob(position, states), written)
    state = State(
        fingerprint=fingerprint,
        position=position,
        groups=groups,
        numerics=numerics_until(source, position),
        canonical=canonical_until(source, position),
        states=name,
    )
    written.blobs_named = len(state.blobs)
    return state, written


def _planned(
    group: LayerGroup, source: RowSource, storage: Storage, first: int, stop: int
) -> list[Span | Piece]:
    known = _known(group, source, storage, first, stop)
    plan: list[Span | Piece] = []
    for part in planned(known, first, stop):
        if isinstance(part, Span):
            plan.append(part)
            continue
        put = part
        if group.is_sliding and part.start == first:
            put = rounded_down(part, known, oldest=source.first_held(group))
        plan.append(Piece(group, part, put))
    return plan


def _known(
    group: LayerGroup, source: RowSource, storage: Storage, first: int, stop: int
) -> list[Span]:
    """The session's spans of the group, without those needed here that are gone or cut short."""
    if source.session.batch is not None:
        return []
    spans = source.session.ledger.spans.get(group.id, [])
    lengths: dict[str, int] = {}
    for span in overlapping(spans, first, stop):
        lengths[span.blob] = max(lengths.get(span.blob, 0), span.stop - span.first)
    row_nbytes = len(group.layers) * group.row_nbytes

    def is_there(blob: str) -> bool:
        return _is_long(storage, blob, nbytes=lengths[blob] * row_nbytes)

    there = mapped(storage, is_there, lengths)
    gone = {blob for blob, good in zip(lengths, there, strict=True) if not good}
    if gone:
        spans = [span for span in spans if span.blob not in gone]
        source.session.ledger.spans[group.id] = spans
    return spans


def _is_long(storage: Storage, blob: str, *, nbytes: int) -> bool:
    """Whether a blob is there with more than so many bytes: its header's come on top.

    A packed one is shorter, and was compared with its digest when it was read or written.
    """
    try:
        if storage.size(blob_name(blob)) > nbytes:
            return True
        lead = bytearray(LEAD_NBYTES)
        with storage.reading(blob_name(blob)) as file:
            if file.nbytes <= len(lead):
                return False
            file.read_into(lead)
        return is_packed(lead)
    except StorageMissing:
        return False


def _put_all(
    pieces: Sequence[Piece],
    source: RowSource,
    storage: Storage,
    written: Written,
    lease: Lease,
    codec: Codec,
) -> list[str]:
    """The blobs of the pieces, each in the storage; the session's ledger knows them."""
    memory = ThreadBuffer()

    def put(piece: Piece) -> str:
        lease.keep()
        rows = {
            layer: source.rows(piece.group, layer, piece.put.start, piece.put.stop)
            for layer in piece.group.layers
        }
        data = row_blob(piece.group, piece.put.start, rows, memory=memory)
        if codec is Codec.ZSTD_BYTES:
            data = packed(data) or data
        return _store(storage, data, written)

    few = storage.parallel == 1 and len(pieces) < WRITERS
    blobs = mapped(storage, put, pieces, least=1 if few else WRITERS)
    if source.session.batch is None:
        spans = source.session.ledger.spans
        for piece, blob in zip(pieces, blobs, strict=True):
            here = spans.setdefault(piece.group.id, [])
            here.append(Span(piece.put.start, piece.put.stop, blob))
        for group_id, here in spans.items():
            spans[group_id] = sorted(here)
    return blobs


def _store(storage: Storage, data: bytearray | memoryview, written: Written) -> str:
    name = digest(data).hex()
    stored = put_content(storage, blob_name(name), data)
    with _COUNTING:
        written.names.add(name)
        if stored:
            written.blobs_written += 1
            written.nbytes_written += len(data)
    return name


_COUNTING = threading.Lock()


def numerics_until(source: RowSource, position: int) -> tuple[tuple[int, Numerics], ...]:
    """Who made the rows below a position."""
    runs: list[tuple[int, Numerics]] = []
    end = 0
    for stop, numerics in source.session.ledger.numerics:
        here = min(stop - source.padding, position)
        if here > end:
            runs.append((here, dict(numerics)))
            end = here
    return tuple(runs)


def canonical_until(source: RowSource, position: int) -> int:
    """The end of the rows below a position that a cold run on the schedule has, bit for bit."""
    ledger = source.session.ledger
    if source.session.num_sequences > 1 or source.padding or not ledger.numerics:
        # a batch's products are of another shape than one sequence's
        return 0
    chunk = int(ledger.numerics[0][1]["chunk"])
    return min(ledger.canonical, position - position % chunk)


def check_present(storage: Storage, state: State) -> list[str]:
    """Blobs of a state that are gone since they were named."""
    blobs = sorted(state.blobs)
    there = mapped(storage, lambda blob: storage.exists(blob_name(blob)), blobs)
    return [blob for blob, good in zip(blobs, there, strict=True) if not good]
