"""What a saved session or cut holds, all that is told of it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvplane.errors import PackCorrupt, SessionNotFound, StorageMissing
from kvplane.footprint import footprint
from kvplane.geometry import LayerGroup
from kvplane.inspect.heat import Heat
from kvplane.inspect.look import Look
from kvplane.inspect.sharing import Sharing, sharing
from kvplane.ledger import Span
from kvplane.pack.documents import Cut, SavedSession
from kvplane.pack.geometries import geometry_of
from kvplane.pack.inventory import Document, Kind, document, kind_of
from kvplane.pack.sessions import session_file
from kvplane.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """A layer group as a document has it.

    Args:
        group: shape and layers.
        cursor: (capacity, length, origin_logical, origin_physical); of a cut, where a store without
            slack lays its rows.
        wraps: how many times the ring has begun again at row 0.
        spans: which blob holds which positions.
        planned: bytes of the rows that a plan for this position holds.
    """

    group: LayerGroup
    cursor: tuple[int, int, int, int]
    wraps: int
    spans: tuple[Span, ...]
    planned: int

    @property
    def held(self) -> int:
        """Bytes of the rows that the document names."""
        rows = sum(span.stop - span.first for span in self.spans)
        return rows * len(self.group.layers) * self.group.row_nbytes

    @property
    def reserved(self) -> int:
        """Bytes of all rows that the planes could hold."""
        return self.cursor[0] * len(self.group.layers) * self.group.row_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """All that is told of a session or cut.

    Args:
        kind: "session" or "cut".
        name: what people call it.
        root: where it lies.
        content: the document.
        groups: in the document's order.
        heat: norms.
        sharing: who else names its blobs.
        problems: blobs that are missing or not what they should be, and why; not all when many.
        num_problems: how many there are.
        num_blobs: blobs that it names.
        nbytes: of those that were read and verified.
        seconds: that looking took.
    """

    kind: str
    name: str
    root: str
    content: SavedSession | Cut
    groups: tuple[GroupFacts, ...]
    heat: Heat
    sharing: Sharing
    problems: tuple[str, ...]
    num_problems: int
    num_blobs: int
    nbytes: int
    seconds: float

    @property
    def parts(self) -> Mapping[str, Any]:
        """What the fingerprint is made of; of a cut only the digest is known."""
        return self.content.parts if isinstance(self.content, SavedSession) else {}


def found(storage: Storage, name: str) -> Document:
    """A session by its name, or a cut by its file.

    Raises:
        SessionNotFound: neither; the nearest names are in it.
        PackCorrupt, PackVersion, PackTooLarge: it cannot be read.
    """
    one = document(storage, name if kind_of(name) is Kind.CUT else session_file(name))
    if isinstance(one.error, StorageMissing):
        raise SessionNotFound(name=name, nearest=[])
    if one.error is not None:
        raise one.error
    return one


def inspected(
    storage: Storage, one: Document, *, progress: Callable[[int], object] = int
) -> Inspection:
    """Look at all of a session or cut; a damaged or missing blob is a finding, not an error.

    Args:
        storage: an opened root.
        one: a document that could be read.
        progress: called with the bytes of every blob that was read.

    Raises:
        StorageError: the root cannot be read.
        PackCorrupt: the document has no content.
    """
    begin = time.perf_counter()
    content = one.content
    if content is None:
        raise PackCorrupt(path=one.file, what="cannot be read")
    look = Look(storage, content, one.name, progress)
    shared = sharing(storage, one, content.state, look.sizes)
    look.run()
    return Inspection(
        kind="cut" if one.kind is Kind.CUT else "session",
        name=one.name,
        root=storage.location,
        content=content,
        groups=tuple(_group(content, group) for group in look.groups.values()),
        heat=look.heat,
        sharing=shared,
        problems=tuple(look.problems),
        num_problems=look.num_problems,
        num_blobs=len(content.state.blobs),
        nbytes=look.nbytes,
        seconds=time.perf_counter() - begin,
    )


def _group(content: SavedSession | Cut, group: LayerGroup) -> GroupFacts:
    rows = content.state.groups[group.id]
    position = content.state.position
    if isinstance(content, SavedSession):
        cursor = content.cursors[group.id]
        capacity = cursor[0]
        wraps = _wraps(position - content.first_position, capacity, ring=group.is_sliding)
        planned = _planned(content, group, capacity)
    else:
        capacity = position if group.sliding_window is None else group.sliding_window
        _, row = divmod(rows.first, capacity)
        cursor = (capacity, position - rows.first, rows.first, row)
        wraps = _wraps(position, capacity, ring=group.is_sliding)
        # a cut has just the rows that the next token needs
        planned = (position - rows.first) * len(group.layers) * group.row_nbytes
    return GroupFacts(group=group, cursor=cursor, wraps=wraps, spans=rows.spans, planned=planned)


def _wraps(num_tokens: int, capacity: int, *, ring: bool) -> int:
    return max(0, num_tokens - 1) // capacity if ring else 0


def _planned(content: SavedSession, group: LayerGroup, capacity: int) -> int:
    """What a plan of that many tokens holds of a group whose planes have this capacity."""
    num_tokens = content.state.position - content.first_position
    if num_tokens == 0:
        return 0
    window = group.sliding_window
    geometry = geometry_of(content.geometry, content.name)
    plan = footprint(
        geometry,
        context=num_tokens,
        slack=0 if window is None else max(0, capacity - window),
        max_context=max(num_tokens, capacity),
    )
    return next(part.nbytes.rows_held for part in plan.groups if part.group.id == group.id)
