"""What of a session the receiver has already: as deep a cut as can be proven, and why not more."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvplane.payload import BLOCK
from kvplane.session import Session
from kvplane.transfer.opening import Opening


class Held(NamedTuple):
    """A prefix at hand.

    Args:
        cut: the receiver has [0, cut).
        session: that has it; None when nobody does.
        reason: why it is not more.
    """

    cut: int
    session: Session | None
    reason: str


def deepest(opening: Opening, ids: bytes | None, sessions: Sequence[Session]) -> Held:
    """The deepest cut of any of these sessions whose rows are the sender's, bit for bit.

    They are when the tokens are equal and both made them on the canonical schedule by one numerics:
    what the chunks of a prompt are cut into changes their bits, and what follows them does not.
    """
    found = [_held(opening, ids, session) for session in sessions]
    return max(found, key=lambda held: held.cut, default=Held(0, None, "no session is held"))


def _held(opening: Opening, ids: bytes | None, session: Session) -> Held:
    mine = session.ids
    unfit = _unfit(opening, session)
    if ids is None or mine is None or unfit is not None:
        return Held(0, None, unfit or "the ids are not known")
    limit = _canonical(opening, session)
    same = _common(np.frombuffer(ids, "<u4"), np.array(mine[0], dtype=np.int64))
    reason = ""
    if same < limit:
        reason = f"the tokens are equal up to {same}"
        limit = same - same % BLOCK
    for cut in range(limit, 0, -BLOCK):
        lacking = _lacking(opening, session, cut)
        if lacking is None:
            return Held(cut, session, reason)
        reason = lacking
    return Held(0, None, reason)


def _unfit(opening: Opening, session: Session) -> str | None:
    """Why none of a session's rows can be the sender's."""
    if opening.first_position or session.first_position or session.batch is not None:
        return "one of the sessions does not begin at 0, or is a batch"
    if session.plan.geometry.dtype != opening.geometry.dtype:
        return "the dtype is converted"
    if not _canonical(opening, session):
        return "no whole block was made on the canonical schedule by both"
    if opening.numerics[0][1] != session.ledger.numerics[0][1]:
        return "the rows were made by other numerics"
    return None


def _canonical(opening: Opening, session: Session) -> int:
    """Whole blocks that both made on the canonical schedule, below the position."""
    limit = min(opening.canonical, session.ledger.canonical, opening.position - 1)
    return limit - limit % BLOCK


def _common(mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> int:
    """How many ids are equal from the beginning on."""
    count = min(len(mine), len(theirs))
    different = np.flatnonzero(mine[:count] != theirs[:count])
    return int(different[0]) if len(different) else count


def _lacking(opening: Opening, session: Session, cut: int) -> str | None:
    """Which rows below a cut are neither sent nor held; None when all are there."""
    plan = opening.plan(cut)
    for group in plan.geometry.groups:
        live = session.cursors[group.id].live
        needed = range(plan.first_needed(group), cut)
        if needed and not (live.start <= needed.start and needed.stop <= live.stop):
            return f"rows {needed.start} to {needed.stop} of {group.id} are not held"
    return None


def first_rows(opening: Opening, held: Held) -> dict[str, int]:
    """By group id: the oldest row that the new session can have."""
    plan = opening.plan(held.cut)
    firsts = {}
    for group in plan.geometry.groups:
        first = plan.first_row(group)
        if held.session is not None and first < held.cut:
            # a row outside the next token's sight may be missing
            first = max(first, held.session.cursors[group.id].live.start)
        firsts[group.id] = min(first, max(held.cut, plan.first_needed(group)))
    return firsts
