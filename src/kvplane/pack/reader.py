"""Blobs into a session: copied, then verified on the copy, and visible when all of it is right."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvplane.builder import SessionBuilder
from kvplane.errors import PackCorrupt, PackMismatch, PackMissing, PackTooLarge, StorageMissing
from kvplane.geometry import LayerGroup
from kvplane.ledger import Ledger, Span
from kvplane.pack.blob import blob_name, check_digest, check_rows, header_of, tensors_of
from kvplane.pack.documents import State
from kvplane.pack.limits import BLOCK, HEADER_NBYTES
from kvplane.session import Session
from kvplane.snapshot import Cursor
from kvplane.storage import Storage
from kvplane.store import KVStore

WORKERS = 2
STATES_NBYTES = 1 << 34


class Task(NamedTuple):
    """Rows to read out of one blob."""

    group: LayerGroup
    span: Span
    first: int
    stop: int


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
    tokens: Sequence[int] | None,
    needed_by: str,
) -> Loaded:
    """A session of `store` with the state's rows.

    Args:
        storage: an opened root.
        state: which blobs.
        store: must have the state's groups, dtype included.
        cursors: by group id, as in `KVStore.builder`.
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
    first_position = min(rows.first for rows in state.groups.values())
    sliding_only = all(group.is_sliding for group in groups.values())
    builder = store.builder(
        cursors,
        first_position=0 if sliding_only else first_position,
        tokens=None if tokens is None else [tokens],
        ledger=Ledger(
            first_position=0 if sliding_only else first_position,
            canonical=state.canonical,
            numerics=list(state.numerics),
            spans={name: list(rows.spans) for name, rows in state.groups.items()},
        ),
    )
    try:
        tasks = [
            task
            for name, rows in state.groups.items()
            for task in _tasks(groups[name], rows.spans, builder)
        ]
        with closing(_Reader(storage, builder, needed_by)) as reader:
            nbytes = reader.run(tasks)
        states = {} if state.states is None else read_states(storage, state, needed_by)
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


def _tasks(group: LayerGroup, spans: Sequence[Span], builder: SessionBuilder) -> list[Task]:
    live = builder.cursors[group.id].live
    tasks = []
    for span in spans:
        first, stop = max(span.first, live.start), min(span.stop, live.stop)
        if first < stop:
            tasks.append(Task(group, span, first, stop))
            for layer in group.layers:
                # pages are had here, in one thread, before any reader writes to them
                builder.rows(layer, first, stop)
    return tasks


class _Reader:
    """Reads, hashes and copies blobs in a few threads."""

    def __init__(self, storage: Storage, builder: SessionBuilder, needed_by: str) -> None:
        self._storage = storage
        self._builder = builder
        self._needed_by = needed_by
        self._pool = ThreadPoolExecutor(WORKERS)

    def run(self, tasks: Sequence[Task]) -> int:
        """The bytes read."""
        by_blob: dict[str, list[Task]] = {}
        for task in tasks:
            by_blob.setdefault(task.span.blob, []).append(task)
        nbytes = sum(self._pool.map(self._read, by_blob.values()))
        for task in tasks:
            for layer in task.group.layers:
                self._builder.filled(layer, task.stop - task.first)
        return nbytes

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, tasks: Sequence[Task]) -> int:
        group, blob = tasks[0].group, tasks[0].span.blob
        limit = HEADER_NBYTES + 8 + BLOCK * len(group.layers) * group.row_nbytes
        path = f"{self._storage.location}/{blob_name(blob)}"
        data = read_blob(self._storage, blob, limit=limit, needed_by=self._needed_by)
        header = header_of(data, path)
        held = check_rows(header, group, path)
        tensors = dict(tensors_of(header, data))
        for task in tasks:
            if task.span.first < held.start or task.span.stop > held.stop:
                what = f"holds positions [{held.start}, {held.stop}), not all of {task.span[:2]}"
                raise PackCorrupt(path=path, what=what)
            part = slice(task.first - held.start, task.stop - held.start)
            for layer in group.layers:
                at = 0
                key = tensors[f"layers.{layer}.key"][part]
                value = tensors[f"layers.{layer}.value"][part]
                for keys, values in self._builder.rows(layer, task.first, task.stop):
                    count = keys.shape[1]
                    keys[0].copy_(key[at : at + count])
                    values[0].copy_(value[at : at + count])
                    at += count
        return len(data)


def read_blob(storage: Storage, blob: str, *, limit: int, needed_by: str) -> bytearray:
    """A blob's bytes, copied and then verified: PackMissing, PackTooLarge, PackCorrupt."""
    name = blob_name(blob)
    path = f"{storage.location}/{name}"
    try:
        size = storage.size(name)
        if size > limit:
            raise PackTooLarge(what=path, limit=limit, got=size)
        data = bytearray(size)
        storage.read_into(name, data)
    except StorageMissing as error:
        raise PackMissing(blob=blob, needed_by=needed_by) from error
    check_digest(data, blob, path)
    return data


def read_states(storage: Storage, state: State, needed_by: str) -> dict[str, Tensor]:
    """The states of recurrent and convolution layers, verified: as `read_blob`."""
    blob = state.states or ""
    data = read_blob(storage, blob, limit=STATES_NBYTES, needed_by=needed_by)
    path = f"{storage.location}/{blob_name(blob)}"
    header = header_of(data, path)
    expected = {"codec": "raw", "format": 1, "group": "state", "position": state.position}
    if header.metadata != expected:
        raise PackCorrupt(path=path, what="holds no states of this position")
    return {name: torch.clone(tensor) for name, tensor in tensors_of(header, data)}
