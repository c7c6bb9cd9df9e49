"""Places to return to within one session."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kvplane.ledger import Ledger
from kvplane.memory import Hold
from kvplane.ring import RingCursor
from kvplane.snapshot import Cursor

if TYPE_CHECKING:
    from kvplane.session import Session


class Checkpoint:
    """A place to return to: copies of the rings' rows, and a share of the full planes' pages.

    Made by `Session.checkpoint`. Where pages cannot be shared it is valid until a rewind below
    it: its full rows may then be another branch's.
    """

    __slots__ = (
        "__weakref__",
        "cursors",
        "holds",
        "ids",
        "ledger",
        "lost_by",
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
    ) -> None:
        self.owner = owner
        self.holds = holds
        self.ids = ids
        self.ledger = ledger
        self.position = position
        self.cursors = cursors
        self.rows = rows
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
    )


def put_back(session: "Session", checkpoint: Checkpoint) -> dict[str, RingCursor]:
    """Write a checkpoint's rows back; the cursors that then hold."""
    cursors = {}
    for group in session.groups:
        limit = session.cursors[group.id].max_context
        cursor = RingCursor(*checkpoint.cursors[group.id], max_context=limit)
        runs = cursor.rows_of(cursor.origin_logical, cursor.next_position)
        for layer in group.layers:
            if group.sliding_window is not None:
                session.planes[layer].store(runs, *checkpoint.rows[layer])
            elif checkpoint.holds is not None:
                session.planes[layer].span.show(checkpoint.holds[layer])
        cursors[group.id] = cursor
    return cursors
