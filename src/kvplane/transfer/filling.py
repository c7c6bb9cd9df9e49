"""Where a receiver's rows go: detached planes, verified on another thread as more arrive."""

import queue
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from kvplane.builder import SessionBuilder
from kvplane.errors import SnapshotMismatch
from kvplane.ledger import Ledger
from kvplane.ring import RingCursor
from kvplane.session import Session
from kvplane.store import KVStore
from kvplane.transfer.agreement import check_opening
from kvplane.transfer.errors import TransferCorrupt, TransferRefused
from kvplane.transfer.frames import Frame, Place
from kvplane.transfer.held import Held, deepest, first_rows
from kvplane.transfer.opening import Opening
from kvplane.transfer.planes import PlaneBytes, is_direct, layers_of, stored
from kvplane.transfer.schedule import Segment

# segments that wait, arrived, to be verified or copied
WAITING = 3
WORKERS = 1


class Filling:
    """Takes one transfer into a store; nothing is visible before `finish`.

    A segment that comes again goes to the same place: when its bytes are others, all is refused.

    Args:
        store: where the session will be.
        fingerprint: parts of the model's that will go on.
        held: sessions of the store whose beginnings need not be sent.
    """

    def __init__(
        self,
        store: KVStore,
        *,
        fingerprint: Mapping[str, Any] | None,
        held: Sequence[Session] = (),
    ) -> None:
        self.session: Session | None = None
        self.held = Held(0, None, "")
        self.kept_rotation = True
        self._store = store
        self._fingerprint = fingerprint
        self._sessions = held
        self._builder: SessionBuilder | None = None
        self._opening: Opening | None = None
        self._key = b""
        self._ids: bytes | None = None
        self._digests: dict[int, bytes] = {}
        self._segments: dict[int, Segment] = {}
        self._planes: dict[int, PlaneBytes] = {}
        self._pool = ThreadPoolExecutor(WORKERS)
        self._under_way: deque[Future[None]] = deque()
        self._spare: queue.SimpleQueue[np.ndarray[Any, Any] | None]
        self._refill()

    def is_for(self, store: KVStore, fingerprint: Mapping[str, Any] | None) -> bool:
        """Whether this is of a store and a model."""
        return (store, fingerprint) == (self._store, self._fingerprint)

    def _refill(self) -> None:
        self._spare = queue.SimpleQueue()
        for _ in range(WAITING):
            self._spare.put(None)

    @property
    def finished(self) -> Session:
        """The session: TransferCorrupt before `finish`."""
        if self.session is None:
            raise TransferCorrupt(what="nothing came")
        return self.session

    def consider(self, opening: Opening) -> None:
        """As in `Taker`."""
        check_opening(
            opening,
            self._store.geometry,
            fingerprint=self._fingerprint,
            max_context=self._store.max_context,
        )

    def begin(self, opening: Opening, ids: bytes | None, key: bytes) -> tuple[int, str]:
        """As in `Taker`."""
        if self._builder is not None and (key, ids) == (self._key, self._ids):
            # the same handoff once more: what has come is still here
            return self.held.cut, self.held.reason
        self._drop()
        self._opening, self._key, self._ids = opening, key, ids
        self.held = deepest(opening, ids, self._sessions)
        cursors = self._cursors(opening)
        exact = opening.geometry.dtype == self._store.geometry.dtype
        try:
            builder = self._store.builder(
                cursors,
                first_position=opening.first_position,
                tokens=None if ids is None else [np.frombuffer(ids, "<u4").tolist()],
                ledger=Ledger(
                    first_position=opening.first_position,
                    # rows of another dtype are nobody's cold run
                    canonical=opening.canonical if exact else 0,
                    numerics=list(opening.numerics),
                ),
            )
        except SnapshotMismatch as error:
            raise TransferRefused(
                field=error.field, expected=error.expected, got=error.got
            ) from error
        self._builder = builder
        self.kept_rotation = all(
            builder.cursors[name].as_tuple() == tuple(cursor) for name, cursor in cursors.items()
        )
        self._planes = {
            layer: PlaneBytes(plane) for layer, plane in builder.planes.items() if is_direct(plane)
        }
        if self.held.session is not None:
            self._copy(self.held.session, builder)
        return self.held.cut, self.held.reason

    def before(self) -> dict[int, bytes]:
        """As in `Taker`."""
        return dict(self._digests)

    def _cursors(self, opening: Opening) -> dict[str, tuple[int, int, int, int]]:
        """The sender's cursors, by the store's names for the groups, from the first row at hand."""
        firsts = first_rows(opening, self.held)
        found = {}
        for mine, theirs in zip(self._store.geometry.groups, opening.geometry.groups, strict=True):
            cursor = RingCursor(*opening.cursors[theirs.id])
            first = firsts[theirs.id]
            row = cursor.row_at(first)
            found[mine.id] = (cursor.capacity, opening.position - first, first, row)
        return found

    def _copy(self, session: Session, builder: SessionBuilder) -> None:
        """Copy the rows that are not sent from the session that has them."""
        with session.guard:
            session.check_open()
            for group in session.groups:
                first, stop = builder.cursors[group.id].origin_logical, self.held.cut
                if first >= stop:
                    continue
                runs = session.cursors[group.id].rows_of(first, stop)
                for layer in group.layers:
                    at = first
                    for key, value in session.planes[layer].spans(runs):
                        builder.write(layer, at, key, value)
                        at += key.shape[1]

    def _layout(self, segment: Segment) -> str:
        return "" if self._opening is None else self._opening.layouts[segment.group.id]

    def _is_direct(self, segment: Segment) -> bool:
        plan = self._store.plan
        return (
            all(layer in self._planes for layer in segment.layers)
            and self._layout(segment) == plan.layouts[segment.group.kind].value
            and segment.group.dtype == plan.geometry.dtype
        )

    def place(self, segment: Segment) -> Place:
        """As in `Taker`."""
        for layer in segment.layers:
            # their pages are there from here on
            self._made().rows(layer, segment.first, segment.stop)
        if not self._is_direct(segment):
            spare = self._spare.get()
            if spare is None or spare.nbytes < segment.nbytes:
                spare = np.empty(segment.nbytes, dtype=np.uint8)
            return [spare.data[: segment.nbytes]]
        return [
            part
            for layer in segment.layers
            for part in self._planes[layer].pieces(self._runs(layer, segment))
        ]

    def _runs(self, layer: int, segment: Segment) -> list[range]:
        """The rows of a segment's positions."""
        cursor = self._made().cursors[self._store.plan.group_ids[layer]]
        return cursor.rows_of(segment.first, segment.stop)

    def _made(self) -> SessionBuilder:
        if self._builder is None:
            raise TransferCorrupt(what="no opening came")
        return self._builder

    def arrived(self, segment: Segment, frame: Frame) -> None:
        """As in `Taker`; what was found wrong with earlier ones is raised here too."""
        keep = self._check if self._is_direct(segment) else self._store_rows
        self._under_way.append(self._pool.submit(keep, segment, frame))
        self._segments[segment.number] = segment
        self._digests[segment.number] = frame.digest
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()

    def _check(self, segment: Segment, frame: Frame) -> None:
        """Verify rows that lie where they belong."""
        del segment
        frame.check(self._key)

    def _store_rows(self, segment: Segment, frame: Frame) -> None:
        """Verify rows that lie elsewhere, and copy them to where they belong."""
        data = np.frombuffer(frame.body[0], dtype=np.uint8)
        try:
            frame.check(self._key)
            parts = layers_of(torch.from_numpy(data), len(segment.layers))
            for layer, rows in zip(segment.layers, parts, strict=True):
                stored(
                    self._made().planes[layer],
                    self._runs(layer, segment),
                    rows,
                    segment.group,
                    layout=self._layout(segment),
                )
        finally:
            self._spare.put(data)

    def finish(self) -> int:
        """As in `Taker`."""
        self.settle()
        self._pool.shutdown()
        builder = self._made()
        for segment in self._segments.values():
            for layer in segment.layers:
                builder.filled(layer, segment.first, segment.stop)
        self.session = builder.finish()
        self._builder = None
        return self.session.position - self.session.first_position

    def settle(self) -> None:
        """Wait until all that has come is verified: TransferCorrupt."""
        while self._under_way:
            self._under_way.popleft().result()
        # whatever was to hold a segment that did not come is not waited for
        self._refill()

    def _drop(self) -> None:
        """Give back what came of a handoff that is not gone on with."""
        if self._builder is not None:
            self._builder.abandon()
            self._builder = None
        self._segments.clear()
        self._digests.clear()

    def abandon(self) -> None:
        """Give everything back; a finished session is closed. Idempotent."""
        self._pool.shutdown(cancel_futures=True)
        self._drop()
        if self.session is not None:
            self.session.close()
