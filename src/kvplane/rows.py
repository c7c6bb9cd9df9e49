"""What is done to a session's rows as a whole: rewinding, reordering, emptying, copying out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kvplane.errors import ArgumentError, WindowLost
from kvplane.geometry import LayerGroup
from kvplane.kernels.device import taken_out
from kvplane.ledger import Ledger
from kvplane.ring import RingCursor
from kvplane.snapshot import Snapshot
from kvplane.tokens import check_kind, whole

if TYPE_CHECKING:
    from kvplane.session import Session
    from kvplane.undo import Undo


def rewound(session: "Session", group: LayerGroup, position: int) -> RingCursor:
    """A group's cursor at an earlier position.

    Raises:
        WindowLost: the rows that the next query there needs are neither live nor recorded.
    """
    cursor = session.cursors[group.id].copy()
    if group.sliding_window is None:
        cursor.keep(cursor.origin_logical, position)
        return cursor
    needed = max(session.first_position, position - (group.sliding_window - 1))
    oldest = cursor.origin_logical
    if session.undo is not None:
        oldest = max(session.undo.oldest(layer, oldest) for layer in group.layers)
    if needed < position and oldest > needed:
        stop = min(position, oldest)
        raise WindowLost(position=position, group=group.id, first=needed, stop=stop)
    held = min(cursor.origin_logical, position)
    cursor.keep(held, position)
    if needed < held:
        # the rows from `needed` on are about to be put back
        row, limit = cursor.row_at(needed), cursor.max_context
        cursor = RingCursor(cursor.capacity, position - needed, needed, row, max_context=limit)
    return cursor


def recall(session: "Session", undo: "Undo", cursors: Mapping[str, RingCursor]) -> None:
    """Put the recorded rows back that rewound cursors hold.

    An interrupt in the middle leaves the session empty.

    Raises:
        MemoryUnavailable: their pages cannot be had. Nothing was changed.
    """
    for group in session.groups:
        now, then = session.cursors[group.id], cursors[group.id]
        stop = min(now.origin_logical, then.next_position)
        if then.origin_logical < stop:
            # another session may have these pages too
            session.back(group, then.rows_of(then.origin_logical, stop))
    try:
        for group in session.groups:
            for layer in group.layers:
                undo.put_back(layer, session.planes[layer], cursors[group.id])
    except BaseException:
        spoil(session)
        raise


def cut(session: "Session", position: int, cursors: Mapping[str, RingCursor]) -> None:
    """Make `position` the next one; the cursors hold what is left."""
    freed = (session.position - position) * session.plan.full_row_nbytes * session.num_sequences
    for checkpoint in list(session.checkpoints):
        if checkpoint.position > position and checkpoint.holds is None:
            checkpoint.lost_by = position
    session.ledger.cut(position)
    session.captures = {at: kept for at, kept in session.captures.items() if at <= position}
    session.marks = {at for at in session.marks if at <= position}
    session.cursors = cursors
    session.charge(-freed)


def spoil(session: "Session") -> None:
    """Empty a session whose rows are half moved: they are no longer what its cursors say."""
    if session.undo is not None:
        session.undo.clear()
    cut(session, session.first_position, session.plan.cursors(session.first_position, 0))


def checked_sequences(
    session: "Session", sequences: Sequence[int], *, num_sequences: int | None = None
) -> list[int]:
    """Places of a session's batch, checked: ArgumentError."""
    check_kind("sequences", sequences, Sequence, "a sequence")
    places = [whole(place) for place in sequences]
    batch = session.num_sequences
    wanted = f"sequences within [0, {batch})"
    if num_sequences is not None:
        wanted = f"{num_sequences} {wanted}"
    good = [place for place in places if place is not None and 0 <= place < batch]
    if not good or len(good) < len(places) or (num_sequences or len(good)) != len(good):
        raise ArgumentError(argument="sequences", expected=wanted, got=sequences)
    return good


def reorder(session: "Session", sequences: list[int]) -> None:
    """Copy the live rows of `sequences[i]` to place i, in every plane.

    An interrupt in the middle leaves the session empty.
    """
    places = torch.tensor(sequences, device=session.plan.device)
    for group in session.groups:
        # all memory is had before any row changes
        session.back(group, session.live_runs(group))
    try:
        for group in session.groups:
            runs = session.live_runs(group)
            for layer in group.layers:
                for key, value in session.planes[layer].spans(runs):
                    key.copy_(key.index_select(0, places))
                    value.copy_(value.index_select(0, places))
        if session.ids is not None:
            session.ids = [list(session.ids[place]) for place in sequences]
    except BaseException:
        spoil(session)
        raise
    if session.undo is not None:
        session.undo.clear()


def empty(session: "Session", first_position: int) -> None:
    """Let go of every row and place, with row 0 of every ring next; the memory stays."""
    for checkpoint in list(session.checkpoints):
        checkpoint.lost_by = first_position
    if session.undo is not None:
        session.undo.clear()
    session.first_position = first_position
    session.ledger = Ledger(first_position=first_position)
    session.captures = {}
    session.marks = set()
    session.cursors = session.plan.cursors(first_position, 0)


def detached(session: "Session", device: torch.device | str) -> Snapshot:
    """A snapshot of the session as it is."""
    live = {
        layer: (session.planes[layer], session.live_runs(group))
        for group in session.groups
        for layer in group.layers
    }
    taken = taken_out([(plane, plane.runs(runs)) for plane, runs in live.values()], device)
    if taken is not None:
        rows = dict(zip(live, taken, strict=True))
    else:
        rows = {}
        for layer, (plane, runs) in live.items():
            key, value = plane.copy_of(runs)
            rows[layer] = (key.to(device), value.to(device))
    count = session.position - session.first_position
    ids = session.ids
    return Snapshot(
        geometry=session.geometry,
        dtype=session.plan.dtype,
        position=session.position,
        first_position=session.first_position,
        batch=session.batch,
        tokens=None if ids is None else tuple(tuple(sequence[:count]) for sequence in ids),
        cursors={name: cursor.as_tuple() for name, cursor in session.cursors.items()},
        rows=rows,
        numerics=tuple(session.ledger.numerics),
        canonical=session.ledger.canonical,
    )
