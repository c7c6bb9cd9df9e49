"""Where the rows of a document come from: a session's planes, or what a step kept at a cut."""

from collections.abc import Sequence

from torch import Tensor

from kvplane.errors import ArgumentError
from kvplane.geometry import LayerGroup
from kvplane.session import Session
from kvplane.snapshot import Capture

Rows = Sequence[tuple[Tensor, Tensor]]


class RowSource:
    """Rows of one sequence of a session, by the positions of the document.

    Whoever uses it holds the session's guard, with no step open.

    Args:
        session: whose planes.
        sequence: which of a batch.
        padding: positions in front that are no tokens: the document begins behind them.
        capture: sliding rows kept at a cut, which then come from there.

    Raises:
        ArgumentError: no such sequence, or more padding than positions.
    """

    def __init__(
        self,
        session: Session,
        *,
        sequence: int = 0,
        padding: int = 0,
        capture: Capture | None = None,
    ) -> None:
        if not 0 <= sequence < session.num_sequences:
            expected = f"within [0, {session.num_sequences})"
            raise ArgumentError(argument="sequence", expected=expected, got=sequence)
        most = 0 if session.batch is None else session.position - session.first_position
        if not 0 <= padding <= most:
            expected = f"within [0, {most}]: only batches are padded"
            raise ArgumentError(argument="padding", expected=expected, got=padding)
        self.session = session
        self.padding = padding
        self.position = session.position - padding
        self._sequence = sequence
        self._capture = capture

    def first_held(self, group: LayerGroup) -> int:
        """The oldest position it has of a group."""
        if self._capture is not None and group.is_sliding:
            return self._capture.position - self._capture.rows[group.layers[0]][0].shape[1]
        held = self.session.cursors[group.id].origin_logical
        # rows of padding are in the way of nobody, and no token's
        return max(held, self.session.first_position + self.padding) - self.padding

    def rows(self, group: LayerGroup, layer: int, first: int, stop: int) -> Rows:
        """Key and value of positions [first, stop), `[rows, kv_heads, dim]`, as spans."""
        if self._capture is not None and group.is_sliding:
            key, value = self._capture.rows[layer]
            begin = first - (self._capture.position - key.shape[1])
            spans = [(key.narrow(1, begin, stop - first), value.narrow(1, begin, stop - first))]
        else:
            cursor = self.session.cursors[group.id]
            runs = cursor.rows_of(first + self.padding, stop + self.padding)
            spans = self.session.planes[layer].spans(runs)
        return [(key[self._sequence], value[self._sequence]) for key, value in spans]

    def cursor(self, group: LayerGroup) -> tuple[int, int, int, int]:
        """(capacity, length, origin_logical, origin_physical) of a group in the document."""
        cursor = self.session.cursors[group.id]
        first = self.first_held(group)
        length = self.position - first
        row = cursor.row_at(first + self.padding)
        return cursor.capacity, length, first, row
