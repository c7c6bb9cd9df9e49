"""The tokens being added now, in all layers together: reserved, written, then kept or not.

    with session.step(ids) as step:          reserve: every layer is asked, nothing has changed
        out = step.attend(layer, q, k, v)    rows in, attention out, layer by layer
                                             leaving commits; an exception aborts

A step is atomic over all layers and can be taken back at any point (design, section 10).
"""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jaxtyping import Float
from torch import Tensor

from kvplane.errors import (
    ArgumentError,
    PositionError,
    StepClosed,
    StepIncomplete,
    StepOpen,
    ViewExpired,
)
from kvplane.journal import GroupStep, KeyValue, joined, refuse_layer
from kvplane.plane import Plane
from kvplane.snapshot import Capture
from kvplane.tokens import Tokens, check_kind, checked_cuts, whole
from kvplane.view import View

if TYPE_CHECKING:
    from kvplane.session import Session


class Step:
    """Tokens on their way into a session; made by `Session.step`.

    Shapes at this door: T tokens, H query heads, K key-value heads; with a batch axis in front
    when the session has one.
    """

    def __init__(
        self, session: "Session", tokens: Tokens, *, speculative: bool, capture: Sequence[int]
    ) -> None:
        check_kind("speculative", speculative, bool, "True or False")
        self._session = session
        self._tokens = tokens
        self._speculative = speculative
        self._capture = checked_cuts(capture)
        self._captures: dict[int, dict[int, KeyValue]] = {}
        self._groups: dict[str, GroupStep] = {}
        self._waiting: dict[int, KeyValue] = {}
        self.written: set[int] = set()
        self._charged = 0
        self._state = "not entered"
        self.first = session.position
        self.stop = self.first + tokens.num_tokens

    def __enter__(self) -> Self:
        with self._session.guard:
            self._reserve()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._state != "open":
            return
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            # an interrupt between two layers' rows: take everything back
            self.abort()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it was entered and neither committed nor aborted."""
        return self._state == "open"

    def journal_rows(self, group_id: str) -> int:
        """Rows that each layer of a group keeps beside its plane while the step is open."""
        part = self._groups.get(group_id)
        return 0 if part is None else part.journal_rows

    def _reserve(self) -> None:
        session = self._session
        session.check_writable("a step")
        if self._state != "not entered":
            raise StepClosed(first=self.first, stop=self.stop, state=self._state)
        if session.open_step is not None:
            raise StepOpen(first=session.open_step.first, stop=session.open_step.stop)
        count = self._tokens.num_tokens
        self.first = session.position
        self.stop = self.first + count
        for cut in self._capture:
            if not self.first < cut <= self.stop:
                raise ArgumentError(
                    argument="capture", expected=f"within ({self.first}, {self.stop}]", got=cut
                )
        groups = {
            group.id: GroupStep(
                group=group,
                before=session.cursors[group.id],
                first_position=session.first_position,
                num_tokens=count,
                keep_unstored=self._speculative,
                keep_all=session.undo is not None,
            )
            for group in session.groups
        }
        plan = session.plan
        charge = session.num_sequences * (
            count * plan.full_row_nbytes
            + sum(part.journal_rows * plan.row_nbytes(part.group) for part in groups.values())
        )
        session.charge(charge)
        try:
            for part in groups.values():
                session.back(part.group, part.rows)
        except BaseException:
            session.charge(-charge)
            raise
        self._charged = charge
        self._groups = groups
        self._state = "open"
        session.open_step = self

    def write(
        self,
        layer: int,
        key: Float[Tensor, "*batch tokens kv_heads head_dim"],
        value: Float[Tensor, "*batch tokens kv_heads value_head_dim"],
    ) -> None:
        """Write a layer's rows, for callers with attention of their own.

        Args:
            layer: one that owns rows, once in a step, in any order.
            key: in the plane's dtype, or float32, which is rounded to nearest even (infinities
                included, unchecked; the chapter's section 15.4).
            value: the same.

        Raises:
            TensorMismatch: shape, dtype or device. Nothing was written.
            LayerRepeated: the layer was written already, or shares another's rows.
            StepClosed: the step is not open.
        """
        with self._session.guard:
            self._write(layer, key, value)

    def written_on_device(self) -> None:
        """Note that queued work writes every layer's rows, of a step that needs no journal."""
        for part in self._groups.values():
            part.stored = True
        self.written.update(self._session.planes)

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        session = self._session
        if self._state != "open":
            raise StepClosed(first=self.first, stop=self.stop, state=self._state)
        if type(layer) is not int or layer in self.written or layer not in session.planes:
            refuse_layer(session.geometry, layer)
        plane = session.planes[layer]
        plan, count = session.plan, self._tokens.num_tokens
        key, value = plan.rounded(layer, (key, value), batch=session.batch, count=count)
        if self._waiting:
            self._flush_waiting()
        part = self._groups[plan.group_ids[layer]]
        if part.row is not None and not self._capture:
            part.stored = True
            if plane.put(part.row, key, value):
                self.written.add(layer)
                return
        if session.batch is None:
            key, value = key.unsqueeze(0), value.unsqueeze(0)
        for cut in self._capture:
            if part.group.sliding_window is not None:
                self._captures.setdefault(cut, {})[layer] = part.captured(cut, plane, key, value)
        if part.waits:
            # a copy of the caller's tensors: they may be reused before the rows are written
            self._waiting[layer] = (key.clone(), value.clone())
        else:
            part.flush(layer, plane, key, value)
        self.written.add(layer)

    def _flush_waiting(self, *, everything: bool = False) -> None:
        for layer in list(self._waiting):
            # later layers still read the old window of a plane that they share
            if everything or layer not in self._session.plan.shared_layers:
                key, value = self._waiting[layer]
                part = self._groups[self._session.plan.group_ids[layer]]
                part.flush(layer, self._session.planes[layer], key, value)
                del self._waiting[layer]

    def view(self, layer: int) -> View:
        """Keys and values a stock kernel needs: the last `window - 1` rows and the step's own.

        Raises:
            StepIncomplete: the layer, or the one whose rows it shares, was not written yet.
            ViewExpired: the chunk replaced rows of its own window when the next layer was written.
            StepClosed: the step is not open.
        """
        with self._session.guard:
            part, plane, chunk = self._readable(layer)
            runs = part.visible(stored=chunk is None)
            if self._session.batch is None:
                spans = plane.only_spans(runs)
                chunk = None if chunk is None else (chunk[0][0], chunk[1][0])
            else:
                spans = plane.spans(runs)
            if chunk is not None:
                # a wrapped window is two spans: with the chunk's they would be three
                spans = [joined(spans)] if len(spans) > 1 else spans
                spans.append(chunk)
            return View(part.oldest_visible, self.stop, tuple(spans))

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "*batch tokens heads head_dim"],
        key: Float[Tensor, "*batch tokens kv_heads head_dim"] | None = None,
        value: Float[Tensor, "*batch tokens kv_heads value_head_dim"] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "*batch tokens heads value_head_dim"]:
        """Write a layer's rows and attend over its window, in the store's order.

        Args:
            layer: the layer; its window is the geometry's.
            query: T queries, one a token of the step.
            key: as in `write`; None when the layer shares another's rows, or wrote its own.
            value: as in `write`.
            scale: factor on the scores; None: head_dim ** -0.5.
            softcap: scores become `softcap * tanh(scores / softcap)`.
            sinks: a logit for each head that joins the softmax and reads no value.

        Returns:
            The attention output, in the query's dtype.

        Raises:
            TensorMismatch, LayerRepeated, StepClosed: as in `write`.
            ArgumentError: a scale or softcap that means nothing. Nothing was written.
            StepIncomplete: no key was given and the rows were not written yet.
        """
        with self._session.guard:
            session = self._session
            if (key is None) != (value is None):
                raise ArgumentError(argument="value", expected="with key", got="one without other")
            plan, count = session.plan, self._tokens.num_tokens
            rows = plan.query(layer, query, batch=session.batch, count=count)
            sinks = plan.rule(layer, rows, scale=scale, softcap=softcap, sinks=sinks)
            if key is not None and value is not None:
                self._write(layer, key, value)
            part, plane, chunk = self._readable(layer)
            out = plan.attend(
                plane,
                part.visible(stored=chunk is None),
                rows,
                *(chunk or (None, None)),
                first_key=part.oldest_visible,
                first_query=part.first,
                window=session.geometry.layers[layer].sliding_window,
                scale=part.group.head_dim**-0.5 if scale is None else scale,
                softcap=softcap,
                sinks=sinks,
            )
            return out if session.batch is not None else out[0]

    def _readable(self, layer: int) -> tuple[GroupStep, Plane, KeyValue | None]:
        """A layer's group, the plane it reads, and the chunk that is not stored there yet."""
        if self._state != "open":
            raise StepClosed(first=self.first, stop=self.stop, state=self._state)
        owner = layer
        if type(layer) is not int or layer not in self.written:
            owner = self._session.geometry.owner(layer)
            if owner not in self.written:
                raise StepIncomplete(layers=[owner], aborted=False)
        part = self._groups[self._session.plan.group_ids[owner]]
        chunk = self._waiting.get(owner)
        if chunk is None and part.waits:
            raise ViewExpired(layer=owner)
        return part, self._session.planes[owner], chunk

    def commit(self, accepted: int | None = None) -> None:
        """Keep the step's first `accepted` tokens, or all.

        Args:
            accepted: None for all; fewer than all only in a speculative step. Rejected rows are
                put back; 0 is an abort.

        Raises:
            StepIncomplete: a layer was not written; the step was aborted.
            PositionError: `accepted` cannot be kept. The step stays open.
            StepClosed: the step is not open.
        """
        with self._session.guard:
            if self._state != "open":
                raise StepClosed(first=self.first, stop=self.stop, state=self._state)
            accepted = self._accepted(accepted)
            missing = sorted(self._session.planes.keys() - self.written)
            if missing:
                self._abort()
                raise StepIncomplete(layers=missing, aborted=True)
            if accepted == 0:
                self._abort()
                return
            self._flush_waiting(everything=True)
            self._session.remember(self._tokens.ids, self.first, accepted)
            self._settle(accepted)
            kept = accepted * self._session.plan.full_row_nbytes
            self._close("committed", kept=kept * self._session.num_sequences)

    def check_commit(self, accepted: int | None) -> None:
        """Refuse what `commit` would refuse with the step left open: StepClosed, PositionError."""
        with self._session.guard:
            if self._state != "open":
                raise StepClosed(first=self.first, stop=self.stop, state=self._state)
            self._accepted(accepted)

    def _accepted(self, accepted: int | None) -> int:
        count = self._tokens.num_tokens
        if accepted is None:
            return count
        kept = whole(accepted)
        if kept is None:
            raise ArgumentError(argument="accepted", expected="a number of tokens", got=accepted)
        if not 0 <= kept <= count:
            message = f"accepted {accepted} is outside [0, {count}]; the step stays open"
            raise PositionError(message, position=self.first + kept)
        if kept < count and not self._speculative:
            message = (
                f"accepted {accepted} of {count} tokens: a part is kept only of a step opened with "
                "speculative=True; the step stays open"
            )
            raise PositionError(message, position=self.first + kept)
        return kept

    def _settle(self, accepted: int) -> None:
        """Put saved rows back and swap every cursor at once."""
        session = self._session
        cursors = {}
        for name, part in self._groups.items():
            settled = part.settled(accepted)
            if accepted < part.num_tokens:
                for layer in part.group.layers:
                    part.put_back(layer, session.planes[layer], settled)
            if session.undo is not None:
                for layer in part.group.layers:
                    session.undo.add(layer, part.outlived(layer, settled), part.group)
            cursors[name] = settled
        # the one moment at which the session moves on
        session.cursors = cursors
        if accepted:
            for cut, rows in self._captures.items():
                if cut <= self.first + accepted:
                    session.captures[cut] = Capture(position=cut, rows=rows)

    def abort(self) -> None:
        """Take everything back, as if the step had never begun. Idempotent.

        The position and every row it needs are as before; the live range may be shorter by what
        the step overwrote outside the window.
        """
        with self._session.guard:
            if self._state == "open":
                self._abort()

    def _abort(self) -> None:
        self._waiting.clear()
        self._settle(0)
        self._session.ledger.cut(self.first)
        self._close("aborted", kept=0)

    def _close(self, state: str, *, kept: int) -> None:
        session = self._session
        session.charge(kept - self._charged)
        self._charged = 0
        self._waiting.clear()
        self._captures.clear()
        self._groups = {}
        session.open_step = None
        self._state = state
