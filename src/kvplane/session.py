"""One sequence's rows in every layer, and the only ways to change them.

    step        adds tokens to all layers together, or to none
    rewind      back to a position whose window is still held, or a refusal
    checkpoint  a place to return to; fork: a second session from here; snapshot: a detached copy

One thread at a time; two sessions of one store may be used from two threads.
"""

import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import Tensor

from kvplane import checkpoints
from kvplane.checkpoints import Checkpoint
from kvplane.errors import (
    CheckpointLost,
    PositionError,
    SessionClosed,
    SessionReadOnly,
    StepOpen,
)
from kvplane.geometry import LayerGroup, ModelGeometry
from kvplane.guard import Guard
from kvplane.ledger import Ledger
from kvplane.plan import StorePlan, checked_device
from kvplane.plane import Plane
from kvplane.ring import RingCursor
from kvplane.rows import checked_sequences, cut, detached, empty, recall, reorder, rewound
from kvplane.snapshot import Capture, Snapshot
from kvplane.step import Step
from kvplane.tokens import as_tokens, check_kind, checked_position
from kvplane.touched import Touched
from kvplane.undo import Undo

if TYPE_CHECKING:
    import torch

    from kvplane.memory import Arena
    from kvplane.store import KVStore


class Session:
    """The rows of one sequence; made by `KVStore.open`, `restore` or `fork`.

    Attributes:
        cursors: by layer group id; replaced whole, never changed in place.
        planes: by layer that owns rows.
        ledger: provenance of the rows, for packs.
        captures: sliding rows kept at wished cuts, by position.
        marks: positions at which a cut was wished.
    """

    def __init__(
        self,
        store: "KVStore",
        arena: "Arena",
        planes: Mapping[int, Plane],
        cursors: Mapping[str, RingCursor],
        *,
        batch: int | None,
        first_position: int,
        tokens: list[list[int]] | None,
        ledger: Ledger,
    ) -> None:
        self.store = store
        self.arena = arena
        self.planes = planes
        self.cursors = cursors
        self.batch = batch
        self.first_position = first_position
        self.ledger = ledger
        self.captures: dict[int, Capture] = {}
        self.marks: set[int] = set()
        self.guard = Guard()
        self.open_step: Step | None = None
        self.undo: Undo | None = None
        self.read_only = False
        self.closed = False
        self.touched = {name: Touched() for name in cursors}
        self.tally = store.account.open(self)
        self.ids = tokens
        self.checkpoints: weakref.WeakSet[Checkpoint] = weakref.WeakSet()

    @property
    def plan(self) -> StorePlan:
        """What all sessions of the store have in common."""
        return self.store.plan

    @property
    def geometry(self) -> ModelGeometry:
        """The model's geometry."""
        return self.store.plan.geometry

    @property
    def num_sequences(self) -> int:
        """Sequences that advance in lockstep; 1 for an ordinary session."""
        return 1 if self.batch is None else self.batch

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups that own rows."""
        return self.store.plan.geometry.groups

    @property
    def position(self) -> int:
        """The next position; unchanged while a step is open."""
        # every group is at the same one
        return next(iter(self.cursors.values())).next_position

    @property
    def tokens(self) -> list[int] | list[list[int]] | None:
        """The committed token ids, when the session was opened to remember them."""
        if self.ids is None:
            return None
        count = self.position - self.first_position
        ids = [sequence[:count] for sequence in self.ids]
        return ids[0] if self.batch is None else ids

    def live(self, layer: int) -> range:
        """The committed positions that a layer holds."""
        return self.cursors[self.geometry.group_of(layer).id].live

    def step(
        self,
        tokens: "Sequence[int] | Tensor | int",
        *,
        speculative: bool = False,
        capture: Sequence[int] = (),
    ) -> Step:
        """A context manager that adds tokens; nothing is reserved before `with`.

        Args:
            tokens: ids, `[T]` or `[batch, T]`, or how many when the session remembers none.
            speculative: allow `commit(accepted)` with fewer than all; the journal then also holds
                what a chunk longer than a ring never stores.
            capture: positions in (first, stop] whose sliding rows to keep in `captures`.

        Raises:
            ArgumentError: no tokens, ids outside 32 bits, a count where ids are remembered.
            ContextFull, StepOpen, LimitReached, SessionClosed, SessionReadOnly: on entering.
        """
        return Step(
            self,
            as_tokens(tokens, batch=self.batch, remembers=self.ids is not None),
            speculative=speculative,
            capture=capture,
        )

    def mark(self) -> None:
        """Wish a cut at this position for packs."""
        with self.guard:
            self.check_open()
            self.check_idle()
            self.marks.add(self.position)

    def rewind(self, position: int) -> None:
        """Forget every token from `position` on, in all layers or in none.

        Full layers always can; a sliding layer can while the rows that the next query needs,
        [max(first_position, position - (window - 1)), position), are held.

        Raises:
            PositionError: `position` is above the session's, or below its first.
            WindowLost: names the group and the missing positions. Nothing was changed.
            MemoryUnavailable: recorded rows cannot be put back. Nothing was changed.
        """
        with self.guard:
            self.check_writable("a rewind")
            self.check_idle()
            position = checked_position(position)
            if not self.first_position <= position <= self.position:
                message = (
                    f"position {position} is outside [{self.first_position}, {self.position}]; "
                    "nothing was changed"
                )
                raise PositionError(message, position=position)
            if position == self.position:
                return
            cursors = {group.id: rewound(self, group, position) for group in self.groups}
            if self.undo is not None:
                recall(self, self.undo, cursors)
            cut(self, position, cursors)

    def record(self, *, on: bool = True) -> None:
        """Keep, or stop keeping, the rows that steps overwrite.

        While they are kept, at most `window - 1` a sliding layer, a rewind of up to `window - 1`
        tokens loses nothing. They are scratch: `KVStore.memory()` counts them.
        """
        with self.guard:
            self.check_writable("recording")
            self.check_idle()
            self.undo = Undo() if on else None

    def forget_recorded(self) -> None:
        """Let go of what was recorded so far; recording goes on."""
        with self.guard:
            if self.undo is not None:
                self.undo.clear()

    def checkpoint(self) -> Checkpoint:
        """A place to return to: the rings' rows are copied, full pages are shared.

        Where pages cannot be shared, full rows stay where they are and the checkpoint is valid
        until a rewind below it.
        """
        with self.guard:
            self.check_open()
            self.check_idle()
            kept = checkpoints.taken(self)
            self.checkpoints.add(kept)
            return kept

    def return_to(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint, however far the rings have turned since.

        Raises:
            ArgumentError, PositionError: no checkpoint, or another session's.
            CheckpointLost: a rewind below it let another branch overwrite its full rows.
            MemoryUnavailable: its pages cannot be had; LimitReached: they pass the limit now.
        """
        with self.guard:
            self.check_writable("a return")
            self.check_idle()
            check_kind("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
            if checkpoint.owner is not self:
                message = f"the checkpoint at position {checkpoint.position} is another session's"
                raise PositionError(message, position=checkpoint.position)
            if checkpoint.lost_by is not None:
                raise CheckpointLost(position=checkpoint.position, rewound_to=checkpoint.lost_by)
            forward = checkpoint.position > self.position
            cursors = checkpoints.put_back(self, checkpoint)
            if checkpoint.ids is not None:
                self.ids = [list(sequence) for sequence in checkpoint.ids]
            self.ledger = checkpoint.ledger.copy()
            if self.undo is not None:
                self.undo.clear()
            if forward:
                self.cursors = cursors
            else:
                cut(self, checkpoint.position, cursors)
            # what was kept since may be another branch's
            self.captures = dict(checkpoint.captures)
            self.marks = set(checkpoint.marks)

    def fork(self) -> "Session":
        """A second session with the same rows, which goes its own way."""
        with self.guard:
            self.check_open()
            self.check_idle()
            return self.store.fork_of(self)

    def snapshot(self, *, device: "torch.device | str" = "cpu") -> Snapshot:
        """A detached, immutable copy of every live row, with cursors, ids and provenance.

        Raises:
            StepOpen: a step is open.
        """
        with self.guard:
            self.check_open()
            self.check_idle()
            return detached(self, checked_device(device))

    def spans(self, layer: int, first: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Views of live rows [first, stop) in logical order, token-major; no copy.

        Raises:
            EvictedPosition: one of them is not live.
            ArgumentError: they are no range.
        """
        with self.guard:
            self.check_open()
            cursor = self.cursors[self.geometry.group_of(layer).id]
            runs = cursor.rows_of(checked_position(first), checked_position(stop))
            spans = self.planes[self.geometry.owner(layer)].spans(runs)
            if self.batch is None:
                return [(key[0], value[0]) for key, value in spans]
            return spans

    def reorder(self, sequences: Sequence[int]) -> None:
        """Give each place of the batch the rows of another: `sequences[i]` is copied to i.

        Raises:
            ArgumentError: the session has no batch axis, or these are not as many of its sequences.
        """
        with self.guard:
            self.check_writable("a reorder")
            self.check_idle()
            reorder(self, checked_sequences(self, sequences, num_sequences=self.num_sequences))

    def reset(self) -> None:
        """Empty, at the first position, with row 0 of every ring next."""
        with self.guard:
            self.check_writable("a reset")
            self.check_idle()
            freed = self.full_nbytes
            empty(self, self.first_position)
            self.charge(-freed)
            for plane in self.planes.values():
                plane.span.discard()
            self.touched = {name: Touched() for name in self.cursors}

    def freeze(self) -> None:
        """Make the session read-only for good: a prefix that others fork from."""
        with self.guard:
            self.check_open()
            self.check_idle()
            self.read_only = True

    def close(self) -> None:
        """Give the memory back; an open step is aborted. Idempotent. What views show: `View`."""
        if self.open_step is not None:
            self.open_step.abort()
        with self.guard:
            if not self.closed:
                self.closed = True
                self.store.forget(self)
                self.tally.close()
                self.arena.release()

    # what a step and the store ask of a session

    def check_open(self) -> None:
        """Refuse when closed: SessionClosed."""
        if self.closed:
            raise SessionClosed(position=self.position)

    def check_writable(self, what: str) -> None:
        """Refuse when closed or read-only: SessionClosed, SessionReadOnly."""
        self.check_open()
        if self.read_only:
            raise SessionReadOnly(what=what)

    def check_idle(self) -> None:
        """Refuse while a step is open: StepOpen."""
        if self.open_step is not None:
            raise StepOpen(first=self.open_step.first, stop=self.open_step.stop)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full planes' rows of all committed positions."""
        count = self.position - self.first_position
        return count * self.plan.full_row_nbytes * self.num_sequences

    def charge(self, nbytes: int) -> None:
        """Count bytes that this session takes, or gives back when negative: LimitReached."""
        self.tally.change(nbytes)

    def back(self, group: LayerGroup, runs: Sequence[range]) -> None:
        """Make rows of all the group's planes writable: MemoryUnavailable."""
        for run in runs:
            self.touched[group.id].add(run)
            for layer in group.layers:
                plane = self.planes[layer]
                plane.back(run)

    def remember(self, ids: list[list[int]] | None, first: int, accepted: int) -> None:
        """Keep the ids of positions [first, first + accepted), which are about to be committed."""
        if self.ids is not None and ids is not None:
            held = first - self.first_position
            for sequence, more in zip(self.ids, ids, strict=True):
                sequence[held:] = more[:accepted]
        self.ledger.record(first, first + accepted, self.store.numerics)

    def live_runs(self, group: LayerGroup) -> list[range]:
        """The rows of all live positions of a group, in logical order."""
        cursor = self.cursors[group.id]
        return cursor.rows_of(cursor.origin_logical, cursor.next_position)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
