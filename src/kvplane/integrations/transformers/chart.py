"""When a step begins and ends, which transformers does not say.

A call of a model shows itself by its layers' updates, first layer first. A step is opened by the
first layer's and stays open after the last one's, until something follows:

    idle      the first layer's update            open: rows are reserved in every layer
    open      another layer's update              open, or written when it was the last one
    open      the first layer's update again      the call before died: aborted, and open again
    open      anything from outside               aborted: idle
    written   the first layer's update            committed, and open again
    written   crop(-k)                            the last k tokens are not kept: idle
    written   the call is reported to have failed aborted: idle
    written   anything else from outside          committed: idle

"From outside" are save, fork, deepcopy, session, reset, rewind, crop and every other door of the
cache. An exception or Ctrl-C between two layers thus leaves the cache as it was before the call.
Layers that are not the store's follow: a call that dies takes their states back too.

Tokens count as seen from the moment they are written, as with transformers' own caches.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, StepIncomplete, TensorMismatch
from kvplane.integrations.transformers import positions
from kvplane.integrations.transformers.batches import apart
from kvplane.integrations.transformers.running import RunningStates
from kvplane.session import Session
from kvplane.step import Step

Opened = Callable[[Tensor], Session]


def _fits(session: Session, key: Tensor) -> bool:
    """Whether a call's rows may go into a session; one that is empty makes room for any."""
    if session.position or session.closed:
        return True
    plan = session.plan
    return (len(key), key.dtype, key.device) == (session.num_sequences, plan.dtype, plan.device)


class Chart:
    """The session behind a cache, and the step that is open in it.

    Args:
        owned: the layers whose rows the store holds, ascending.
        running: the other layers that keep something.
        opened: makes the session when the first key shows batch, dtype and device.
        remembers: whether token ids become known with every call.
    """

    def __init__(
        self,
        owned: Sequence[int],
        running: RunningStates,
        opened: Opened,
        *,
        remembers: bool,
    ) -> None:
        self.owned = tuple(owned)
        self.running = running
        self.remembers = remembers
        self.recording = False
        self.last: list[positions.Last] | None = None
        self.session: Session | None = None
        self.step: Step | None = None
        # positions at which sliding rows are to be kept as a step crosses them
        self.wished: set[int] = set()
        self._opened = opened
        self._partial = False
        self._forgotten: list[list[int]] | None = None
        self.batched = False
        self._shortest = 0
        self._last_after: list[positions.Last] | None = None

    @property
    def seen(self) -> int:
        """Tokens seen, those of a written step included."""
        if self.session is None:
            return 0
        if self.step is not None and self.is_written:
            return self.step.stop
        return self.session.position

    @property
    def is_written(self) -> bool:
        """Whether a step is open and every layer has its rows and its state."""
        step = self.step
        if step is None or len(step.written) < len(self.owned):
            return False
        return not self.running or self.running.advanced()

    def adopt(self, session: Session, last: list[positions.Last] | None) -> None:
        """Go on from a session made elsewhere."""
        self.session = session
        self.last = last
        self.batched = session.batch is not None
        self._shortest = min(cursor.capacity for cursor in session.cursors.values())
        session.record(on=self.recording)

    def begin_call(self) -> None:
        """A call begins, as its masks and positions are asked for.

        Only states beside the store need to know before their layers run: what a call that died
        has changed is taken back, and what this one may change is kept.
        """
        if not self.running:
            return
        self.settle()
        if self.running.marked != self.seen:
            self.running.mark(self.seen)

    def begin_layer(self, layer: int) -> None:
        """A layer that is not the store's begins; a call may begin with it unannounced."""
        if self.running and self.running.marked != self.seen and layer < self.owned[0]:
            self.running.mark(self.seen)

    def write(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
        *,
        position_ids: Tensor | None,
        ids: Tensor | None,
    ) -> Step:
        """Write a layer's rows, `[batch, kv_heads, tokens, dim]`; the step they are in.

        Args:
            layer: one of `owned`.
            key: in the dtype of the first key ever.
            value: the same.
            position_ids: of the call, where the model passes them on.
            ids: token ids of the call, `[batch, tokens]`, where they are known.

        Raises:
            CacheDiscontinuity: a position was skipped or replayed.
            ContextFull, LimitReached, MemoryUnavailable: as in `Session.step`.
            StepIncomplete: the first layer was passed over.
            LayerRepeated: the layer was written already in this call.
            TensorMismatch: another batch, shape, dtype or device. In all cases the cache is as it
                was before the call.
        """
        if layer == self.owned[0]:
            step = self.begin(key, position_ids, ids)
        else:
            step = self._ongoing(layer)
        try:
            self._check(layer, key, value)
            if self.batched:
                step.write(layer, key.transpose(1, 2), value.transpose(1, 2))
            else:
                step.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        except BaseException:
            self.abort()
            raise
        return step

    def _ongoing(self, layer: int) -> Step:
        """The open step, for a layer that is not the first."""
        if self.step is not None and self.is_written:
            self._conclude(self.step)
        step = self.step
        if step is None:
            missing = [each for each in self.owned if each < layer]
            raise StepIncomplete(layers=missing, aborted=True)
        return step

    def begin(self, key: Tensor, position_ids: Tensor | None, ids: Tensor | None) -> Step:
        """The step of a call whose first key this is; the rest is as in `write`."""
        # layers before it may have begun the new call already: their states stay
        if self.step is not None:
            self._conclude(self.step)
        num_tokens = key.shape[2]
        session = self.session
        if session is None or not _fits(session, key):
            if session is not None:
                session.close()
            session = self._opened(key)
            self.adopt(session, positions.start(session.position, session.num_sequences))
        after = positions.followed(
            self.last, position_ids, num_tokens, padding=session.batch is not None
        )
        tokens = self._tokens(session, num_tokens, ids)
        first = session.position
        capture = [cut for cut in self.wished if first < cut <= first + num_tokens]
        if self.running and self.running.marked != session.position:
            self._mark_if_first(session.position)
        # a part of it may be kept: free, unless the step is longer than a ring
        partial = self.recording or num_tokens <= self._shortest
        try:
            step = session.step(tokens, speculative=partial, capture=capture)
            self.step = step.__enter__()
        except BaseException:
            self._recall()
            raise
        self._partial = partial
        self._last_after = after
        return step

    def _tokens(self, session: Session, num_tokens: int, ids: Tensor | None) -> Tensor | int:
        """What a step is given: ids while the session remembers them, else how many."""
        if session.ids is None:
            return num_tokens
        if ids is None or ids.shape[-1] != num_tokens or len(ids) != session.num_sequences:
            # embeddings and the like: once they are kept, nobody knows what was said
            self._forgotten, session.ids = session.ids, None
            return num_tokens
        return ids if self.batched else ids[0]

    def _recall(self) -> None:
        """The call that made the text unknown is not kept: it is known again."""
        forgotten, self._forgotten = self._forgotten, None
        if forgotten is not None and self.session is not None:
            self.session.ids = forgotten

    def _mark_if_first(self, position: int) -> None:
        """Keep the other layers' states when this call cannot have changed them yet."""
        if min(self.running.layers) > self.owned[0]:
            self.running.mark(position)

    def _check(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Refuse what the store would take and other caches would hold otherwise."""
        session = self.session
        if session is None:
            return
        for what, rows in (("key", key), ("value", value)):
            if rows.dtype is not session.plan.dtype:
                raise TensorMismatch(
                    layer=layer, what=f"{what} dtype", expected=session.plan.dtype, got=rows.dtype
                )
            if rows.shape[0] != session.num_sequences:
                raise TensorMismatch(
                    layer=layer,
                    what=f"{what} batch",
                    expected=session.num_sequences,
                    got=rows.shape[0],
                )

    def settle(self) -> None:
        """End the last call: commit it when all its layers are written, else take it back."""
        if self.step is not None:
            self._conclude(self.step)
        elif self._is_changed():
            # a call died before its first row
            self.running.restore()

    def _conclude(self, step: Step) -> None:
        if not step.is_open:
            # its session was closed
            self.step = None
        elif self.is_written:
            step.commit()
            self.step = None
            self._forgotten = None
            self.last = self._last_after
        else:
            self.abort()

    def _is_changed(self) -> bool:
        """Whether states beside the store are ahead of the tokens seen."""
        return bool(self.running) and self.running.marked == self.seen and self.running.changed()

    def abort(self) -> None:
        """Take an open step back, as if its call had never been."""
        self.drop()
        if self.running.changed():
            self.running.restore()

    def drop(self) -> None:
        """Take an open step's rows back; states beside the store stay as they are."""
        step, self.step = self.step, None
        if step is not None:
            step.abort()
            self._recall()

    def take_back(self, count: int) -> None:
        """Forget the last `count` tokens seen, in all layers or in none.

        Raises:
            ArgumentError: more than there are.
            PositionError: a running state cannot go back. WindowLost: rows are gone. Nothing was
                changed.
        """
        target = self.seen - count
        session, step = self.session, self.step
        first = 0 if session is None else session.first_position
        if count < 0 or target < first:
            raise ArgumentError(
                argument="tokens_to_remove",
                expected=f"within [-{self.seen - first}, 0]",
                got=-count,
            )
        if step is not None and self.is_written and count:
            num_tokens = step.stop - step.first
            if count == num_tokens:
                self.abort()
                return
            if count < num_tokens and self._partial:
                self.running.check_croppable(target)
                step.commit(num_tokens - count)
                self.step = None
                self._forgotten = None
                self.last = positions.rewound(self._last_after, count)
                self.running.crop(-count)
                return
        self.settle()
        if count and session is not None:
            self.running.check_croppable(target)
            session.rewind(target)
            self.last = positions.rewound(self.last, count)
            self.running.crop(-count)

    def record(self, *, on: bool) -> None:
        """Keep overwritten rows from now on, so that more can be taken back; or no longer."""
        self.settle()
        if on != self.recording:
            self.recording = on
            if self.session is not None:
                self.session.record(on=on)

    def reset(self) -> None:
        """Empty, in every layer of the store."""
        self.drop()
        session = self.session
        if session is not None:
            session.reset()
            if session.ids is None and self.remembers:
                session.ids = [[] for _ in range(session.num_sequences)]
            self.last = positions.start(session.position, session.num_sequences)

    def reorder(self, sequences: Tensor) -> None:
        """Give each sequence of a batch the rows of the one named in its place."""
        self.settle()
        self.running.check_held("reordering", self.seen)
        session = self.session
        if session is not None and session.batch is not None:
            places = sequences.tolist()
            session.reorder(places)
            self.last = None if self.last is None else [self.last[place] for place in places]
        self.running.each("reorder_cache", sequences)

    def select(self, sequences: Sequence[int]) -> None:
        """Hold these sequences, in this order, each as often as named, instead of all.

        Raises:
            ArgumentError: one that is not there. Nothing was changed.
            PositionError: the model keeps a state that a cache cannot copy. Nothing was changed.
        """
        self.settle()
        self.running.check_held("another batch", self.seen)
        if self.session is None:
            return
        session = self.session.store.select(self.session, sequences)
        if len(sequences) == 1:
            # a single sequence is an ordinary session: its tensors have no batch axis
            session.batch = None
        last = None if self.last is None else [self.last[place] for place in sequences]
        self.session.close()
        self.adopt(session, last)
        self.running.each("reorder_cache", torch.tensor(sequences))

    def apart(self, mask: Tensor | None) -> list[Session]:
        """One ordinary session a sequence, without its padding.

        Args:
            mask: the last call's attention mask, where there was one.

        Raises:
            ArgumentError: position ids and mask do not agree about what is padding.
        """
        self.settle()
        session = self.session
        if session is None:
            return []
        pads = None
        if self.last is not None and all(len(each) == 1 for each in self.last):
            pads = [session.position - 1 - each[0] for each in self.last]
        hidden = pads
        if mask is not None and mask.shape == (session.num_sequences, session.position):
            hidden = (mask == 0).sum(dim=1).tolist()
        if pads is None or hidden != pads:
            raise ArgumentError(
                argument="cache", expected="position ids that tell padding from text", got=self.last
            )
        return apart(session, pads)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.drop()
        if self.session is not None:
            self.session.close()
