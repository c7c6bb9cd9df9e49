"""Places to return to within one session."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from torch import Tensor

from kvplane.ledger import Ledger
from kvplane.memory import Hold
from kvplane.ring import RingCursor
from kvplane.rows import spoil
from kvplane.snapshot import Capture, Cursor

if TYPE_CHECKING:
    from kvplane.session import Session


class Checkpoint:
    """A place to return to: copies of the rings' rows, and a share of the full planes' pages.

    Made by `Session.checkpoint`. Where pages cannot be shared it is valid until a rewind below
    it: its full rows may then be another branch's.
    """

    __slots__ = (
        "__weakref__",
        "captures",
        "cursors",
        "holds",
        "ids",
        "ledger",
        "lost_by",
        "marks",
        "owner",
        "position",
        "rows",
    )

    def __init__(
        self,
        owner: object,
        position: int,
        cursors: Mapping[str, Cursor],
        rows: Mapping[int, tuple[Tensor, Tensor]],
        holds: Mapping[int, Hold] | None,
        ids: Sequence[list[int]] | None,
        ledger: Ledger,
        captures: Mapping[int, Capture],
        marks: AbstractSet[int],
    ) -> None:
        self.owner = owner
        self.holds = holds
        self.ids = ids
        self.ledger = ledger
        self.position = position
        self.cursors = cursors
        self.rows = rows
        self.captures = captures
        self.marks = marks
        self.lost_by: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows it copied."""
        return sum(key.nbytes + value.nbytes for key, value in self.rows.values())


def taken(session: "Session") -> Checkpoint:
    """A checkpoint of the session as it is."""
    rows = {}
    holds: dict[int, Hold] = {}
    for group in session.groups:
        runs = session.live_runs(group)
        for layer in group.layers:
            if group.sliding_window is not None:
                rows[layer] = session.planes[layer].copy_of(runs)
            else:
                holds[layer] = session.planes[layer].hold(runs)
    shared = all(hold is not None for hold in holds.values())
    count = session.position - session.first_position
    ids = session.ids
    return Checkpoint(
        session,
        session.position,
        {name: cursor.as_tuple() for name, cursor in session.cursors.items()},
        rows,
        holds if shared else None,
        None if ids is None else [sequence[:count] for sequence in ids],
        session.ledger.copy(),
        dict(session.captures),
        set(session.marks),
    )


def put_back(session: "Session", checkpoint: Checkpoint) -> dict[str, RingCursor]:
    """Write a checkpoint's rows back; the cursors that then hold.

    An interrupt in the middle leaves the session empty.

    Raises:
        MemoryUnavailable: the rows' pages cannot be had, or LimitReached, where full rows come
            back. Nothing was changed.
    """
    cursors = {
        name: RingCursor(*cursor, max_context=session.cursors[name].max_context)
        for name, cursor in checkpoint.cursors.items()
    }
    rings = [group for group in session.groups if group.sliding_window is not None]
    more = max(0, checkpoint.position - session.position) * session.num_sequences
    session.charge(more * session.plan.full_row_nbytes)
    shown = False
    try:
        for group in rings:
            # another session may have these pages too
            session.back(group, _live_runs(cursors[group.id]))
        _show(session, checkpoint.holds or {})
        shown = True
        for group in rings:
            for layer in group.layers:
                runs = _live_runs(cursors[group.id])
                session.planes[layer].store(runs, *checkpoint.rows[layer])
    except BaseException:
        session.charge(-more * session.plan.full_row_nbytes)
        if shown:
            spoil(session)
        raise
    return cursors


def _live_runs(cursor: RingCursor) -> list[range]:
    return cursor.rows_of(cursor.live.start, cursor.live.stop)


def _show(session: "Session", holds: Mapping[int, Hold]) -> None:
    """Have the held pages in the full planes, or in none."""
    before = {}
    try:
        for layer, hold in holds.items():
            plane = session.planes[layer]
            runs = session.live_runs(session.geometry.group_of(layer))
            before[layer] = plane.hold(runs)
            plane.span.show(hold)
    except BaseException:
        for layer, hold in before.items():
            session.planes[layer].span.show(hold)
        raise
