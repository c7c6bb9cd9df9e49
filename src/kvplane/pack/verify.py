"""Whether a root is what it claims: what is broken, and what can still be used.

Everything is read once. Nothing is changed.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from kvplane.errors import PackCorrupt, PackError, PackTooLarge
from kvplane.geometry import LayerGroup
from kvplane.pack.blob import blob_name, check_rows, check_states
from kvplane.pack.documents import Cut, Node, SavedSession
from kvplane.pack.groups import group_in, groups_of
from kvplane.pack.header import header_of
from kvplane.pack.inputs import ordered
from kvplane.pack.inventory import Document, Kind, blob_of, documents, kind_of, read_cut
from kvplane.pack.limits import NODE_NBYTES
from kvplane.pack.match import node_file
from kvplane.pack.reader import read_blob
from kvplane.pack.root import open_root
from kvplane.pack.state import State, is_count
from kvplane.storage import Storage

BLOB_NBYTES = 1 << 30
WORKERS = 2
STATES = "state"


class Problem(NamedTuple):
    """A file that is not what it claims, and why."""

    file: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """A cut or session, and whether it can be resumed.

    Args:
        kind: Kind.CUT or Kind.SESSION.
        name: what people call it.
        position: where it resumes; None when it cannot be read.
        why_not: empty when it can be resumed; else every reason.
        instead: for a session that cannot: the deepest cut of its tokens that can.
    """

    kind: Kind
    name: str
    position: int | None
    why_not: tuple[str, ...] = ()
    instead: "Usable | None" = None

    @property
    def usable(self) -> bool:
        """Whether it can be resumed."""
        return not self.why_not


@dataclass(slots=True)
class Report:
    """What `verify` found.

    Args:
        problems: files that are damaged.
        entries: every cut and session.
        unnamed: blobs that no readable cut or session names.
        foreign: names that are none of the format's.
        num_blobs: blobs that were read.
        nbytes: their bytes.
    """

    problems: list[Problem] = field(default_factory=list)
    entries: list[Usable] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    num_blobs: int = 0
    nbytes: int = 0

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged and everything can be resumed."""
        return not self.problems and all(entry.usable for entry in self.entries)


class _Held(NamedTuple):
    """What a sound blob holds: the group and layers of its rows, and which positions."""

    group: str
    layers: tuple[int, ...]
    rows: range


def verify(storage: Storage, *, progress: Callable[[int], object] = int) -> Report:
    """Read everything in a root and say what is broken and what can still be used.

    Args:
        storage: `open_storage`'s, so that a root whose root.json is damaged can be looked at.
        progress: called with the bytes of every blob that was read.

    Raises:
        StorageError: the root itself cannot be read.
        PackVersion: it is of another format.
    """
    report = Report()
    try:
        open_root(storage)
    except PackCorrupt as error:
        report.problems.append(Problem("root.json", error.what))
    files: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    for file in storage.list():
        files[kind_of(file)].append(file)
    report.foreign = files[Kind.FOREIGN]
    held = _check_blobs(storage, files[Kind.BLOB], report, progress)
    for file in files[Kind.NODE]:
        _check_node(storage, file, report)
    named: set[str] = set()
    damaged: list[tuple[int, SavedSession]] = []
    for one in documents(storage):
        entry = _entry(storage, one, held)
        if one.error is not None:
            report.problems.append(Problem(one.file, _short(one.error, storage)))
        elif one.content is not None:
            named |= one.content.state.blobs
            if not entry.usable and isinstance(one.content, SavedSession):
                damaged.append((len(report.entries), one.content))
        report.entries.append(entry)
    for number, saved in damaged:
        entry = report.entries[number]
        report.entries[number] = Usable(
            kind=entry.kind,
            name=entry.name,
            position=entry.position,
            why_not=entry.why_not,
            instead=_instead(storage, saved, report.entries),
        )
    report.unnamed = [blob for blob in map(blob_of, files[Kind.BLOB]) if blob not in named]
    return report


def _check_blobs(
    storage: Storage, files: list[str], report: Report, progress: Callable[[int], object]
) -> dict[str, _Held | str]:
    """What each blob holds, or what is wrong with it."""

    def check(file: str) -> tuple[str, int, _Held | str]:
        try:
            size, held = _check_blob(storage, file)
        except PackError as error:
            return file, 0, _short(error, storage)
        return file, size, held

    found: dict[str, _Held | str] = {}
    with ThreadPoolExecutor(WORKERS) as pool:
        for file, size, held in pool.map(check, files):
            found[blob_of(file)] = held
            report.num_blobs += 1
            report.nbytes += size
            if isinstance(held, str):
                report.problems.append(Problem(file, held))
            progress(size)
    return found


def _check_blob(storage: Storage, file: str) -> tuple[int, _Held]:
    path = f"{storage.location}/{file}"
    data = read_blob(storage, blob_of(file), limit=BLOB_NBYTES, needed_by="the check")
    header = header_of(data, path)
    if header.metadata.get("group") == STATES:
        position = header.metadata.get("position")
        if not isinstance(position, int) or not is_count(position):
            raise PackCorrupt(path=path, what=f"states at position {position!r}")
        check_states(header, position, path)
        return len(data), _Held(STATES, (), range(position, position))
    group = group_in(header, path)
    return len(data), _Held(group.id, group.layers, check_rows(header, group, path))


def _check_node(storage: Storage, file: str, report: Report) -> None:
    path = f"{storage.location}/{file}"
    try:
        node = Node.decoded(storage.read(file, limit=NODE_NBYTES), path)
        if node_file(node.fingerprint, node.chain) != file:
            raise PackCorrupt(path=path, what="its name is another's")
    except PackError as error:
        what = f"{_short(error, storage)} (an index for reasons: nothing is resumed through it)"
        report.problems.append(Problem(file, what))


def _entry(storage: Storage, one: Document, held: dict[str, _Held | str]) -> Usable:
    if one.content is None:
        reason = _short(one.error, storage) if one.error else "cannot be read"
        return Usable(kind=one.kind, name=one.name, position=None, why_not=(reason,))
    state = one.content.state
    groups = groups_of(one.content) if isinstance(one.content, SavedSession) else None
    why = [*_rows_missing(state, groups, held), *_states_missing(state, held)]
    return Usable(kind=one.kind, name=one.name, position=state.position, why_not=tuple(why))


def _rows_missing(
    state: State, groups: Mapping[str, LayerGroup] | None, held: dict[str, _Held | str]
) -> Iterator[str]:
    """Every blob of rows that a state needs and does not have."""
    for group, rows in state.groups.items():
        for span in rows.spans:
            there = held.get(span.blob, "is missing")
            where = f"positions [{span.first}, {span.stop}) of {group}: {blob_name(span.blob)}"
            if isinstance(there, str):
                yield f"{where} {there}"
            elif there.group != group or (groups and there.layers != groups[group].layers):
                yield f"{where} holds {there.group} of layers {list(there.layers)}"
            elif span.first < there.rows.start or span.stop > there.rows.stop:
                yield f"{where} holds [{there.rows.start}, {there.rows.stop})"


def _states_missing(state: State, held: dict[str, _Held | str]) -> Iterator[str]:
    """The blob of states, when a state needs it and does not have it."""
    if state.states is None:
        return
    there = held.get(state.states, "is missing")
    where = f"states: {blob_name(state.states)}"
    if isinstance(there, str):
        yield f"{where} {there}"
    elif there.group != STATES or there.rows.start != state.position:
        yield f"{where} holds none of position {state.position}"


def _instead(storage: Storage, saved: SavedSession, entries: list[Usable]) -> Usable | None:
    """The deepest usable cut that a damaged session's tokens begin with."""
    if saved.first_position != 0:
        return None
    cuts = [
        entry
        for entry in entries
        if entry.kind is Kind.CUT
        and entry.usable
        and entry.name.split("/")[1] == saved.state.fingerprint
    ]
    for entry in sorted(cuts, key=lambda entry: (-(entry.position or 0), entry.name)):
        cut = read_cut(storage, entry.name)
        if _begins_with(saved, cut):
            return entry
    return None


def _begins_with(saved: SavedSession, cut: Cut) -> bool:
    position = cut.state.position
    ids = (saved.ids or b"")[: len(cut.ids)]
    return ids == cut.ids and ordered(saved.aux, below=position) == cut.aux


def _short(error: PackError, storage: Storage) -> str:
    """The reason without the root's path in front: the file is named beside it."""
    what = getattr(error, "what", None)
    text = what if isinstance(what, str) and not isinstance(error, PackTooLarge) else str(error)
    return text.removeprefix(f"{storage.location}/")
