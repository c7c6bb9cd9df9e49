"""A snapshot in a store: as a new session, or in the memory of one that is there."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kvplane.builder import check_rows
from kvplane.errors import ArgumentError, SnapshotMismatch, TensorMismatch
from kvplane.ledger import Ledger
from kvplane.plan import StorePlan
from kvplane.ring import RingCursor
from kvplane.rows import empty
from kvplane.session import Session
from kvplane.snapshot import Cursor, Snapshot
from kvplane.tokens import check_kind

if TYPE_CHECKING:
    from kvplane.store import KVStore

FIELDS = "(capacity, length, origin_logical, origin_physical)"


def adapted(
    plan: StorePlan,
    cursors: Mapping[str, Cursor],
    *,
    first_position: int,
    any_capacity: bool,
) -> dict[str, RingCursor]:
    """Cursors from elsewhere, in this store's planes.

    Raises:
        SnapshotMismatch: another set of groups, positions that disagree or do not fit, rows
            missing that the next token needs, a ring of another capacity where rotation matters.
    """
    groups = {group.id: group for group in plan.geometry.groups}
    check_kind("cursors", cursors, Mapping, "a mapping")
    if cursors.keys() != groups.keys():
        got = sorted(map(str, cursors))
        raise SnapshotMismatch(field="groups", expected=sorted(groups), got=got)
    result = {}
    for name, group in groups.items():
        check_kind("cursors", cursors[name], Sequence, FIELDS)
        if len(cursors[name]) != 4:  # noqa: PLR2004 - the fields named beside it
            raise SnapshotMismatch(field="cursor", expected=FIELDS, got=cursors[name])
        given = RingCursor(*cursors[name])
        capacity, position = plan.capacities[name], given.next_position
        if position > plan.max_context:
            expected = f"at most {plan.max_context}"
            raise SnapshotMismatch(field="position", expected=expected, got=position)
        oldest = first_position
        if group.sliding_window is not None:
            oldest = max(first_position, position - (group.sliding_window - 1))
        if not first_position <= given.origin_logical <= oldest:
            expected = f"from within [{first_position}, {oldest}] on"
            raise SnapshotMismatch(field=f"rows of {name}", expected=expected, got=given.live)
        if given.capacity == capacity:
            given.max_context = plan.max_context
            result[name] = given
            continue
        if group.sliding_window is not None and not any_capacity:
            field = f"capacity of {name}"
            raise SnapshotMismatch(field=field, expected=capacity, got=given.capacity)
        # the newest rows, where a session born at 0 holds them
        length = min(given.length, capacity)
        origin = position - length
        row = divmod(origin, capacity)[1]
        result[name] = RingCursor(capacity, length, origin, row, max_context=plan.max_context)
    positions = {cursor.next_position for cursor in result.values()}
    if len(positions) != 1:
        raise SnapshotMismatch(field="position", expected="one", got=sorted(positions))
    return result


def restored(store: "KVStore", snapshot: Snapshot) -> Session:
    """A new session of a snapshot; `KVStore.restore` is the public door."""
    _check(store, snapshot)
    builder = store.builder(
        snapshot.cursors,
        batch=snapshot.batch,
        first_position=snapshot.first_position,
        tokens=snapshot.tokens,
        ledger=_ledger(snapshot),
    )
    try:
        for layer, (key, value) in snapshot.rows.items():
            cursor = builder.cursors[store.plan.group_ids[layer]]
            kept = slice(key.shape[1] - cursor.length, None)
            builder.write(layer, cursor.origin_logical, key[:, kept], value[:, kept])
    except BaseException:
        builder.abandon()
        raise
    return builder.finish()


def refilled(store: "KVStore", snapshot: Snapshot, session: Session) -> Session:
    """A session with a snapshot's rows in place of its own, in the memory it has.

    Everything that can be refused is refused before a row changes; an interrupt in the middle
    leaves the session empty.
    """
    if session.store is not store:
        raise ArgumentError(argument="into", expected="a session of this store", got=session)
    with session.guard:
        session.check_writable("a restore")
        session.check_idle()
        _check(store, snapshot)
        if session.batch != snapshot.batch:
            raise SnapshotMismatch(field="batch", expected=session.batch, got=snapshot.batch)
        cursors = adapted(
            store.plan,
            snapshot.cursors,
            first_position=snapshot.first_position,
            any_capacity=store.attention != "physical",
        )
        rows = _checked_rows(session, snapshot, cursors)
        held = (snapshot.position - snapshot.first_position) * store.plan.full_row_nbytes
        held *= session.num_sequences
        more = held - session.full_nbytes
        session.charge(more)
        try:
            for group in session.groups:
                session.back(group, _runs(cursors[group.id]))
        except BaseException:
            session.charge(-more)
            raise
        empty(session, snapshot.first_position)
        try:
            for layer, (key, value) in rows.items():
                runs = _runs(cursors[store.plan.group_ids[layer]])
                session.planes[layer].store(runs, key, value)
        except BaseException:
            session.charge(-held)
            raise
        session.ids = None
        if snapshot.tokens is not None:
            session.ids = [list(ids) for ids in snapshot.tokens]
        session.ledger = _ledger(snapshot)
        # the one moment at which the rows are there
        session.cursors = cursors
    return session


def _check(store: "KVStore", snapshot: Snapshot) -> None:
    if snapshot.geometry != store.geometry:
        raise SnapshotMismatch(field="geometry", expected=store.geometry, got=snapshot.geometry)
    if snapshot.dtype != store.dtype:
        raise SnapshotMismatch(field="dtype", expected=store.dtype, got=snapshot.dtype)


def _checked_rows(
    session: Session, snapshot: Snapshot, cursors: Mapping[str, RingCursor]
) -> dict[int, tuple[Tensor, Tensor]]:
    """The newest rows of each layer, as many as its cursor holds."""
    if snapshot.rows.keys() != session.planes.keys():
        expected, got = sorted(session.planes), sorted(snapshot.rows)
        raise SnapshotMismatch(field="layers with rows", expected=expected, got=got)
    rows = {}
    for layer, (key, value) in snapshot.rows.items():
        plane = session.planes[layer]
        check_rows(layer, "key", key, plane.key)
        check_rows(layer, "value", value, plane.value)
        length = cursors[session.plan.group_ids[layer]].length
        for what, part in (("key", key), ("value", value)):
            count = part.shape[1]
            if count < length or count != key.shape[1]:
                wanted = max(length, key.shape[1])
                raise TensorMismatch(layer=layer, what=f"{what} rows", expected=wanted, got=count)
        kept = slice(key.shape[1] - length, None)
        rows[layer] = (key[:, kept].detach(), value[:, kept].detach())
    return rows


def _runs(cursor: RingCursor) -> list[range]:
    return cursor.rows_of(cursor.live.start, cursor.live.stop)


def _ledger(snapshot: Snapshot) -> Ledger:
    return Ledger(
        first_position=snapshot.first_position,
        canonical=snapshot.canonical,
        numerics=list(snapshot.numerics),
    )
