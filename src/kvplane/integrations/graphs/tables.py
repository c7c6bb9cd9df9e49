"""What a graph reads on the device: where each sequence's planes are, its cursors, its position.

The host keeps a mirror. Before a replay the mirror is compared with the sessions: where they differ
(after a rewind, a prompt, for another session) the tables are written anew; else nothing is sent.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import torch

from kvplane.attention.triton_cursors import advance
from kvplane.errors import ArgumentError
from kvplane.integrations.graphs.op import LayerCall
from kvplane.plan import StorePlan
from kvplane.session import Session

if TYPE_CHECKING:
    from kvplane.ring import RingCursor

ALIGNMENT = 16


def shape_of(session: Session) -> tuple[object, ...]:
    """What sessions must have in common to be served by one graph."""
    plan = session.plan
    layers = tuple(
        (plane.key.stride(), plane.value.stride(), plane.value.shape[2:], plane.unrolled)
        for plane in session.planes.values()
    )
    return session.num_sequences, plan.dtype, plan.device, layers


class Tables:
    """Device tables of sequences that go forward together.

    Args:
        plan: of the sessions' store.
        num_sequences: tokens of a step.
    """

    def __init__(self, plan: StorePlan, num_sequences: int) -> None:
        geometry = plan.geometry
        self._plan = plan
        self.positions = torch.zeros((num_sequences, 1), dtype=torch.int64, device=plan.device)
        self._cursors = {
            group.id: torch.zeros((num_sequences, 4), dtype=torch.int64, device=plan.device)
            for group in geometry.groups
        }
        self._owned = [layer for group in geometry.groups for layer in group.layers]
        self._bases = torch.zeros(
            (len(self._owned), num_sequences, 2), dtype=torch.int64, device=plan.device
        )
        self._sessions: list[ReferenceType[Session]] = []
        self._mirror: list[dict[str, RingCursor]] = []

    def calls(self, session: Session) -> dict[int, LayerCall]:
        """How each layer attends; the session's planes lend their strides."""
        geometry = self._plan.geometry
        calls = {}
        for layer, facts in enumerate(geometry.layers):
            owner = geometry.owner(layer)
            if owner not in session.planes:
                continue
            plane = session.planes[owner]
            calls[layer] = LayerCall(
                key=plane.key[:1],
                value=plane.value[:1],
                cursors=self._cursors[self._plan.group_ids[owner]],
                bases=self._bases[self._owned.index(owner)],
                window=facts.sliding_window or 0,
                stores=owner == layer,
                unrolled=plane.unrolled,
            )
        return calls

    def point(self, sessions: Sequence[Session]) -> None:
        """Have the tables say where these sessions are; nothing is sent when they do already.

        Raises:
            ArgumentError: a plane does not begin at a multiple of 16 bytes.
        """
        if [each() for each in self._sessions] != list(sessions):
            self._bases.copy_(torch.tensor(self._addresses(sessions), dtype=torch.int64))
            self._sessions = [ref(session) for session in sessions]
        wanted = [dict(session.cursors) for session in sessions]
        if self._mirror != wanted:
            self.write(sessions)

    def write(self, sessions: Sequence[Session]) -> None:
        """Put the sessions' cursors and positions into the tables."""
        for name, table in self._cursors.items():
            rows = [
                session.cursors[name].as_tuple()
                for session in sessions
                for _ in range(session.num_sequences)
            ]
            table.copy_(torch.tensor(rows, dtype=torch.int64))
        positions = [
            [session.position] for session in sessions for _ in range(session.num_sequences)
        ]
        self.positions.copy_(torch.tensor(positions, dtype=torch.int64))
        self._mirror = [
            {name: cursor.copy() for name, cursor in session.cursors.items()}
            for session in sessions
        ]

    def advance(self) -> None:
        """Queue the move to the next token, on the device; part of the captured step."""
        self.positions.add_(1)
        for table in self._cursors.values():
            advance(table)

    def advanced(self) -> None:
        """The same in the mirror, once a step was queued."""
        for cursors in self._mirror:
            for cursor in cursors.values():
                cursor.append(cursor.next_position)

    def forget(self) -> None:
        """The tables may say anything: write them before the next step."""
        self._mirror = []

    def _addresses(self, sessions: Sequence[Session]) -> list[list[list[int]]]:
        addresses = [
            [
                [part.data_ptr() + row * part.stride(0) * part.element_size() for part in parts]
                for session in sessions
                for parts in [(session.planes[layer].key, session.planes[layer].value)]
                for row in range(session.num_sequences)
            ]
            for layer in self._owned
        ]
        if any(number % ALIGNMENT for rows in addresses for pair in rows for number in pair):
            raise ArgumentError(argument="cache", expected="planes at 16 bytes", got="others")
        return addresses
