"""The sender's side of the wire: states, streams, closes; digests are made on another thread."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from kvplane.errors import ArgumentError, KVPlaneError
from kvplane.session import Session
from kvplane.transfer.clock import FAREWELL_S, Clock, Progress
from kvplane.transfer.errors import (
    LinkLost,
    LinkTimeout,
    TransferAborted,
    TransferCorrupt,
    TransferRefused,
    TransferUnconfirmed,
)
from kvplane.transfer.frames import (
    Frame,
    FrameReader,
    Header,
    Kind,
    Place,
    digest_of,
    fresh,
    sealed,
)
from kvplane.transfer.links.base import Link
from kvplane.transfer.opening import Opening
from kvplane.transfer.planes import PlaneBytes, is_direct, packed
from kvplane.transfer.schedule import Schedule, Segment
from kvplane.transfer.words import (
    FIRST_KEY,
    HAVE_NBYTES,
    LIMITS,
    Keys,
    abort,
    close,
    confirm,
    hello,
    keys_of,
    nonce,
    read_accept,
    read_confirm,
    read_end,
    read_have,
    read_hello,
    rows_key,
    whole_digest,
)

# segments whose digests are made ahead
AHEAD = 2
_ENDS = (Kind.REFUSE, Kind.ABORT)


class _Ready(NamedTuple):
    """A segment about to go out."""

    segment: Segment
    pieces: Place
    digest: bytes


class Sending:
    """One transfer, as the sender sees it.

    Args:
        session: whose rows; they are final, and stay, up to the opening's position.
        link: to a receiver.
        clock: running.
        opening: what is stated.
    """

    def __init__(self, session: Session, link: Link, clock: Clock, opening: Opening) -> None:
        self.reason = ""
        self.nbytes = 0
        self._rows_key = b""
        self._have: dict[int, bytes] = {}
        self._have_nbytes = 0
        self._session = session
        self._link = link
        self._clock = clock
        self._opening = opening
        self._keys = Keys(FIRST_KEY, FIRST_KEY)
        self._awaited = Kind.HELLO
        self._frames = FrameReader(self._place)
        self._planes = {
            layer: PlaneBytes(plane) for layer, plane in session.planes.items() if is_direct(plane)
        }
        self._plan: Schedule | None = None
        self._digests: dict[int, bytes] = {}
        self._pool = ThreadPoolExecutor(1)

    def begin(self, ids: bytes | None) -> Schedule:
        """Say hello, state what comes, and plan it by what the receiver holds: TransferError."""
        number = nonce()
        self._say(Kind.HELLO, hello(number))
        self._keys = keys_of(number, read_hello(self._heard(Kind.HELLO)))
        stated = self._opening.encoded()
        self._rows_key = rows_key(stated)
        self._say(Kind.OPENING, stated)
        if ids is not None:
            self._say(Kind.IDS, ids)
        accepted = read_accept(self._heard(Kind.ACCEPT).data())
        self.reason = accepted.reason
        try:
            self._plan = self._opening.plan(accepted.cut)
        except ArgumentError as error:
            raise TransferCorrupt(what=f"accept: {error}") from error
        if accepted.num_have:
            self._have_nbytes = HAVE_NBYTES * accepted.num_have
            if accepted.num_have > self._plan.num_segments:
                raise TransferCorrupt(what="accept: more segments than there are")
            self._have = read_have(self._heard(Kind.HAVE).data())
        return self._plan

    def send(self, segments: Iterable[Segment | None], *, progress: Progress | None = None) -> None:
        """Send segments, in this order; their rows are read now: TransferError.

        Args:
            segments: None among them says that the next one may take a while.
            progress: as in `send`.
        """
        total = 0 if self._plan is None else len(self._plan.segments)
        for ready in self._ready(segments):
            self._check_heard()
            number = ready.segment.number
            # what came before a connection was lost, and is the same still, need not come again
            if self._have.get(number) != ready.digest:
                header = Header(Kind.SEGMENT, number, ready.segment.nbytes)
                self._write([header.packed(), *ready.pieces, ready.digest])
                self.nbytes += ready.segment.nbytes
            self._digests[number] = ready.digest
            if progress is not None:
                progress(len(self._digests), total)

    def _ready(self, segments: Iterable[Segment | None]) -> Iterator[_Ready]:
        """Segments with their digests, a few of which are made while others go out."""
        ahead: deque[Future[_Ready]] = deque()
        for segment in segments:
            if segment is not None:
                ahead.append(self._pool.submit(self._prepared, segment))
            while len(ahead) > (0 if segment is None else AHEAD):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _prepared(self, segment: Segment) -> _Ready:
        pieces: list[memoryview] = []
        for layer in segment.layers:
            group = segment.group
            runs = self._runs(segment)
            if layer in self._planes:
                pieces += self._planes[layer].pieces(runs)
            else:
                layout = self._opening.layouts[group.id]
                pieces.append(packed(self._session.planes[layer], group, runs, layout=layout))
        header = Header(Kind.SEGMENT, segment.number, segment.nbytes)
        return _Ready(segment, pieces, digest_of(self._rows_key, header, pieces))

    def _runs(self, segment: Segment) -> list[range]:
        """The rows of a segment, also of one whose step is not committed yet."""
        cursor = self._session.cursors[segment.group.id].copy()
        row = cursor.row_at(segment.first)
        before_seam = min(segment.num_rows, cursor.capacity - row)
        runs = [range(row, row + before_seam), range(segment.num_rows - before_seam)]
        return [run for run in runs if run]

    def close(self, num_tokens: int) -> None:
        """Say that this was all, and hear that the receiver has it.

        The receiver keeps the session when it does not hear that it was heard.

        Args:
            num_tokens: that it must be able to use now.

        Raises:
            TransferUnconfirmed: it says another number.
            TransferError: it fails, or cannot be heard.
        """
        digests = [self._digests[number] for number in sorted(self._digests)]
        self._say(Kind.CLOSE, close(whole_digest(self._keys.sender, digests)))
        tokens = read_confirm(self._heard(Kind.CONFIRM).data())
        if tokens != num_tokens:
            raise TransferUnconfirmed(expected=num_tokens, got=tokens)
        with contextlib.suppress(LinkLost, LinkTimeout):
            self._say(Kind.CONFIRM, confirm(tokens))

    def stop(self, error: BaseException) -> None:
        """Let the receiver know why this side stops, if it still listens."""
        if not isinstance(error, LinkLost | LinkTimeout | TransferRefused | TransferAborted):
            said = str(error) if isinstance(error, KVPlaneError) else type(error).__name__
            with contextlib.suppress(KVPlaneError):
                frame = sealed(self._keys.sender, Kind.ABORT, abort(said))
                self._link.write([frame], Clock(FAREWELL_S, FAREWELL_S))
                self._link.finish(linger_s=FAREWELL_S)
        self._link.close()

    def release(self) -> None:
        """Let go of the other thread."""
        self._pool.shutdown(cancel_futures=True)

    def _say(self, kind: Kind, body: bytes) -> None:
        self._write([sealed(self._keys.sender, kind, body)])

    def _write(self, parts: list[bytes | bytearray | memoryview]) -> None:
        try:
            self._link.write(parts, self._clock)
        except (LinkLost, LinkTimeout) as error:
            self._raise_farewell(error)
            raise

    def _raise_farewell(self, error: LinkLost | LinkTimeout) -> None:
        """Say what the receiver said before it stopped reading, if it did."""
        if self._awaited is Kind.HELLO:
            return
        with contextlib.suppress(LinkLost, LinkTimeout):
            waiting = Clock(FAREWELL_S, FAREWELL_S)
            while True:
                frame = self._frames.advance(self._link.read_into(self._frames.buffers(), waiting))
                if frame is not None:
                    self._checked(frame, from_error=error)

    def _check_heard(self) -> None:
        """Raise what the receiver has said in the middle of the rows."""
        while count := self._link.poll(self._frames.buffers()):
            frame = self._frames.advance(count)
            if frame is not None:
                self._checked(frame)
                raise TransferCorrupt(what=f"{frame.header.kind.name} came out of turn")

    def _heard(self, kind: Kind) -> Frame:
        """The receiver's next frame, which is of a kind: TransferError."""
        self._awaited = kind
        while True:
            count = self._link.read_into(self._frames.buffers(), self._clock)
            frame = self._frames.advance(count)
            if frame is not None:
                return self._checked(frame)

    def _checked(self, frame: Frame, *, from_error: Exception | None = None) -> Frame:
        """The frame, unless it is the receiver's farewell or damaged."""
        if frame.header.kind is Kind.HELLO:
            return frame
        frame.check(self._keys.receiver)
        if frame.header.kind in _ENDS:
            raise read_end(frame.header.kind, frame.data()) from from_error
        return frame

    def _place(self, header: Header) -> Place:
        expected = {self._awaited, *_ENDS}
        if self._awaited is Kind.HELLO:
            expected = {Kind.HELLO}
        if header.kind not in expected or header.number:
            raise TransferCorrupt(what=f"{header.kind.name} came where {self._awaited.name} is due")
        limit = self._have_nbytes if header.kind is Kind.HAVE else LIMITS[header.kind]
        if header.kind is Kind.HAVE and header.nbytes != limit:
            raise TransferCorrupt(what="HAVE is not as long as was said")
        return fresh(header, limit=limit)
