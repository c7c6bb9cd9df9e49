"""A session of this machine, to another one; it stays here as it is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvplane.errors import ArgumentError
from kvplane.pack.chain import packed_ids
from kvplane.pack.fingerprint import Fingerprint
from kvplane.ring import RingCursor
from kvplane.schedule import canonical
from kvplane.session import Session
from kvplane.tokens import checked_position
from kvplane.transfer.clock import IDLE_S, WHOLE_S, Clock, Progress
from kvplane.transfer.links.base import Link
from kvplane.transfer.opening import Opening, ids_digest
from kvplane.transfer.schedule import CHUNK, STREAMED, Schedule, Segment
from kvplane.transfer.sending import Sending


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A session that the receiver has now.

    Args:
        tokens: that the receiver said it can use.
        cut: of these, so many it had already.
        reason: why not more.
        nbytes: of rows, that were sent over this link.
        num_segments: of the handoff; some may have come before a connection was lost.
        seconds: from the first byte to the receiver's confirmation.
    """

    tokens: int
    cut: int
    reason: str
    nbytes: int
    num_segments: int
    seconds: float


def send(
    session: Session,
    link: Link,
    *,
    position: int | None = None,
    fingerprint: Fingerprint | None = None,
    schedule: str = STREAMED,
    chunk: int = CHUNK,
    timeout_s: float = WHOLE_S,
    idle_timeout_s: float = IDLE_S,
    progress: Progress | None = None,
) -> Sent:
    """Send a session to whoever receives at the other end of a link.

    Args:
        session: one sequence, with no step open. It is not changed; nobody else may use it
            meanwhile.
        link: to a receiver.
        position: send only what comes before it: one less than a prompt, whose last token the
            receiver then runs itself. None: all of the session.
        fingerprint: of the model that made the rows.
        schedule: the order by name, see `kvplane.transfer.schedule`.
        chunk: tokens of a segment.
        timeout_s: of the whole.
        idle_timeout_s: of a wait in which nothing moves.
        progress: called with segments that went out and segments in all.

    Returns:
        What the receiver confirmed: it holds the whole session now.

    Raises:
        ArgumentError: an empty session, a batch, or a position whose rows are not held.
        PackMismatch: the session has other layer groups than the fingerprint.
        TransferRefused: the receiver does not take this session; names the field.
        TransferUnconfirmed, TransferAborted, TransferCorrupt, TransferVersion, LinkLost,
        LinkTimeout: the handoff failed, and the receiver's store is as it was; only when the
            connection breaks after everything was sent may the session be there unheard of.
        StepOpen, SessionClosed, SessionBusy: the session is in use.
    """
    clock = Clock(timeout_s, idle_timeout_s)
    with session.guard:
        session.check_open()
        session.check_idle()
        opening, ids = opening_of(
            session, position=position, fingerprint=fingerprint, schedule=schedule, chunk=chunk
        )
        return sent(session, link, clock, opening, ids, progress=progress)


def sent(
    session: Session,
    link: Link,
    clock: Clock,
    opening: Opening,
    ids: bytes | None,
    *,
    segments: Callable[[Schedule], Iterable[Segment | None]] | None = None,
    progress: Progress | None = None,
) -> Sent:
    """Send what an opening states.

    Args:
        session: whose rows.
        link: to a receiver.
        clock: running.
        opening: of the session.
        ids: u32 LE.
        segments: gives each segment of a plan once its rows are final, None before it waits for
            one; None instead of it: all rows are final.
        progress: as in `send`.

    Raises:
        TransferError: as in `send`.
    """
    sending = Sending(session, link, clock, opening)
    try:
        plan = sending.begin(ids)
        sending.send(plan.segments if segments is None else segments(plan), progress=progress)
        sending.close(opening.num_tokens)
    except BaseException as error:
        sending.stop(error)
        raise
    finally:
        sending.release()
    return Sent(
        tokens=opening.num_tokens,
        cut=plan.cut,
        reason=sending.reason,
        nbytes=sending.nbytes,
        num_segments=len(plan.segments),
        seconds=clock.seconds,
    )


def opening_of(
    session: Session,
    *,
    position: int | None = None,
    fingerprint: Fingerprint | None = None,
    schedule: str = STREAMED,
    chunk: int = CHUNK,
    ids: list[int] | None = None,
) -> tuple[Opening, bytes | None]:
    """What a session states of itself before it is sent, and its ids as u32 LE: as `send`.

    Args:
        session: whose rows.
        position: as in `send`; beyond the session's own when `ids` say what will have been read.
        fingerprint: as in `send`.
        schedule: as in `send`.
        chunk: as in `send`.
        ids: of a prompt that is about to be read up to the position, on the canonical schedule.
    """
    if session.batch is not None:
        raise ArgumentError(argument="session", expected="one sequence", got="a batch")
    if fingerprint is not None:
        fingerprint.check_groups(session.groups)
    coming = ids is not None
    at = session.position if position is None else checked_position(position)
    begin = session.first_position
    if not begin < at or (at > session.position and not coming):
        expected = f"within [{begin + 1}, {session.position}]"
        raise ArgumentError(argument="position", expected=expected, got=at)
    known = ids if coming else None if session.ids is None else session.ids[0]
    packed = None if known is None else packed_ids(known[: at - begin])
    ledger = session.ledger.copy()
    if coming:
        for part in canonical(session.position, at):
            ledger.record(part.start, part.stop, session.store.numerics)
    ledger.cut(at)
    cursors = {}
    for group in session.groups:
        cursor = session.cursors[group.id]
        # what is being read will be held down to its window
        oldest = begin if coming else cursor.origin_logical
        if group.sliding_window is not None:
            oldest = max(oldest, at - group.sliding_window)
        cursors[group.id] = _cursor(cursor, oldest, at)
    opening = Opening(
        geometry=session.geometry,
        fingerprint=None if fingerprint is None else fingerprint.parts,
        position=at,
        first_position=begin,
        cursors=cursors,
        layouts={group.id: session.plan.layouts[group.kind].value for group in session.groups},
        tokens=None if packed is None else ids_digest(packed),
        numerics=tuple(ledger.numerics),
        canonical=ledger.canonical,
        schedule=schedule,
        chunk=chunk,
    )
    # refuses what cannot be planned before anything is said
    opening.plan(0)
    return opening, packed


def _cursor(cursor: RingCursor, first: int, stop: int) -> tuple[int, int, int, int]:
    return cursor.capacity, max(0, stop - first), first, cursor.row_at(first)


def plan_of(session: Session, *, position: int | None = None, cut: int = 0) -> Schedule:
    """The segments that a session would be sent in: ArgumentError, as in `send`."""
    opening, _ = opening_of(session, position=position)
    return opening.plan(cut)
