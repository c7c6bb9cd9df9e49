"""A session from another machine, into this store: all of it, verified, or nothing."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvplane.errors import ArgumentError, KVPlaneError
from kvplane.pack.fingerprint import Fingerprint
from kvplane.session import Session
from kvplane.store import KVStore
from kvplane.transfer.clock import FAREWELL_S, IDLE_S, WHOLE_S, Clock, Progress
from kvplane.transfer.errors import LinkLost, LinkTimeout, TransferCorrupt, TransferRefused
from kvplane.transfer.filling import Filling
from kvplane.transfer.frames import Kind
from kvplane.transfer.links.base import Link
from kvplane.transfer.receiving import Receiving
from kvplane.transfer.words import abort, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A session that came.

    Args:
        session: of the store; the next token is its to run.
        tokens: it has.
        cut: of these, so many were here already.
        reason: why not more.
        nbytes: of rows, that are here by this handoff.
        num_segments: of the handoff.
        resumed: of these, so many had come before a connection was lost.
        seconds: from the first byte.
        acknowledged: whether the sender has heard that it is here. Where not, it may believe that
            the handoff failed, and send again.
        kept_rotation: False when a ring's capacity differs, so that its rows lie elsewhere.
        same_numerics: whether all rows were made by what this store's bits depend on: going on is
            then, bit for bit, not having moved.
    """

    session: Session
    tokens: int
    cut: int
    reason: str
    nbytes: int
    num_segments: int
    resumed: int
    seconds: float
    acknowledged: bool
    kept_rotation: bool
    same_numerics: bool


class Pending:
    """What came of a handoff before its connection was lost; holds memory until it is used.

    Give it to `receive` again with a new link to the same sender: what is here is not sent twice.
    """

    def __init__(self) -> None:
        self._filling: Filling | None = None

    @property
    def num_segments(self) -> int:
        """Segments at hand."""
        return 0 if self._filling is None else len(self._filling.before())

    def keep(self, filling: Filling) -> bool:
        """Keep what a receiver has, once it is verified; whether there was anything right."""
        self.abandon()
        try:
            filling.settle()
        except KVPlaneError:
            return False
        if filling.before():
            self._filling = filling
        return self._filling is not None

    def taken(self, store: KVStore, fingerprint: Mapping[str, Any] | None) -> Filling | None:
        """What there is for a store and a model; nothing is kept any more."""
        if self._filling is not None and not self._filling.is_for(store, fingerprint):
            self.abandon()
        kept, self._filling = self._filling, None
        return kept

    def abandon(self) -> None:
        """Give the memory back. Idempotent."""
        if self._filling is not None:
            self._filling.abandon()
        self._filling = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


def receive(
    store: KVStore,
    link: Link,
    *,
    fingerprint: Fingerprint | None = None,
    held: Sequence[Session] = (),
    pending: Pending | None = None,
    timeout_s: float = WHOLE_S,
    idle_timeout_s: float = IDLE_S,
    progress: Progress | None = None,
) -> Received:
    """Take one session from a link into a store.

    Args:
        store: of the same model; nothing in it changes before every row is here and verified.
        link: to a sender.
        fingerprint: of the model that will go on; the sender must state an equal one, or both none.
        held: sessions of this store: what one of them begins with need not be sent again, when its
            rows are the sender's bit for bit.
        pending: keeps what came when the connection is lost, for the next call.
        timeout_s: of the whole.
        idle_timeout_s: of a wait in which nothing comes.
        progress: called with segments that have come and segments in all.

    Raises:
        TransferRefused: what the sender states does not fit this store; names the field.
        TransferCorrupt, TransferVersion, TransferTooLarge, TransferIncomplete, TransferAborted,
        LinkLost, LinkTimeout: the handoff failed.
        LimitReached, MemoryUnavailable: there is no room. In all cases the store is as it was.
        ArgumentError: `held` has what is no session of this store.
    """
    for session in held:
        if getattr(session, "store", None) is not store:
            raise ArgumentError(argument="held", expected="sessions of this store", got=session)
    clock = Clock(timeout_s, idle_timeout_s)
    parts = None if fingerprint is None else fingerprint.parts
    filling = None if pending is None else pending.taken(store, parts)
    if filling is None:
        filling = Filling(store, fingerprint=parts, held=held)
    machine = Receiving(filling)
    acknowledged = True
    try:
        try:
            _take(machine, link, clock, progress)
        except (LinkLost, LinkTimeout, TransferCorrupt):
            # the session is whole; only the sender's last word is missing
            if machine.tokens is None:
                raise
            acknowledged = False
        schedule, session = machine.planned, filling.finished
    except BaseException as error:
        keeps = pending is not None and isinstance(error, LinkLost | LinkTimeout)
        if pending is None or not keeps or not pending.keep(filling):
            filling.abandon()
        _tell(machine, link, error)
        raise
    return Received(
        session=session,
        tokens=machine.tokens or 0,
        cut=filling.held.cut,
        reason=filling.held.reason,
        nbytes=schedule.payload.total,
        num_segments=machine.num_arrived,
        resumed=machine.num_before,
        seconds=clock.seconds,
        acknowledged=acknowledged,
        kept_rotation=filling.kept_rotation,
        same_numerics=all(made == store.numerics for _, made in session.ledger.numerics),
    )


def _take(machine: Receiving, link: Link, clock: Clock, progress: Progress | None) -> None:
    """Move bytes until both sides have confirmed."""
    shown = -1
    while True:
        while machine.outbox:
            link.write([machine.outbox.popleft()], clock)
        if machine.is_done:
            return
        machine.advance(link.read_into(machine.buffers(), clock))
        if progress is not None and machine.schedule and machine.num_arrived != shown:
            shown = machine.num_arrived
            progress(shown, len(machine.schedule.segments))


def _tell(machine: Receiving, link: Link, error: BaseException) -> None:
    """Let the sender know why this side stops, if it still listens."""
    if isinstance(error, LinkLost | LinkTimeout):
        link.close()
        return
    if isinstance(error, TransferRefused):
        frame = machine.said(Kind.REFUSE, refuse(error))
    else:
        said = str(error) if isinstance(error, KVPlaneError) else type(error).__name__
        frame = machine.said(Kind.ABORT, abort(said))
    with contextlib.suppress(KVPlaneError):
        link.write([frame], Clock(FAREWELL_S, FAREWELL_S))
        link.finish(linger_s=FAREWELL_S)
    link.close()
