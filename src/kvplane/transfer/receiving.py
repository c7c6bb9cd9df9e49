"""The receiver's side of the wire, without any input or output: bytes in, bytes out.

    hello ─► opening ─► [ids] ─► segments, in any order ─► close ─► confirm ─► done

Nothing may come out of turn, no length is taken that was not announced, and a frame's body is read
before its digest is looked at only when it is rows, which nobody sees before all of them are right.
"""

from collections import deque
from typing import Protocol

from kvplane.transfer.errors import (
    TransferCorrupt,
    TransferIncomplete,
    TransferTooLarge,
    TransferUnconfirmed,
)
from kvplane.transfer.frames import Frame, FrameReader, Header, Kind, Place, fresh, sealed
from kvplane.transfer.opening import Opening, ids_digest
from kvplane.transfer.schedule import Schedule, Segment
from kvplane.transfer.words import (
    FIRST_KEY,
    LIMITS,
    Accept,
    Keys,
    confirm,
    have,
    hello,
    keys_of,
    nonce,
    read_close,
    read_confirm,
    read_end,
    read_hello,
    rows_key,
    whole_digest,
)

_ENDS = frozenset({Kind.REFUSE, Kind.ABORT})
# what else may come, by what came last
_NEXT = {
    "hello": {Kind.HELLO},
    "opening": {Kind.OPENING},
    "ids": {Kind.IDS},
    "segments": {Kind.SEGMENT, Kind.CLOSE},
    "confirm": {Kind.CONFIRM},
    "done": set(),
}


class Taker(Protocol):
    """Whoever has memory for the rows."""

    def consider(self, opening: Opening) -> None:
        """Look at an opening before anything else comes: TransferRefused."""
        ...

    def begin(self, opening: Opening, ids: bytes | None, key: bytes) -> tuple[int, str]:
        """Make room for the rows.

        Args:
            opening: as considered.
            ids: u32 LE, one a token; None when the sender knows none.
            key: of the segments' digests.

        Returns:
            How much of the beginning is held already, and why not more.

        Raises:
            TransferRefused, KVPlaneError: there is no room.
        """
        ...

    def before(self) -> dict[int, bytes]:
        """Digests of segments that came before a connection was lost, by number."""
        ...

    def place(self, segment: Segment) -> Place:
        """Where a segment's bytes go."""
        ...

    def arrived(self, segment: Segment, frame: Frame) -> None:
        """Verify a segment and keep its rows, now or later; one that came again once more."""
        ...

    def finish(self) -> int:
        """Verify what is not verified yet and show the session: how many tokens it has now.

        Raises:
            TransferCorrupt: a segment is not its digest's. Nothing is visible.
        """
        ...


class Receiving:
    """One transfer, as the receiver sees it.

    Args:
        taker: gets what arrives.
        number: its nonce; None draws one.
    """

    def __init__(self, taker: Taker, *, number: str | None = None) -> None:
        self.outbox: deque[bytes] = deque()
        self.opening: Opening | None = None
        self.schedule: Schedule | None = None
        self.tokens: int | None = None
        self.num_arrived = 0
        self.num_before = 0
        self._rows_key = b""
        self._taker = taker
        self._frames = FrameReader(self._place)
        self._nonce = number or nonce()
        self._keys = Keys(FIRST_KEY, FIRST_KEY)
        self._state = "hello"
        self._digests: list[bytes | None] = []
        self._num_again = 0
        self._say(Kind.HELLO, hello(self._nonce))

    @property
    def planned(self) -> Schedule:
        """The segments: TransferCorrupt before there are any."""
        if self.schedule is None:
            raise TransferCorrupt(what="no opening came")
        return self.schedule

    @property
    def is_done(self) -> bool:
        """Whether both sides have confirmed."""
        return self._state == "done"

    def buffers(self) -> list[memoryview]:
        """Where the next bytes go."""
        return self._frames.buffers()

    def advance(self, nbytes: int) -> None:
        """Note that so many bytes were put into the buffers.

        Raises:
            TransferError, KVPlaneError: the transfer is over; nothing that it sent is visible,
                unless `tokens` says that the session was finished before.
        """
        frame = self._frames.advance(nbytes)
        if frame is not None:
            self._take(frame)

    def said(self, kind: Kind, body: bytes) -> bytes:
        """A frame of this side's."""
        return sealed(self._keys.receiver, kind, body)

    def _say(self, kind: Kind, body: bytes) -> None:
        self.outbox.append(self.said(kind, body))

    def _place(self, header: Header) -> Place:
        kind = header.kind
        if kind not in _NEXT[self._state] and kind not in _ENDS:
            raise TransferCorrupt(what=f"{kind.name} came where {self._state} is due")
        if kind is Kind.SEGMENT:
            return self._place_rows(header)
        if header.number:
            raise TransferCorrupt(what=f"{kind.name} has the number {header.number}")
        if kind is Kind.IDS:
            # fewer are not those of the digest in the opening
            return fresh(header, limit=self.opening.ids_nbytes if self.opening else 0)
        return fresh(header, limit=LIMITS[kind])

    def _place_rows(self, header: Header) -> Place:
        segment = self._segment(header.number)
        if header.nbytes != segment.nbytes:
            raise TransferTooLarge(
                what=f"segment {segment.number}", limit=segment.nbytes, got=header.nbytes
            )
        if self._digests[segment.number] is not None:
            self._num_again += 1
            if self._num_again > len(self._digests):
                raise TransferCorrupt(what="more segments came again than there are")
        return self._taker.place(segment)

    def _segment(self, number: int) -> Segment:
        segments = () if self.schedule is None else self.schedule.segments
        if number >= len(segments):
            raise TransferCorrupt(what=f"segment {number} of {len(segments)}")
        return segments[number]

    def _take(self, frame: Frame) -> None:
        kind = frame.header.kind
        if kind is Kind.HELLO:
            self._keys = keys_of(read_hello(frame), self._nonce)
            self._state = "opening"
            return
        if kind is Kind.SEGMENT:
            self._take_rows(frame)
            return
        frame.check(self._keys.sender)
        if kind in _ENDS:
            raise read_end(kind, frame.data())
        if kind is Kind.OPENING:
            self.opening = Opening.decoded(frame.data())
            self._rows_key = rows_key(frame.data())
            self._taker.consider(self.opening)
            if self.opening.tokens is None:
                self._begin(self.opening, None)
            else:
                self._state = "ids"
        elif kind is Kind.IDS and self.opening is not None:
            ids = frame.data()
            if ids_digest(ids) != self.opening.tokens:
                raise TransferCorrupt(what="the ids are not those of the opening")
            self._begin(self.opening, ids)
        elif kind is Kind.CLOSE:
            self._close(read_close(frame.data()))
        else:
            self._confirmed(read_confirm(frame.data()))

    def _begin(self, opening: Opening, ids: bytes | None) -> None:
        cut, reason = self._taker.begin(opening, ids, self._rows_key)
        self.schedule = opening.plan(cut)
        self._digests = [None] * len(self.schedule.segments)
        before = self._taker.before()
        for number, digest in before.items():
            self._digests[number] = digest
        self.num_arrived = self.num_before = len(before)
        self._state = "segments"
        self._say(Kind.ACCEPT, Accept(cut, reason, len(before)).packed())
        if before:
            self._say(Kind.HAVE, have(before))

    def _take_rows(self, frame: Frame) -> None:
        segment = self._segment(frame.header.number)
        before = self._digests[segment.number]
        if before is not None and before != frame.digest:
            raise TransferCorrupt(what=f"segment {segment.number} came again with other bytes")
        self._taker.arrived(segment, frame)
        if before is None:
            self._digests[segment.number] = frame.digest
            self.num_arrived += 1

    def _close(self, whole: str) -> None:
        missing = len(self._digests) - self.num_arrived
        if missing:
            raise TransferIncomplete(missing=missing, num_segments=len(self._digests))
        if whole_digest(self._keys.sender, [each for each in self._digests if each]) != whole:
            raise TransferCorrupt(what="the digest over the whole is another's")
        self.tokens = self._taker.finish()
        self._state = "confirm"
        self._say(Kind.CONFIRM, confirm(self.tokens))

    def _confirmed(self, tokens: int) -> None:
        if self.tokens is None or tokens != self.tokens:
            raise TransferUnconfirmed(expected=tokens, got=self.tokens or 0)
        self._state = "done"
