"""A session filled off to the side: nobody sees it before all of it is there.

Restore, load and handoff write rows by position into detached planes, in any order; `finish` makes
a session of them in one step, and an abandoned builder leaves no trace.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, SessionClosed, SnapshotMismatch, TensorMismatch
from kvplane.ledger import Ledger
from kvplane.plane import Plane
from kvplane.ring import RingCursor
from kvplane.session import Session
from kvplane.tokens import check_kind, checked_position
from kvplane.touched import Touched

if TYPE_CHECKING:
    from kvplane.store import KVStore


class SessionBuilder:
    """Detached planes at fixed cursors; made by `KVStore.builder`.

    Attributes:
        planes: by layer that owns rows.
        cursors: by group id; what the finished session starts with.
    """

    def __init__(
        self,
        store: "KVStore",
        cursors: Mapping[str, RingCursor],
        *,
        batch: int | None,
        first_position: int,
        tokens: Sequence[Sequence[int]] | None,
        ledger: Ledger,
        parent: Session | None = None,
    ) -> None:
        self.cursors = cursors
        self._store = store
        self._done = False
        self._filled: dict[int, Touched] = {}
        self._num_filled: dict[int, int] = {}
        for group in store.geometry.groups:
            for layer in group.layers:
                self._filled[layer] = Touched()
                self._num_filled[layer] = 0
        num_sequences = 1 if batch is None else batch
        self.arena = store.new_arena(parent)
        try:
            self.planes = store.new_planes(self.arena, num_sequences)
            self._session = Session(
                store,
                self.arena,
                self.planes,
                cursors,
                batch=batch,
                first_position=first_position,
                tokens=None if tokens is None else [list(ids) for ids in tokens],
                ledger=ledger,
            )
            held = store.plan.ring_nbytes + store.plan.full_row_nbytes * (
                self._session.position - first_position
            )
            self._session.charge(held * num_sequences)
        except BaseException:
            self.abandon()
            raise

    def rows(self, layer: int, first: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Writable views of the rows of [first, stop), `[batch, rows, kv_head, dim]`, in order.

        Whoever fills them says so with `filled`.

        Raises:
            EvictedPosition: the cursor does not hold them.
            ArgumentError: the layer has no rows of its own, or these are no positions.
            MemoryUnavailable: their pages cannot be had.
            SessionClosed: the builder was finished or abandoned.
        """
        self._check(layer)
        first, stop = checked_position(first), checked_position(stop)
        return self.planes[layer].spans(self._backed(layer, first, stop))

    def _backed(self, layer: int, first: int, stop: int) -> list[range]:
        name = self._store.plan.group_ids[layer]
        runs = self.cursors[name].rows_of(first, stop)
        plane = self.planes[layer]
        if not plane.span.backed_by_need and not self._num_filled[layer]:
            live = self.cursors[name].live
            for run in self.cursors[name].rows_of(live.start, live.stop):
                plane.span.back(plane.shape.byte_ranges(run))
        for run in runs:
            self._session.touched[name].add(run)
            plane.back(run)
        return runs

    def share(self, layer: int, source: Plane) -> bool:
        """Have all live rows of a layer by sharing another session's pages, if that can be.

        Raises:
            MemoryUnavailable: no further mapping can be had.
            ArgumentError, SessionClosed: as in `rows`.
        """
        self._check(layer)
        check_kind("source", source, Plane, "a plane")
        if source.shape != self.planes[layer].shape:
            raise ArgumentError(argument="source", expected="a plane of this shape", got=source)
        name = self._store.plan.group_ids[layer]
        live = self.cursors[name].live
        runs = self.cursors[name].rows_of(live.start, live.stop)
        if not self.planes[layer].share(source, runs):
            return False
        for run in runs:
            self._session.touched[name].add(run)
        self.filled(layer, live.start, live.stop)
        return True

    def filled(self, layer: int, first: int, stop: int) -> None:
        """Note that the rows of positions [first, stop) of a layer are there.

        Raises:
            ArgumentError, SessionClosed: as in `rows`.
        """
        self._check(layer)
        first, stop = checked_position(first), checked_position(stop)
        if first < stop:
            self._filled[layer].add(range(first, stop))
            self._num_filled[layer] += stop - first

    def write(self, layer: int, first: int, key: Tensor, value: Tensor) -> None:
        """Copy token-major rows `[batch, rows, kv_head, dim]` in from position `first` on.

        Raises:
            TensorMismatch: shape or dtype.
            EvictedPosition: the cursor does not hold them.
            ArgumentError, SessionClosed: as in `rows`.
        """
        self._check(layer)
        first = checked_position(first)
        plane = self.planes[layer]
        check_rows(layer, "key", key, plane.key)
        count = key.shape[1]
        check_rows(layer, "value", value, plane.value)
        if value.shape[1] != count:
            raise TensorMismatch(layer=layer, what="value rows", expected=count, got=value.shape[1])
        runs = self._backed(layer, first, first + count)
        plane.store(runs, key.detach(), value.detach())
        self.filled(layer, first, first + count)

    def finish(self) -> Session:
        """The session, now that every live row is there.

        Raises:
            SnapshotMismatch: rows are missing or were written twice; nothing becomes visible.
            SessionClosed: the builder was finished or abandoned.
        """
        self._check_open()
        for layer, filled in self._filled.items():
            live = self.cursors[self._store.plan.group_ids[layer]].live
            # a row written twice would make up for one that is missing
            if filled.runs != ([live] if live else []) or self._num_filled[layer] != len(live):
                self.abandon()
                raise SnapshotMismatch(
                    field=f"rows of layer {layer}",
                    expected=[live],
                    got=f"{filled.runs}, {self._num_filled[layer]} rows",
                )
        self._store.adopt(self._session)
        self._done = True
        return self._session

    def _check_open(self) -> None:
        if self._done:
            raise SessionClosed(position=self._session.position)

    def _check(self, layer: int) -> None:
        self._check_open()
        if type(layer) is not int or layer not in self.planes:
            raise ArgumentError(argument="layer", expected="one that owns rows", got=layer)

    def abandon(self) -> None:
        """Give the memory back; nothing was visible. Idempotent; nothing once it is finished."""
        if self._done:
            return
        self._done = True
        session = getattr(self, "_session", None)
        if session is not None:
            session.close()
        else:
            self.arena.release()


def check_rows(layer: int, what: str, rows: object, like: Tensor) -> None:
    """Refuse what is not `[batch, rows, kv_head, dim]` in the plane's dtype, strided, with data.

    Raises:
        TensorMismatch: also for a tensor of a device that has no data. Others are copied from.
    """
    expected = f"[{like.shape[0]}, rows, {like.shape[2]}, {like.shape[3]}] {like.dtype}"
    if not isinstance(rows, Tensor):
        raise TensorMismatch(layer=layer, what=what, expected=expected, got=type(rows).__name__)
    same = rows.ndim == like.ndim and rows.dtype == like.dtype and not rows.is_meta
    same = same and rows.layout is torch.strided
    if not same or (rows.shape[0], *rows.shape[2:]) != (like.shape[0], *like.shape[2:]):
        got = f"{list(rows.shape)} {rows.dtype} {rows.layout} on {rows.device}"
        raise TensorMismatch(layer=layer, what=what, expected=expected, got=got)


def forked(store: "KVStore", session: Session) -> Session:
    """A second session with the same rows; `Session.fork` is the public door."""
    count = session.position - session.first_position
    ids = session.ids
    builder = SessionBuilder(
        store,
        {name: cursor.copy() for name, cursor in session.cursors.items()},
        batch=session.batch,
        first_position=session.first_position,
        tokens=None if ids is None else [sequence[:count] for sequence in ids],
        ledger=session.ledger.copy(),
        parent=session,
    )
    try:
        for group in store.geometry.groups:
            live = session.cursors[group.id].live
            runs = session.cursors[group.id].rows_of(live.start, live.stop)
            for layer in group.layers:
                source = session.planes[layer]
                if builder.share(layer, source):
                    continue
                first = live.start
                for key, value in source.spans(runs):
                    builder.write(layer, first, key, value)
                    first += key.shape[1]
    except BaseException:
        builder.abandon()
        raise
    return builder.finish()


def selected(store: "KVStore", session: Session, sequences: list[int]) -> Session:
    """A batch session of some of another's sequences, in that order, each as often as named."""
    count = session.position - session.first_position
    ids = session.ids
    places = torch.tensor(sequences, device=store.plan.device)
    builder = SessionBuilder(
        store,
        {name: cursor.copy() for name, cursor in session.cursors.items()},
        batch=len(sequences),
        first_position=session.first_position,
        tokens=None if ids is None else [ids[place][:count] for place in sequences],
        ledger=session.ledger.copy(),
    )
    try:
        for group in store.geometry.groups:
            runs = session.live_runs(group)
            for layer in group.layers:
                first = session.cursors[group.id].origin_logical
                for key, value in session.planes[layer].spans(runs):
                    rows = key.index_select(0, places), value.index_select(0, places)
                    builder.write(layer, first, *rows)
                    first += key.shape[1]
    except BaseException:
        builder.abandon()
        raise
    return builder.finish()
