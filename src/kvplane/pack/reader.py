"""Blobs into a session: copied, then verified on the copy, and visible when all of it is right."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvplane.builder import SessionBuilder
from kvplane.errors import PackCorrupt, PackMismatch, PackMissing, PackTooLarge, StorageMissing
from kvplane.geometry import LayerGroup
from kvplane.ledger import Ledger, Span
from kvplane.pack.blob import (
    BlobRows,
    Memory,
    blob_name,
    check_digest,
    check_states,
    header_of,
    rows_in,
    tensors_of,
)
from kvplane.pack.buffers import ThreadBuffer
from kvplane.pack.header import PREFIX_NBYTES
from kvplane.pack.limits import BLOCK, HEADER_NBYTES, STATES_NBYTES, WORKERS
from kvplane.pack.state import State
from kvplane.session import Session
from kvplane.snapshot import Cursor
from kvplane.storage import Storage
from kvplane.store import KVStore


class Task(NamedTuple):
    """Rows [first, stop) of a group, to read out of one blob."""

    target: "Target"
    span: Span
    first: int
    stop: int


class Target:
    """Where a group's live rows go: writable views of its planes.

    Pages are had here, in one thread, before any reader writes to them.
    """

    def __init__(self, group: LayerGroup, builder: SessionBuilder) -> None:
        self.group = group
        self.live = builder.cursors[group.id].live
        self._rows = {
            layer: [
                (key[0], value[0])
                for key, value in builder.rows(layer, self.live.start, self.live.stop)
            ]
            for layer in group.layers
        }

    def take(self, blob: BlobRows, first: int, stop: int) -> None:
        """Copy positions [first, stop) in."""
        parts = self._parts(first - self.live.start, stop - self.live.start)
        begin = first - blob.held.start
        for layer, runs in self._rows.items():
            place = blob.places[layer]
            at = begin
            for run, row, count in parts:
                key, value = runs[run]
                key[row : row + count].copy_(blob.keys[place, at : at + count])
                value[row : row + count].copy_(blob.values[place, at : at + count])
                at += count

    def _parts(self, first: int, stop: int) -> list[tuple[int, int, int]]:
        """Which run, from which of its rows on, how many: two across the ring's seam."""
        parts = []
        base = 0
        for run, (key, _) in enumerate(next(iter(self._rows.values()))):
            begin, end = max(first, base), min(stop, base + key.shape[0])
            if begin < end:
                parts.append((run, begin - base, end - begin))
            base += key.shape[0]
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A session from packs.

    Args:
        session: with every row of the state.
        states: of recurrent and convolution layers.
        num_blobs: blobs that were read and verified.
        nbytes: their bytes.
        kept_rotation: False when a ring's capacity differs, so that its rows lie elsewhere.
    """

    session: Session
    states: Mapping[str, Tensor]
    num_blobs: int
    nbytes: int
    kept_rotation: bool


def load_state(
    storage: Storage,
    state: State,
    store: KVStore,
    *,
    cursors: Mapping[str, Cursor],
    first_position: int,
    tokens: Sequence[int] | None,
    needed_by: str,
) -> Loaded:
    """A session of `store` with the state's rows.

    Args:
        storage: an opened root.
        state: which blobs.
        store: must have the state's groups, dtype included.
        cursors: by group id, as in `KVStore.builder`.
        first_position: where the session began.
        tokens: ids that the session remembers.
        needed_by: the document, for messages.

    Raises:
        PackMismatch: the store has other groups. Nothing was made.
        PackMissing, PackCorrupt, PackTooLarge: a blob is not what was named. Nothing was made.
        SnapshotMismatch, LimitReached, MemoryUnavailable: as `KVStore.builder`.
    """
    groups = {group.id: group for group in store.geometry.groups}
    if set(groups) != set(state.groups):
        raise PackMismatch(field="groups", expected=sorted(groups), got=sorted(state.groups))
    builder = store.builder(
        cursors,
        first_position=first_position,
        tokens=None if tokens is None else [tokens],
        ledger=Ledger(
            first_position=first_position,
            canonical=state.canonical,
            numerics=list(state.numerics),
            spans={name: list(rows.spans) for name, rows in state.groups.items()},
        ),
    )
    try:
        tasks = [
            task
            for name, rows in state.groups.items()
            for task in _tasks(Target(groups[name], builder), rows.spans)
        ]
        nbytes = _Reader(storage, builder, needed_by).run(tasks)
        states = read_states(storage, state, needed_by)
    except BaseException:
        builder.abandon()
        raise
    kept = all(builder.cursors[name].as_tuple() == tuple(cursors[name]) for name in groups)
    return Loaded(
        session=builder.finish(),
        states=states,
        num_blobs=len({task.span.blob for task in tasks}),
        nbytes=nbytes,
        kept_rotation=kept,
    )


def _tasks(target: Target, spans: Sequence[Span]) -> list[Task]:
    tasks = []
    for span in spans:
        first, stop = max(span.first, target.live.start), min(span.stop, target.live.stop)
        if first < stop:
            tasks.append(Task(target, span, first, stop))
    return tasks


class _Reader:
    """Reads, hashes and copies blobs: while one thread hashes, another copies."""

    def __init__(self, storage: Storage, builder: SessionBuilder, needed_by: str) -> None:
        self._storage = storage
        self._builder = builder
        self._needed_by = needed_by
        self._memory = ThreadBuffer()

    def run(self, tasks: Sequence[Task]) -> int:
        """The bytes read."""
        by_blob: dict[str, list[Task]] = {}
        for task in tasks:
            by_blob.setdefault(task.span.blob, []).append(task)
        with ThreadPoolExecutor(WORKERS) as pool:
            try:
                nbytes = sum(pool.map(self._read, by_blob.values()))
            finally:
                # nobody writes rows any more once this is left
                pool.shutdown(cancel_futures=True)
        for task in tasks:
            for layer in task.target.group.layers:
                self._builder.filled(layer, task.first, task.stop)
        return nbytes

    def _read(self, tasks: Sequence[Task]) -> int:
        group, blob = tasks[0].target.group, tasks[0].span.blob
        limit = HEADER_NBYTES + PREFIX_NBYTES + BLOCK * len(group.layers) * group.row_nbytes
        path = f"{self._storage.location}/{blob_name(blob)}"
        data = read_blob(
            self._storage, blob, limit=limit, needed_by=self._needed_by, memory=self._memory
        )
        rows = rows_in(data, group, path)
        for task in tasks:
            other = task.target.group
            if other != group:
                raise PackCorrupt(path=path, what=f"is named by {group.id} and by {other.id}")
            if task.span.first < rows.held.start or task.span.stop > rows.held.stop:
                named = f"[{task.span.first}, {task.span.stop})"
                what = f"holds [{rows.held.start}, {rows.held.stop}), not all of {named}"
                raise PackCorrupt(path=path, what=what)
            task.target.take(rows, task.first, task.stop)
        return len(data)


def read_blob(
    storage: Storage,
    blob: str,
    *,
    limit: int,
    needed_by: str,
    memory: Memory = bytearray,
) -> bytearray | memoryview:
    """A blob's bytes, copied and then verified.

    Raises:
        PackMissing: it is not there.
        PackTooLarge: it is longer than `limit`; no memory was taken for it.
        PackCorrupt: its bytes are not those of its name.
    """
    name = blob_name(blob)
    path = f"{storage.location}/{name}"
    try:
        size = storage.size(name)
        if size > limit:
            raise PackTooLarge(what=path, limit=limit, got=size)
        data = memory(size)
        storage.read_into(name, data)
    except StorageMissing as error:
        raise PackMissing(blob=blob, needed_by=needed_by) from error
    check_digest(data, blob, path)
    return data


def read_states(storage: Storage, state: State, needed_by: str) -> dict[str, Tensor]:
    """The states of recurrent and convolution layers, verified: as `read_blob`."""
    if state.states is None:
        return {}
    data = read_blob(storage, state.states, limit=STATES_NBYTES, needed_by=needed_by)
    path = f"{storage.location}/{blob_name(state.states)}"
    header = header_of(data, path)
    check_states(header, state.position, path)
    return {name: torch.clone(tensor) for name, tensor in tensors_of(header, data)}
