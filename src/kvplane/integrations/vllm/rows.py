"""Cuts of an engine's rows: written from copies, read and verified before anything is touched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvplane.errors import PackCorrupt, PackError
from kvplane.geometry import LayerGroup
from kvplane.ledger import Span
from kvplane.pack.blob import blob_name, check_rows, header_limit, row_blob, tensors_of
from kvplane.pack.chain import ID_NBYTES, Chain
from kvplane.pack.content import put_content
from kvplane.pack.documents import Cut
from kvplane.pack.encoding import digest
from kvplane.pack.header import header_of
from kvplane.pack.lease import Lease
from kvplane.pack.limits import BLOCK, DOCUMENT_NBYTES
from kvplane.pack.match import cut_folder, cut_names, sealed_name
from kvplane.pack.reader import read_blob
from kvplane.pack.spans import planned
from kvplane.pack.state import GroupRows, Numerics, State
from kvplane.pack.writer import check_present
from kvplane.storage import Storage

Rows = Mapping[int, tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Known:
    """What is stored of one request's rows, and who made them.

    Args:
        spans: by group id.
        numerics: (stop, numerics) runs.
    """

    spans: dict[str, list[Span]] = field(default_factory=dict)
    numerics: list[tuple[int, Numerics]] = field(default_factory=list)

    def made(self, stop: int, numerics: Numerics) -> None:
        """Note that the rows up to `stop` were made by `numerics`."""
        if self.numerics and self.numerics[-1][0] >= stop:
            return
        if self.numerics and self.numerics[-1][1] == numerics:
            self.numerics[-1] = (stop, numerics)
        else:
            self.numerics.append((stop, numerics))

    def numerics_until(self, position: int) -> tuple[tuple[int, Numerics], ...]:
        """The runs below a position."""
        runs = []
        begin = 0
        for stop, numerics in self.numerics:
            if begin < position:
                runs.append((min(stop, position), numerics))
            begin = stop
        return tuple(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Copies of one group's rows from position `first` on, by layer."""

    group: LayerGroup
    first: int
    rows: Rows


class CutWriter:
    """Writes cuts of one model into one root.

    Args:
        storage: an opened root.
        fingerprint: hex of the model's.
    """

    def __init__(self, storage: Storage, fingerprint: str) -> None:
        self._storage = storage
        self._fingerprint = fingerprint
        # cuts that did not load here: no reason to leave out a new one of equal tokens
        self.failed: set[str] = set()

    def write(
        self,
        position: int,
        ids: bytes,
        captured: Sequence[Captured],
        known: Known,
        *,
        salt: bytes = b"",
    ) -> Cut | None:
        """Put a cut and every blob that it needs; None where one as good is there.

        Args:
            position: of the cut.
            ids: packed, at least up to it.
            captured: rows that are not known, of every group.
            known: of the request; learns what was written.
            salt: of the tenant.

        Raises:
            StorageError: something could not be written; no cut names what was.
        """
        ids = ids[: ID_NBYTES * position]
        chain = Chain.packed(self._fingerprint, ids, salt=salt)
        numerics = known.numerics_until(position)
        there = self._there(position, ids, chain, numerics, {item.group.id for item in captured})
        if there is not None:
            for name, rows in there.state.groups.items():
                known.spans[name] = _joined(known.spans.get(name, []), rows.spans)
            return None
        with Lease(self._storage) as lease:
            cut = self._put(position, ids, chain, captured, known, numerics, lease)
            gone = check_present(self._storage, cut.state)
            if gone:
                # somebody swept a blob between its naming and this
                for name, spans in known.spans.items():
                    known.spans[name] = [span for span in spans if span.blob not in gone]
                self._put(position, ids, chain, captured, known, numerics, lease)
        return cut

    def _put(
        self,
        position: int,
        ids: bytes,
        chain: Chain,
        captured: Sequence[Captured],
        known: Known,
        numerics: tuple[tuple[int, Numerics], ...],
        lease: Lease,
    ) -> Cut:
        groups = {}
        for item in captured:
            group = item.group
            window = group.sliding_window
            first = 0 if window is None else max(0, position - (window - 1))
            spans = []
            for part in planned(known.spans.get(group.id, []), first, position):
                if isinstance(part, Span):
                    spans.append(part)
                    continue
                lease.keep()
                here = slice(part.start - item.first, part.stop - item.first)
                if here.start < 0:
                    what = f"rows of {group.id} from {part.start} are not at hand"
                    raise PackError(what)
                rows = {
                    layer: [(key[here], value[here])] for layer, (key, value) in item.rows.items()
                }
                data = row_blob(group, part.start, rows)
                blob = digest(data).hex()
                put_content(self._storage, blob_name(blob), data)
                spans.append(Span(part.start, part.stop, blob))
            known.spans[group.id] = _joined(known.spans.get(group.id, []), spans)
            groups[group.id] = GroupRows(first=first, spans=tuple(spans))
        state = State(
            fingerprint=self._fingerprint,
            position=position,
            groups=groups,
            numerics=numerics,
            canonical=0,
        )
        cut = Cut(state=state, chain=chain.at(position // BLOCK), ids=ids)
        document = cut.encoded()
        put_content(self._storage, sealed_name(cut, chain.tail(position), document), document)
        return cut

    def _there(
        self,
        position: int,
        ids: bytes,
        chain: Chain,
        numerics: tuple[tuple[int, Numerics], ...],
        groups: set[str],
    ) -> Cut | None:
        folder = cut_folder(self._fingerprint, chain.at(position // BLOCK))
        for name in cut_names(self._storage, folder):
            same = (name.position, name.tail) == (position, chain.tail(position))
            if not same or name.file in self.failed:
                continue
            try:
                data = self._storage.read(name.file, limit=DOCUMENT_NBYTES)
                cut = Cut.decoded(data, name.file)
            except PackError:
                continue
            if (
                sealed_name(cut, name.tail, data) == name.file
                and cut.ids == ids
                and not cut.aux
                and set(cut.state.groups) == groups
                and cut.state.numerics == numerics
                and not check_present(self._storage, cut.state)
            ):
                return cut
        return None


def _joined(known: Sequence[Span], more: Sequence[Span]) -> list[Span]:
    """Spans of both, ascending and without overlap; the known ones first."""
    spans = list(known)
    for span in more:
        if not any(one.first < span.stop and span.first < one.stop for one in spans):
            spans.append(span)
    return sorted(spans)


def read_rows(
    storage: Storage, cut: Cut, groups: Mapping[str, LayerGroup], local: int, needed_by: str
) -> dict[str, Captured]:
    """A cut's rows from position `local` on, by group: verified, nothing of it visible yet.

    Raises:
        PackMissing, PackCorrupt, PackTooLarge: a blob is not what was named.
    """
    found = {}
    with Lease(storage) as lease:
        for name, rows in cut.state.groups.items():
            group = groups[name]
            first = max(rows.first, local)
            pieces: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in group.layers}
            for span in rows.spans:
                begin = max(span.first, first)
                if begin >= span.stop:
                    continue
                lease.keep()
                tensors, held = _tensors(storage, span, group, needed_by)
                here = slice(begin - held.start, span.stop - held.start)
                for layer in group.layers:
                    key = tensors[f"layers.{layer}.key"][here]
                    value = tensors[f"layers.{layer}.value"][here]
                    pieces[layer].append((key, value))
            joined = {
                layer: (
                    torch.cat([key for key, _ in some]),
                    torch.cat([value for _, value in some]),
                )
                for layer, some in pieces.items()
                if some
            }
            found[name] = Captured(group=group, first=first, rows=joined)
    return found


def _tensors(
    storage: Storage, span: Span, group: LayerGroup, needed_by: str
) -> tuple[dict[str, Any], range]:
    limit = header_limit(group) + BLOCK * len(group.layers) * group.row_nbytes
    data = read_blob(storage, span.blob, limit=limit, needed_by=needed_by)
    path = f"{storage.location}/{blob_name(span.blob)}"
    header = header_of(data, path)
    held = check_rows(header, group, path)
    if span.first < held.start or span.stop > held.stop:
        what = f"holds [{held.start}, {held.stop}), not all of [{span.first}, {span.stop})"
        raise PackCorrupt(path=path, what=what)
    return dict(tensors_of(header, data)), held
