"""One walk over a document's blobs: each is read, verified and measured, and goes.

Memory does not grow with the session: a few blobs are there at a time.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvplane.errors import PackCorrupt, PackError, StorageMissing
from kvplane.geometry import LayerGroup
from kvplane.inspect.heat import Heat, Sum
from kvplane.ledger import Span
from kvplane.pack.blob import blob_name, check_rows, header_limit, tensors_of
from kvplane.pack.documents import Cut, SavedSession
from kvplane.pack.groups import group_in, groups_of
from kvplane.pack.header import header_of
from kvplane.pack.limits import BLOCK
from kvplane.pack.reader import read_blob, read_states
from kvplane.storage import Storage

WORKERS = 2
AT_ONCE = 4 * WORKERS
NAMED_PROBLEMS = 20
# of a blob whose group is not known yet
BLOB_NBYTES = 1 << 30

Task = tuple[str, str, list[Span]]


class Seen(NamedTuple):
    """What one blob had: norms and bytes, or what is wrong with it."""

    sums: list[Sum]
    nbytes: int
    problem: str | None


class Look:
    """A document's blobs.

    Args:
        storage: an opened root.
        content: the document.
        name: what people call it.
        progress: called with the bytes of every blob that was read.
    """

    def __init__(
        self,
        storage: Storage,
        content: SavedSession | Cut,
        name: str,
        progress: Callable[[int], object],
    ) -> None:
        self._storage = storage
        self._state = content.state
        self._name = name
        self._progress = progress
        self.problems: list[str] = []
        self.num_problems = 0
        self.nbytes = 0
        self.sizes = dict(self._sizes())
        self.groups = groups_of(content) if isinstance(content, SavedSession) else self._seen()
        layers = sorted(layer for group in self.groups.values() for layer in group.layers)
        self.heat = Heat(layers, self._state.position)

    def run(self) -> None:
        """Read and verify every blob; problems are kept in the order of positions."""
        tasks = self._tasks()
        with ThreadPoolExecutor(WORKERS) as pool:
            # a few at a time, so that what was read does not wait in memory
            for begin in range(0, len(tasks), AT_ONCE):
                for seen in pool.map(self._see, tasks[begin : begin + AT_ONCE]):
                    for found in seen.sums:
                        self.heat.add(found)
                    self._note(seen)
        try:
            read_states(self._storage, self._state, self._name)
        except PackError as error:
            self._note(Seen([], 0, f"states: {error}"))

    def _note(self, seen: Seen) -> None:
        self.nbytes += seen.nbytes
        self._progress(seen.nbytes)
        if seen.problem is not None:
            self.num_problems += 1
            if len(self.problems) < NAMED_PROBLEMS:
                self.problems.append(seen.problem)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        for blob in self._state.blobs:
            try:
                yield blob, self._storage.size(blob_name(blob))
            except StorageMissing:
                continue

    def _seen(self) -> dict[str, LayerGroup]:
        """The groups by their blobs' headers: a cut does not say which layers are in a group."""
        groups = {}
        for name, rows in self._state.groups.items():
            for blob in dict.fromkeys(span.blob for span in rows.spans):
                try:
                    data = self._read(blob, BLOB_NBYTES)
                    groups[name] = group_in(header_of(data, blob), blob)
                except PackError:
                    continue
                break
        return groups

    def _tasks(self) -> list[Task]:
        wanted: dict[tuple[str, str], list[Span]] = {}
        for name, rows in self._state.groups.items():
            for span in rows.spans:
                wanted.setdefault((name, span.blob), []).append(span)
        return [(name, blob, spans) for (name, blob), spans in wanted.items()]

    def _see(self, task: Task) -> Seen:
        name, blob, spans = task
        where = f"positions [{spans[0].first}, {spans[-1].stop}) of {name}"
        try:
            group = self.groups.get(name)
            if group is None:
                # none of its blobs could be read; this one says why
                return Seen([], len(self._read(blob, BLOB_NBYTES)), None)
            limit = header_limit(group) + BLOCK * len(group.layers) * group.row_nbytes
            data = self._read(blob, limit)
            header = header_of(data, blob_name(blob))
            held = check_rows(header, group, blob_name(blob))
            sums: list[Sum] = []
            for span in spans:
                if span.first < held.start or span.stop > held.stop:
                    what = f"holds [{held.start}, {held.stop})"
                    raise PackCorrupt(path=blob_name(blob), what=what)
                part = slice(span.first - held.start, span.stop - held.start)
                rows = {tensor: found[part] for tensor, found in tensors_of(header, data)}
                sums += self.heat.sums(rows, span.first)
        except PackError as error:
            return Seen([], 0, f"{where}: {error}")
        return Seen(sums, len(data), None)

    def _read(self, blob: str, limit: int) -> bytearray:
        return read_blob(self._storage, blob, limit=limit, needed_by=self._name)
