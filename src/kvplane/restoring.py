"""A snapshot in a store: as a new session, or in the memory of one that is there."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvplane.builder import check_rows
from kvplane.errors import ArgumentError, SnapshotMismatch, TensorMismatch
from kvplane.ledger import Ledger
from kvplane.plan import StorePlan, check_count
from kvplane.plane import Plane
from kvplane.ring import RingCursor
from kvplane.rows import empty
from kvplane.session import Session
from kvplane.snapshot import Cursor, Snapshot
from kvplane.tokens import check_kind, checked_ids, whole

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
        rows = _checked_rows(builder.planes, snapshot)
        # large planes first: they are on their way to a GPU while the small ones are prepared
        for layer, (key, value) in sorted(rows.items(), key=lambda pair: -pair[1][0].nbytes):
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
        rows = _checked_rows(session.planes, snapshot)
        count = snapshot.position - snapshot.first_position
        ids = checked_ids(snapshot.tokens, num_sequences=session.num_sequences, num_tokens=count)
        ledger = _ledger(snapshot)
        held = count * store.plan.full_row_nbytes * session.num_sequences
        more = held - session.full_nbytes
        session.charge(max(0, more))
        try:
            for group in session.groups:
                session.back(group, _runs(cursors[group.id]))
        except BaseException:
            session.charge(-max(0, more))
            raise
        # what is given back comes last: another session may take it at once
        session.charge(min(0, more))
        empty(session, snapshot.first_position)
        try:
            for layer, (key, value) in rows.items():
                cursor = cursors[store.plan.group_ids[layer]]
                kept = slice(key.shape[1] - cursor.length, None)
                session.planes[layer].store(_runs(cursor), key[:, kept], value[:, kept])
        except BaseException:
            session.charge(-held)
            raise
        session.ids = ids
        session.ledger = ledger
        # the one moment at which the rows are there
        session.cursors = cursors
    return session


def _check(store: "KVStore", snapshot: Snapshot) -> None:
    """Refuse a snapshot of another store, or whose fields do not belong together."""
    _same("geometry", store.geometry, snapshot.geometry)
    _same("dtype", store.dtype, snapshot.dtype)
    position = check_count("position", snapshot.position, 0)
    check_count("first_position", snapshot.first_position, 0)
    if snapshot.batch is not None:
        check_count("batch", snapshot.batch, 1)
    check_kind("cursors", snapshot.cursors, Mapping, "a mapping")
    cursors: Mapping[str, Any] = snapshot.cursors
    for cursor in cursors.values():
        # what else is wrong with a cursor is said when it is made
        if isinstance(cursor, Sequence) and len(cursor) == len(FIELDS.split()):
            _same("position", cursor[1] + cursor[2], position)


def _same(field: str, expected: object, got: object) -> None:
    if type(expected) is not type(got) or expected != got:
        raise SnapshotMismatch(field=field, expected=expected, got=got)


def _checked_rows(
    planes: Mapping[int, Plane], snapshot: Snapshot
) -> dict[int, tuple[Tensor, Tensor]]:
    """Every layer's rows, as many as the snapshot's cursor says."""
    check_kind("rows", snapshot.rows, Mapping, "a key and a value by layer")
    if snapshot.rows.keys() != planes.keys():
        expected, got = sorted(planes), sorted(map(str, snapshot.rows))
        raise SnapshotMismatch(field="layers with rows", expected=expected, got=got)
    rows = {}
    for layer, plane in planes.items():
        pair = snapshot.rows[layer]
        check_kind("rows", pair, Sequence, "a key and a value by layer")
        _same(f"tensors of layer {layer}", 2, len(pair))
        length = snapshot.cursors[snapshot.geometry.group_of(layer).id][1]
        for what, part, like in zip(("key", "value"), pair, (plane.key, plane.value), strict=True):
            check_rows(layer, what, part, like)
            count = part.shape[1]
            if count != length:
                raise TensorMismatch(layer=layer, what=f"{what} rows", expected=length, got=count)
        rows[layer] = (pair[0].detach(), pair[1].detach())
    return rows


def _runs(cursor: RingCursor) -> list[range]:
    return cursor.rows_of(cursor.live.start, cursor.live.stop)


def _ledger(snapshot: Snapshot) -> Ledger:
    """The provenance a snapshot brings: SnapshotMismatch when it is not of its rows."""
    runs: Sequence[Any] = snapshot.numerics
    canonical = whole(snapshot.canonical)
    check_kind("numerics", runs, Sequence, "(stop, numerics) runs")
    stops = [snapshot.first_position]
    for run in runs:
        check_kind("numerics", run, Sequence, "(stop, numerics) runs")
        stop = whole(run[0]) if len(run) == len(("stop", "numerics")) else None
        if stop is None or not stops[-1] < stop <= snapshot.position:
            expected = f"ascending stops up to {snapshot.position}"
            raise SnapshotMismatch(field="numerics", expected=expected, got=runs)
        check_kind("numerics", run[1], Mapping, "(stop, numerics) runs")
        check_count("chunk", run[1].get("chunk"), 1)
        stops.append(stop)
    if canonical is None or not 0 <= canonical <= (stops[-1] if runs else 0):
        expected = f"within [0, {stops[-1]}]"
        raise SnapshotMismatch(field="canonical", expected=expected, got=snapshot.canonical)
    return Ledger(first_position=snapshot.first_position, canonical=canonical, numerics=list(runs))
