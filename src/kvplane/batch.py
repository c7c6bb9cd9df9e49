"""One step of several independent sessions, of any lengths, with one call a layer.

Rows of all sessions are concatenated in their order; no padding rows exist. A refusal of one
session refuses the whole batch.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from jaxtyping import Float
from torch import Tensor

from kvplane.errors import ArgumentError, PositionError, TensorMismatch
from kvplane.session import Session
from kvplane.tokens import check_kind

if TYPE_CHECKING:
    from kvplane.step import Step


class BatchStep:
    """Steps of distinct sessions that go forward together; made by `KVStore.batch`.

    Args:
        sessions: distinct ordinary sessions.
        tokens: for each, a count or the ids; None: one token each.
        speculative: as in `Session.step`.

    Raises:
        ArgumentError: no session, a repeated one, one with a batch axis, another number of tokens.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        tokens: Sequence[int | Sequence[int]] | None = None,
        *,
        speculative: bool = False,
    ) -> None:
        check_kind("sessions", sessions, Sequence, "a sequence")
        for session in sessions:
            check_kind("sessions", session, Session, "sessions")
        if not sessions:
            raise ArgumentError(argument="sessions", expected="at least one", got=sessions)
        if len({id(session) for session in sessions}) < len(sessions):
            raise ArgumentError(argument="sessions", expected="distinct ones", got="a repeated one")
        if any(session.batch is not None for session in sessions):
            raise ArgumentError(argument="sessions", expected="no batch axis", got="one that has")
        if tokens is not None:
            check_kind("tokens", tokens, Sequence, "a sequence")
        wanted = [1] * len(sessions) if tokens is None else list(tokens)
        if len(wanted) != len(sessions):
            raise ArgumentError(
                argument="tokens", expected=f"{len(sessions)} entries", got=len(wanted)
            )
        self.steps: tuple[Step, ...] = tuple(
            session.step(part, speculative=speculative)
            for session, part in zip(sessions, wanted, strict=True)
        )

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each session."""
        return [step.stop - step.first for step in self.steps]

    def __enter__(self) -> Self:
        entered: list[Step] = []
        try:
            for step in self.steps:
                step.__enter__()
                entered.append(step)
        except BaseException:
            for step in entered:
                step.abort()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not any(step.is_open for step in self.steps):
            return
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise

    def write(
        self,
        layer: int,
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads value_head_dim"],
    ) -> None:
        """Write a layer's rows of all sessions, concatenated in their order.

        Raises:
            TensorMismatch, LayerRepeated, StepClosed: as in `Step.write`; the batch is aborted
                when some sessions had taken theirs already.
        """
        parts = zip(self.steps, self._split(layer, key), self._split(layer, value), strict=True)
        with _AllOrNone(self):
            for step, rows, values in parts:
                step.write(layer, rows, values)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "tokens kv_heads head_dim"] | None = None,
        value: Float[Tensor, "tokens kv_heads value_head_dim"] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "tokens heads value_head_dim"]:
        """`Step.attend` for every session; a session's bits do not depend on its neighbours."""
        queries = self._split(layer, query)
        count = len(self.steps)
        keys = [None] * count if key is None else self._split(layer, key)
        values = [None] * count if value is None else self._split(layer, value)
        with _AllOrNone(self):
            parts = [
                step.attend(layer, q, k, v, scale=scale, softcap=softcap, sinks=sinks)
                for step, q, k, v in zip(self.steps, queries, keys, values, strict=True)
            ]
        return torch.cat(parts)

    def commit(self, accepted: Sequence[int | None] | None = None) -> None:
        """Keep each session's first `accepted` tokens, or all of them.

        Raises:
            StepIncomplete: a layer was not written; every session's step was aborted.
            ArgumentError: no sequence; every step stays open.
            PositionError: a number that cannot be kept; every step stays open.
        """
        if accepted is not None:
            check_kind("accepted", accepted, Sequence, "a number of tokens for each session")
        wanted = [None] * len(self.steps) if accepted is None else list(accepted)
        if len(wanted) != len(self.steps):
            raise PositionError(
                f"accepted has {len(wanted)} entries for {len(self.steps)} sessions; "
                "the steps stay open",
                position=self.steps[0].first,
            )
        for step, part in zip(self.steps, wanted, strict=True):
            step.check_commit(part)
        with _AllOrNone(self):
            for step, part in zip(self.steps, wanted, strict=True):
                step.commit(part)

    def abort(self) -> None:
        """Take everything back in every session that is still open. Idempotent."""
        for step in self.steps:
            step.abort()

    def _split(self, layer: int, rows: object) -> list[Tensor]:
        counts = self.num_tokens
        if not isinstance(rows, Tensor) or rows.ndim < 1 or rows.shape[0] != sum(counts):
            got = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise TensorMismatch(
                layer=layer, what="rows", expected=f"{sum(counts)} of all sessions", got=got
            )
        return list(torch.split(rows, counts))


class _AllOrNone:
    """Aborts the whole batch when one session refuses in the middle."""

    def __init__(self, batch: BatchStep) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self._batch.abort()
