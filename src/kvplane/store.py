"""The store: sessions of one model's keys and values, under one plan and one limit."""

import dataclasses
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from kvplane._version import __version__
from kvplane.account import Account
from kvplane.batch import BatchStep
from kvplane.builder import SessionBuilder, forked, selected
from kvplane.describe import Description, MemoryReport, describe, report
from kvplane.errors import ArgumentError, SessionClosed
from kvplane.footprint import capacity_of
from kvplane.geometry import ModelGeometry
from kvplane.ledger import Ledger
from kvplane.memory import Arena, choose
from kvplane.orders import ORDERS, order_numerics, order_of
from kvplane.plan import (
    StorePlan,
    check_count,
    checked_device,
    checked_dtype,
    checked_layouts,
)
from kvplane.plane import Layout, Plane
from kvplane.processor import processor_of
from kvplane.restoring import adapted, refilled, restored
from kvplane.rows import checked_sequences
from kvplane.schedule import CHUNK
from kvplane.session import Session
from kvplane.snapshot import Cursor, Snapshot
from kvplane.tokens import check_kind, checked_ids


class KVStore:
    """Keys and values of many sessions of one model.

    Args:
        geometry: the model's layers.
        max_context: positions end below it.
        dtype: of the planes, "float16", "bfloat16", "float32" or the torch dtype; None takes the
            geometry's.
        device: where the planes live.
        memory: "auto", or a backend by name, which then works or raises.
        attention: "blocked" (bits do not depend on rotation, layout, chunking or neighbours) or
            "physical" (rows in buffer order, as the chapter's engine).
        slack: rows of a ring beyond its window: rewinds up to that deep lose nothing.
        row_floor: fewest rows of a plane that the kernel in use takes; the chapter's is 32.
        layout: by layer kind; default token-major rings and head-major full planes.
        limit: bytes of all sessions: rings reserved, full rows held, journals open.

    Raises:
        ArgumentError: a number or name that means nothing.
        BackendUnavailable: the memory backend asked for by name does not work here.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        *,
        max_context: int,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        memory: str = "auto",
        attention: str = "blocked",
        slack: int = 0,
        row_floor: int = 1,
        layout: Mapping[str, Layout] | None = None,
        limit: int | None = None,
    ) -> None:
        if not isinstance(geometry, ModelGeometry):
            raise ArgumentError(argument="geometry", expected="a ModelGeometry", got=geometry)
        if not geometry.groups:
            raise ArgumentError(argument="geometry", expected="layers with rows", got=geometry)
        max_context = check_count("max_context", max_context, 1)
        slack = check_count("slack", slack, 0)
        row_floor = check_count("row_floor", row_floor, 1)
        if limit is not None:
            limit = check_count("limit", limit, 0)
        check_kind("attention", attention, str, str(sorted(ORDERS)))
        check_kind("memory", memory, str, "a name")
        if attention not in ORDERS:
            raise ArgumentError(argument="attention", expected=str(sorted(ORDERS)), got=attention)
        self.slack = slack
        self.row_floor = row_floor
        self.attention = attention
        where = checked_device(device)
        kept = checked_dtype(geometry.dtype if dtype is None else dtype)
        geometry = dataclasses.replace(geometry, dtype=str(kept).removeprefix("torch."))
        self.memory_choice = choose(memory, where)
        self.plan = StorePlan(
            geometry=geometry,
            dtype=kept,
            device=where,
            max_context=max_context,
            capacities={
                group.id: capacity_of(
                    group,
                    max_context=max_context,
                    slack=slack,
                    row_floor=row_floor,
                    page_nbytes=self.memory_choice.backend.ring_page_nbytes,
                )
                for group in geometry.groups
            },
            layouts=checked_layouts(layout, where),
            attend=order_of(attention, where),
        )
        self.account = Account(limit)
        self.numerics: dict[str, Any] = {
            **order_numerics(attention, where),
            "chunk": CHUNK,
            "device": where.type,
            "processor": processor_of(where),
            "dtype": str(self.plan.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "transformers": None,
            "kvplane": __version__,
        }
        self.closed = False
        self._lock = threading.Lock()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    @property
    def geometry(self) -> ModelGeometry:
        """The model's geometry."""
        return self.plan.geometry

    @property
    def dtype(self) -> torch.dtype:
        """The planes' dtype."""
        return self.plan.dtype

    @property
    def max_context(self) -> int:
        """Positions end below it."""
        return self.plan.max_context

    @property
    def sessions(self) -> list[Session]:
        """The open sessions."""
        with self._lock:
            return sorted(self._sessions, key=id)

    def open(
        self,
        tokens: Sequence[int] | None = None,
        *,
        batch: int | None = None,
        first_position: int = 0,
        first_row: int | None = None,
    ) -> Session:
        """An empty session.

        Args:
            tokens: an empty sequence turns on remembering ids, which packs need.
            batch: sequences that advance in lockstep; None for an ordinary session, whose tensors
                have no batch axis.
            first_position: where it begins; such a session is never published as a prefix.
            first_row: the rings' row of the first position; None: the one that a session born at 0
                would have reached.

        Raises:
            ArgumentError: numbers no session can have.
            LimitReached: its rings would pass the store's limit.
            MemoryUnavailable: they cannot be had.
        """
        first_position = check_count("first_position", first_position, 0)
        if first_position >= self.max_context:
            raise ArgumentError(
                argument="first_position", expected=f"below {self.max_context}", got=first_position
            )
        if batch is not None:
            batch = check_count("batch", batch, 1)
        if tokens is not None:
            check_kind("tokens", tokens, Sequence, "an empty sequence")
            if len(tokens):
                raise ArgumentError(argument="tokens", expected="an empty sequence", got=tokens)
        if first_row is not None:
            first_row = check_count("first_row", first_row, 0)
            rings = [g.id for g in self.geometry.groups if g.sliding_window is not None]
            smallest = min((self.plan.capacities[name] for name in rings), default=1)
            if first_row >= smallest:
                raise ArgumentError(
                    argument="first_row", expected=f"below {smallest}", got=first_row
                )
        ids: list[list[int]] | None = None
        if tokens is not None:
            ids = [[] for _ in range(batch or 1)]
        return SessionBuilder(
            self,
            self.plan.cursors(first_position, first_row),
            batch=batch,
            first_position=first_position,
            tokens=ids,
            ledger=Ledger(first_position=first_position),
        ).finish()

    def builder(
        self,
        cursors: Mapping[str, Cursor],
        *,
        batch: int | None = None,
        first_position: int = 0,
        tokens: Sequence[Sequence[int]] | None = None,
        ledger: Ledger | None = None,
    ) -> SessionBuilder:
        """Detached planes at the cursors of a session that comes from elsewhere.

        Args:
            cursors: by group id: (capacity, length, origin_logical, origin_physical). A ring of
                another capacity is refused in physical order; in blocked order its newest rows
                are laid where a session born at 0 holds them. A full plane's capacity may differ.
            batch: as in `open`.
            first_position: as in `open`.
            tokens: ids, one list a sequence.
            ledger: provenance of the rows.

        Raises:
            SnapshotMismatch: another set of groups, a capacity that cannot be had, positions that
                disagree or do not fit max_context, rows missing that the next token needs.
            ArgumentError: a batch, first position, ledger or ids that no such session has.
            LimitReached, MemoryUnavailable: as in `open`.
        """
        first_position = check_count("first_position", first_position, 0)
        if batch is not None:
            batch = check_count("batch", batch, 1)
        if ledger is None:
            ledger = Ledger(first_position=first_position)
        check_kind("ledger", ledger, Ledger, "a Ledger")
        fitted = adapted(
            self.plan,
            cursors,
            first_position=first_position,
            any_capacity=self.attention != "physical",
        )
        position = next(iter(fitted.values())).next_position
        return SessionBuilder(
            self,
            fitted,
            batch=batch,
            first_position=first_position,
            tokens=checked_ids(
                tokens, num_sequences=batch or 1, num_tokens=position - first_position
            ),
            ledger=ledger,
        )

    def restore(self, snapshot: Snapshot, *, into: Session | None = None) -> Session:
        """A session with the snapshot's rows, rotation and provenance.

        Args:
            snapshot: of a session of the same geometry and dtype.
            into: a session of this store whose memory is used again: fresh pages cost more than
                the rows' copy. What it held is gone, its checkpoints too. None: a new session.

        Raises:
            ArgumentError: it is no snapshot, or `into` no session of this store.
            SnapshotMismatch: geometry, dtype, batch, capacity or context. Nothing was made or
                changed, as after every refusal.
            TensorMismatch: rows of another shape or dtype.
            LimitReached, MemoryUnavailable: as in `open`.
            StepOpen, SessionClosed, SessionReadOnly: `into` cannot be changed now.
        """
        check_kind("snapshot", snapshot, Snapshot, "a Snapshot")
        if into is None:
            return restored(self, snapshot)
        check_kind("into", into, Session, "a session of this store")
        return refilled(self, snapshot, into)

    def fork_of(self, session: Session) -> Session:
        """A second session with the same rows; `Session.fork` is the public door."""
        return forked(self, session)

    def select(self, session: Session, sequences: Sequence[int]) -> Session:
        """A batch session of some of a session's sequences, each as often as it is named.

        Raises:
            ArgumentError: one that it does not have, or another store's session.
            StepOpen, SessionClosed: as in `Session.fork`.
        """
        check_kind("session", session, Session, "a session of this store")
        if session.store is not self:
            raise ArgumentError(argument="session", expected="of this store", got=session)
        with session.guard:
            session.check_open()
            session.check_idle()
            return selected(self, session, checked_sequences(session, sequences))

    def batch(
        self, sessions: Sequence[Session], num_tokens: Sequence[int] | None = None
    ) -> BatchStep:
        """One step of several sessions: rows of a layer are concatenated in their order.

        Args:
            sessions: distinct ordinary sessions of this store.
            num_tokens: tokens of each; None: one each.

        Raises:
            ArgumentError: no session, a repeated or foreign one.
        """
        check_kind("sessions", sessions, Sequence, "a sequence")
        for session in sessions:
            check_kind("sessions", session, Session, "sessions")
            if session.store is not self:
                raise ArgumentError(argument="sessions", expected="of this store", got=session)
        return BatchStep(sessions, num_tokens)

    def memory(self) -> MemoryReport:
        """Bytes reserved, of rows held, of pages held, shared and scratch, by session and group."""
        return report(self)

    def describe(self) -> Description:
        """What this store does and why; equal configurations give equal descriptions."""
        return describe(self)

    def close(self) -> None:
        """Close every session. Idempotent; tensors over their rows stay readable."""
        self.closed = True
        for session in self.sessions:
            session.close()

    # what sessions and builders ask of the store

    def new_arena(self, parent: Session | None = None) -> Arena:
        """Memory for one more session, or for a fork: SessionClosed when the store is closed."""
        if self.closed:
            raise SessionClosed(position=0)
        return self.memory_choice.backend.arena() if parent is None else parent.arena.fork()

    def new_planes(self, arena: Arena, num_sequences: int) -> dict[int, Plane]:
        """A plane for every layer that owns rows."""
        planes = {}
        # a tensor that is made in inference mode can never be written outside it
        with torch.inference_mode(mode=False):
            for group in self.geometry.groups:
                shape = self.plan.shape(group, num_sequences)
                # only a ring of whole rows can be shown twice in a row
                ring = group.sliding_window is not None and shape.layout is Layout.TOKEN_MAJOR
                for layer in group.layers:
                    span = arena.reserve(shape.nbytes, ring=ring)
                    planes[layer] = Plane(shape, span)
        return planes

    def adopt(self, session: Session) -> None:
        """Make a finished session visible."""
        with self._lock:
            self._sessions.add(session)

    def forget(self, session: Session) -> None:
        """Drop a closed session."""
        with self._lock:
            self._sessions.discard(session)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
