"""A session that is sent while its prompt is still being read.

    with Streaming(session, link, ids) as stream:
        for part in canonical(session.position, len(ids) - 1):
            with session.step(ids[part.start : part.stop]) as step:
                for layer in layers:
                    ...
                    stream.note()
            stream.note()
        sent = stream.finish()

A layer's rows are final once its chunk is stored: at the latest when the next layer is written, or
with the step. They go out from then on, while the model computes what follows. A step that is taken
back takes the whole handoff back.
"""

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvplane.errors import ArgumentError, KVPlaneError, TransferError
from kvplane.pack.fingerprint import Fingerprint
from kvplane.session import Session
from kvplane.transfer.clock import IDLE_S, WHOLE_S, Clock, Progress
from kvplane.transfer.errors import TransferAborted
from kvplane.transfer.links.base import Link
from kvplane.transfer.schedule import STREAMED, STREAMED_CHUNK, Schedule, Segment
from kvplane.transfer.sender import Sent, opening_of, sent

if TYPE_CHECKING:
    from kvplane.step import Step

_LOOK_S = 0.2


class Streaming:
    """Sends rows from a thread of its own as the caller's thread notes that there are more.

    Args:
        session: that reads the prompt; it may hold a part of it.
        link: to a receiver.
        ids: the whole prompt. All but its last token are read here, that one by the receiver.
        fingerprint: of the model.
        schedule: "streamed", or "chapter", which holds full layers back until the end.
        chunk: tokens of a segment.
        timeout_s: of the whole, the model's time included.
        idle_timeout_s: of a wait for the receiver. The receiver's own must outlast a chunk.
        progress: called from the other thread.

    Raises:
        ArgumentError: the session holds other tokens, or more; fewer than two ids; a batch.
        PackMismatch: the session has other layer groups than the fingerprint.
    """

    def __init__(
        self,
        session: Session,
        link: Link,
        ids: Sequence[int],
        *,
        fingerprint: Fingerprint | None = None,
        schedule: str = STREAMED,
        chunk: int = STREAMED_CHUNK,
        timeout_s: float = WHOLE_S,
        idle_timeout_s: float = IDLE_S,
        progress: Progress | None = None,
    ) -> None:
        prompt = list(ids)
        held = session.tokens
        if held is None or prompt[: len(held)] != held or not len(held) < len(prompt) > 1:
            expected = "a prompt that goes on from what the session holds"
            raise ArgumentError(argument="ids", expected=expected, got=f"{len(prompt)} others")
        with session.guard:
            session.check_open()
            session.check_idle()
            self._opening, self._ids = opening_of(
                session,
                position=len(prompt) - 1,
                fingerprint=fingerprint,
                schedule=schedule,
                chunk=chunk,
                ids=prompt,
            )
        self._session = session
        self._link = link
        self._clock = Clock(timeout_s, idle_timeout_s)
        self._progress = progress
        self._changed = threading.Condition()
        self._stops = dict.fromkeys(session.planes, session.position)
        self._step: Step | None = None
        self._written: set[int] = set()
        self._followed: set[int] = set()
        self._given_up: str | None = None
        self._result: Sent | BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def note(self) -> None:
        """Look which rows have become final; cheap, for after every layer and every step.

        Raises:
            TransferError: the handoff has failed.
        """
        if isinstance(self._result, BaseException):
            raise self._result
        with self._changed:
            stops = dict.fromkeys(self._stops, self._session.position)
            for layer in self._stored():
                if self._step is not None:
                    stops[layer] = self._step.stop
            if any(stops[layer] < stop for layer, stop in self._stops.items()):
                self._given_up = "a step was taken back whose rows were under way"
            self._stops = stops
            self._changed.notify_all()

    def _stored(self) -> set[int]:
        """Layers of the open step whose rows are in their planes for certain."""
        step = self._session.open_step
        if step is None or step is not self._step:
            self._step, self._written, self._followed = step, set(), set()
        if step is not None and step.written != self._written:
            # the layer written last may still wait, and does no longer once another is written
            self._followed = self._written
            self._written = set(step.written)
        # those whose rows others read wait until the end
        return self._followed - self._session.plan.shared_layers

    def finish(self) -> Sent:
        """Wait for the receiver's word, once all but the prompt's last token were read.

        Raises:
            TransferError: the handoff has failed.
            ArgumentError: the session is at another position. The handoff is given up.
        """
        if self._session.position != self._opening.position:
            self.stop("the prompt was not read to its end")
            expected = f"{self._opening.position}"
            raise ArgumentError(argument="position", expected=expected, got=self._session.position)
        self.note()
        self._thread.join()
        if isinstance(self._result, Sent):
            return self._result
        raise self._result or TransferAborted(reason="nothing was sent")

    def stop(self, reason: str) -> None:
        """Give the handoff up, if it is not over; the receiver is told why. Idempotent."""
        with self._changed:
            self._given_up = self._given_up or reason
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._result = sent(
                self._session,
                self._link,
                self._clock,
                self._opening,
                self._ids,
                segments=self._final,
                progress=self._progress,
            )
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            self._result = error

    def _final(self, plan: Schedule) -> Iterator[Segment | None]:
        """The segments of a plan, each once its rows are final; None before a wait."""
        for segment in plan.segments:
            if not self._is_final(segment):
                yield None
            with self._changed:
                while not self._is_final(segment):
                    if self._given_up is not None:
                        raise StreamStopped(self._given_up)
                    # refuses when the whole takes too long
                    wait_s = self._clock.wait_s(self._link.name)
                    self._changed.wait(min(_LOOK_S, wait_s))
            yield segment
        if self._given_up is not None:
            raise StreamStopped(self._given_up)

    def _is_final(self, segment: Segment) -> bool:
        return all(self._stops[layer] >= segment.stop for layer in segment.layers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._result is None:
            said = str(error) if isinstance(error, KVPlaneError) else ""
            self.stop(said or "the prompt was not read to its end")


class StreamStopped(TransferError):
    """The sender's own side gave a stream up."""
