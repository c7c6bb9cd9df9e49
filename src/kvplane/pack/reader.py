"""Blobs into a session: copied, then verified on the copy, and visible when all of it is right."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvplane.builder import SessionBuilder
from kvplane.errors import PackCorrupt, PackMismatch, PackMissing, PackTooLarge, StorageMissing
from kvplane.ledger import Ledger
from kvplane.pack.blob import (
    blob_name,
    check_digest,
    check_rows,
    check_states,
    header_limit,
    header_of,
    tensors_of,
)
from kvplane.pack.buffers import ThreadBuffer
from kvplane.pack.encoding import digest
from kvplane.pack.lease import Lease
from kvplane.pack.limits import BLOCK, STATES_NBYTES, WORKERS
from kvplane.pack.parallel import mapped
from kvplane.pack.state import State
from kvplane.pack.stream import copied
from kvplane.pack.target import Target, Task, tasks_of
from kvplane.pack.zstd_bytes import is_packed, unpacked
from kvplane.session import Session
from kvplane.snapshot import Cursor
from kvplane.storage import Reading, Storage
from kvplane.storage.memory import MemoryReading
from kvplane.store import KVStore


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
            for task in tasks_of(Target(groups[name], builder), rows.spans)
        ]
        with Lease(storage) as lease:
            nbytes = _Reader(storage, builder, needed_by, lease).run(tasks)
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


class _Reader:
    """Reads blobs into planes: while one thread hashes, another copies."""

    def __init__(
        self, storage: Storage, builder: SessionBuilder, needed_by: str, lease: Lease
    ) -> None:
        self._storage = storage
        self._lease = lease
        self._builder = builder
        self._needed_by = needed_by
        self._memory = ThreadBuffer()

    def run(self, tasks: Sequence[Task]) -> int:
        """The bytes read."""
        by_blob: dict[str, list[Task]] = {}
        for task in tasks:
            by_blob.setdefault(task.span.blob, []).append(task)
        nbytes = sum(mapped(self._storage, self._read, by_blob.values(), least=WORKERS))
        for task in tasks:
            for layer in task.target.group.layers:
                self._builder.filled(layer, task.first, task.stop)
        return nbytes

    def _read(self, tasks: Sequence[Task]) -> int:
        self._lease.keep()
        group, blob = tasks[0].target.group, tasks[0].span.blob
        limit = header_limit(group) + BLOCK * len(group.layers) * group.row_nbytes
        with opened(self._storage, blob, limit=limit, needed_by=self._needed_by) as file:
            if not copied(file, blob, group, tasks, self._memory):
                self._look_again(file, blob, tasks, limit)
            return file.nbytes

    def _look_again(self, file: Reading, blob: str, tasks: Sequence[Task], limit: int) -> None:
        """Copy a packed blob's rows, or say why a blob is not what its name and its tasks say.

        Raises:
            PackCorrupt, PackTooLarge, PackVersion: it is not.
            ExtraMissing: it is packed, and zstandard is not installed.
        """
        path = f"{self._storage.location}/{blob_name(blob)}"
        data = bytearray(file.nbytes)
        file.read_into(data)
        check_digest(data, blob, path)
        if is_packed(data):
            data = unpacked(data, path, limit=limit)
            group = tasks[0].target.group
            raw = MemoryReading(path, data)
            if copied(raw, digest(data).hex(), group, tasks, self._memory):
                return
        header = header_of(data, path)
        for task in tasks:
            held = check_rows(header, task.target.group, path)
            if task.span.first < held.start or task.span.stop > held.stop:
                named = f"[{task.span.first}, {task.span.stop})"
                what = f"holds [{held.start}, {held.stop}), not all of {named}"
                raise PackCorrupt(path=path, what=what)
        raise PackCorrupt(path=path, what="changed while it was read")


@contextmanager
def opened(storage: Storage, blob: str, *, limit: int, needed_by: str) -> Iterator[Reading]:
    """A blob's file, once its size is known to be allowed: as `read_blob`."""
    name = blob_name(blob)
    try:
        with storage.reading(name) as file:
            if file.nbytes > limit:
                path = f"{storage.location}/{name}"
                raise PackTooLarge(what=path, limit=limit, got=file.nbytes)
            yield file
    except StorageMissing as error:
        raise PackMissing(blob=blob, needed_by=needed_by) from error


def read_blob(storage: Storage, blob: str, *, limit: int, needed_by: str) -> bytearray:
    """A blob's bytes, copied and then verified; of a packed one the raw blob.

    Raises:
        PackMissing: it is not there.
        PackTooLarge: it is longer than `limit`; no memory was taken for it.
        PackCorrupt: its bytes are not those of its name.
        ExtraMissing: it is packed, and zstandard is not installed.
    """
    with opened(storage, blob, limit=limit, needed_by=needed_by) as file:
        data = bytearray(file.nbytes)
        file.read_into(data)
    path = f"{storage.location}/{blob_name(blob)}"
    check_digest(data, blob, path)
    return unpacked(data, path, limit=limit) if is_packed(data) else data


def read_states(storage: Storage, state: State, needed_by: str) -> dict[str, Tensor]:
    """The states of recurrent and convolution layers, verified: as `read_blob`."""
    if state.states is None:
        return {}
    data = read_blob(storage, state.states, limit=STATES_NBYTES, needed_by=needed_by)
    path = f"{storage.location}/{blob_name(state.states)}"
    header = header_of(data, path)
    check_states(header, state.position, path)
    return {name: torch.clone(tensor) for name, tensor in tensors_of(header, data)}
