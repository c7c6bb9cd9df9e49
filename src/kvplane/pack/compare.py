"""Whether two saved sessions are bitwise equal, and where they first differ.

Equal names are equal bytes: only blobs that differ are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvplane.errors import PackCorrupt
from kvplane.geometry import LayerGroup
from kvplane.ledger import Span
from kvplane.pack.blob import blob_name, check_rows, tensors_of
from kvplane.pack.documents import SavedSession
from kvplane.pack.fingerprint import differences
from kvplane.pack.groups import groups_of
from kvplane.pack.header import header_of
from kvplane.pack.limits import BLOCK, HEADER_NBYTES
from kvplane.pack.reader import read_blob, read_states
from kvplane.storage import Storage

BITS = {2: torch.int16, 4: torch.int32}


class FieldDifference(NamedTuple):
    """Something other than rows that two sessions say differently."""

    field: str
    left: Any
    right: Any


class Place(NamedTuple):
    """One head's key or value of one token in one layer."""

    position: int
    layer: int
    what: str
    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """Where a layer's keys or values differ.

    Args:
        layer: which.
        what: "key" or "value".
        first: the first place.
        num_rows: positions at which at least one head differs.
    """

    layer: int
    what: str
    first: Place
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs between two saved sessions.

    Args:
        fields: model, position, ids, cursors, live ranges.
        provenance: who made the rows, tokenizer, template: they change no bit.
        layers: rows that both have and that are not the same bits, by layer.
        states: names of states of recurrent and convolution layers that differ.
        num_rows: positions and layers that both have, compared.
    """

    fields: tuple[FieldDifference, ...]
    provenance: tuple[FieldDifference, ...]
    layers: tuple[LayerDifference, ...]
    states: tuple[str, ...]
    num_rows: int

    @property
    def equal(self) -> bool:
        """Whether both go on with the same bits, given the same numerics."""
        return not (self.fields or self.layers or self.states)

    @property
    def first(self) -> Place | None:
        """The first place at which rows differ: by position, then layer, key before value."""
        return min((layer.first for layer in self.layers), default=None)


def compare(left: "Side", right: "Side") -> Comparison:
    """What differs between two saved sessions, of one root or of two.

    Raises:
        PackMissing, PackCorrupt, PackTooLarge: a blob that both cannot do without is not right.
    """
    layers: list[LayerDifference] = []
    num_rows = 0
    for group in _common_groups(left, right):
        found, compared = _compare_rows(left, right, group)
        layers += found
        num_rows += compared
    return Comparison(
        fields=tuple(_fields(left.saved, right.saved)),
        provenance=tuple(_provenance(left.saved, right.saved)),
        layers=tuple(sorted(layers, key=lambda layer: (layer.layer, layer.what))),
        states=tuple(_states(left, right)),
        num_rows=num_rows,
    )


class Side:
    """One of the two sessions, with the blob that was read last at hand."""

    def __init__(self, storage: Storage, saved: SavedSession) -> None:
        self.storage = storage
        self.saved = saved
        self.groups = groups_of(saved)
        self._last: tuple[str, range, dict[str, Tensor]] | None = None

    def rows(self, group: LayerGroup, span: Span) -> dict[str, Tensor]:
        """The rows of a span by tensor, verified."""
        if self._last is None or self._last[0] != span.blob:
            path = f"{self.storage.location}/{blob_name(span.blob)}"
            limit = HEADER_NBYTES + 8 + BLOCK * len(group.layers) * group.row_nbytes
            needed_by = f"session {self.saved.name}"
            data = read_blob(self.storage, span.blob, limit=limit, needed_by=needed_by)
            header = header_of(data, path)
            held = check_rows(header, group, path)
            self._last = span.blob, held, dict(tensors_of(header, data))
        _, held, tensors = self._last
        if span.first < held.start or span.stop > held.stop:
            what = f"holds positions [{held.start}, {held.stop}), not all of {span[:2]}"
            raise PackCorrupt(path=blob_name(span.blob), what=what)
        part = slice(span.first - held.start, span.stop - held.start)
        return {name: tensor[part] for name, tensor in tensors.items()}

    def states(self) -> dict[str, Tensor]:
        """The states of recurrent and convolution layers, verified."""
        return read_states(self.storage, self.saved.state, f"session {self.saved.name}")


def _common_groups(left: Side, right: Side) -> list[LayerGroup]:
    return [group for name, group in left.groups.items() if right.groups.get(name) == group]


def _compare_rows(left: Side, right: Side, group: LayerGroup) -> tuple[list[LayerDifference], int]:
    found: dict[tuple[int, str], LayerDifference] = {}
    num_rows = 0
    sides = (left.saved.state.groups[group.id].spans, right.saved.state.groups[group.id].spans)
    for mine, other in _aligned(*sides):
        num_rows += (mine.stop - mine.first) * len(group.layers)
        if mine.blob == other.blob:
            continue
        rows, others = left.rows(group, mine), right.rows(group, other)
        for layer in group.layers:
            for what in ("key", "value"):
                name = f"layers.{layer}.{what}"
                differs = (_bits(rows[name]) != _bits(others[name])).any(dim=-1)
                if differs.any():
                    _note(found, differs, mine.first, layer, what)
    return list(found.values()), num_rows


def _note(
    found: dict[tuple[int, str], LayerDifference],
    differs: Tensor,
    first: int,
    layer: int,
    what: str,
) -> None:
    row, head = (int(number) for number in differs.nonzero()[0])
    before = found.get((layer, what))
    count = int(differs.any(dim=-1).sum())
    found[layer, what] = LayerDifference(
        layer=layer,
        what=what,
        first=Place(first + row, layer, what, head) if before is None else before.first,
        num_rows=count + (0 if before is None else before.num_rows),
    )


def _aligned(left: Sequence[Span], right: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """The positions that both cover, in pieces that are one blob's on either side."""
    mine, other = 0, 0
    while mine < len(left) and other < len(right):
        first = max(left[mine].first, right[other].first)
        stop = min(left[mine].stop, right[other].stop)
        if first < stop:
            yield Span(first, stop, left[mine].blob), Span(first, stop, right[other].blob)
        if left[mine].stop == stop:
            mine += 1
        else:
            other += 1


def _bits(tensor: Tensor) -> Tensor:
    # as numbers, -0.0 equals 0.0 and NaN equals nothing
    return tensor.view(BITS[tensor.dtype.itemsize])


def _fields(left: SavedSession, right: SavedSession) -> Iterator[FieldDifference]:
    yield from map(FieldDifference._make, differences(left.parts, right.parts, "model"))
    if left.state.position != right.state.position:
        yield FieldDifference("position", left.state.position, right.state.position)
    yield from _tokens(left.tokens, right.tokens)
    if left.aux != right.aux:
        yield FieldDifference("aux", left.aux, right.aux)
    for group in sorted({*left.cursors, *right.cursors}):
        mine, other = left.cursors.get(group), right.cursors.get(group)
        if mine is None or other is None:
            yield FieldDifference(group, mine, other)
            continue
        names = ("capacity", "length", "origin_logical", "origin_physical")
        for name, one, two in zip(names, mine, other, strict=True):
            if one != two:
                yield FieldDifference(f"{group} {name}", one, two)


def _tokens(
    left: tuple[int, ...] | None, right: tuple[int, ...] | None
) -> Iterator[FieldDifference]:
    if left is None or right is None:
        if left is not right:
            known = ["none kept" if ids is None else f"{len(ids)} ids" for ids in (left, right)]
            yield FieldDifference("tokens", *known)
        return
    for number, (one, two) in enumerate(zip(left, right, strict=False)):
        if one != two:
            yield FieldDifference(f"token {number}", one, two)
            return
    if len(left) != len(right):
        yield FieldDifference("number of tokens", len(left), len(right))


def _provenance(left: SavedSession, right: SavedSession) -> Iterator[FieldDifference]:
    if left.state.canonical != right.state.canonical:
        yield FieldDifference("canonical", left.state.canonical, right.state.canonical)
    first = 0
    while first < min(left.state.position, right.state.position):
        (stop, mine), (other_stop, other) = (_run_at(side, first) for side in (left, right))
        stop = min(stop, other_stop)
        where = f"rows [{first}, {stop})"
        yield from map(FieldDifference._make, differences(mine, other, where))
        first = stop
    for field in ("tokenizer", "template"):
        if getattr(left, field) != getattr(right, field):
            yield FieldDifference(field, getattr(left, field), getattr(right, field))


def _run_at(saved: SavedSession, position: int) -> tuple[int, Mapping[str, Any]]:
    """Who made the row of a position, and up to where."""
    return next((stop, made) for stop, made in saved.state.numerics if stop > position)


def _states(left: Side, right: Side) -> Iterator[str]:
    if left.saved.state.states == right.saved.state.states:
        return
    mine, other = left.states(), right.states()
    for name in sorted({*mine, *other}):
        one, two = mine.get(name), other.get(name)
        if one is None or two is None or not _same_bits(one, two):
            yield name


def _same_bits(one: Tensor, two: Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two)]
    return torch.equal(flat[0], flat[1])
