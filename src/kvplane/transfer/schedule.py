"""Which rows a handoff sends, and in which order: arithmetic on geometry, position and cut.

    segment   one or more layers' rows of a token range: what is sent, verified and repeated as one
    final     a row is final once its layer's chunk is stored: nothing changes it before the end

Two orders are known by name:

    streamed  chunk by chunk and, in each, layer by layer: as rows become final during prefill
    chapter   sliding layers first, full layers once the last layer is done (its section 15.8), in
              tiles of 13 layers x 512 tokens

Full layers send [cut, position); sliding layers only the last window of that.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvplane.errors import ArgumentError
from kvplane.geometry import LayerGroup, ModelGeometry
from kvplane.payload import BLOCK, Payload, handoff

STREAMED = "streamed"
CHAPTER = "chapter"
NAMES = (STREAMED, CHAPTER)
TILE_LAYERS = 13
TILE_TOKENS = 512
# of a session that is there, and of one whose rows come while a prompt is read
CHUNK = 8192
STREAMED_CHUNK = 1024
CHUNK_STOP = 1 << 16
# more segments than this are no schedule: bounds what a receiver keeps about them
SEGMENTS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows that are sent together.

    Args:
        number: its place in the order; names it on the wire.
        group: of its layers.
        layers: whose rows, one layer after another.
        first: position.
        stop: position.
    """

    number: int
    group: LayerGroup
    layers: tuple[int, ...]
    first: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows of each layer."""
        return self.stop - self.first

    @property
    def nbytes(self) -> int:
        """Bytes of all its rows."""
        return len(self.layers) * self.num_rows * self.group.row_nbytes


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The segments of one handoff.

    Args:
        geometry: the model's, with the dtype of the rows.
        position: of the session: the receiver runs the token there itself.
        cut: the receiver holds [0, cut) already.
        name: of the order.
        chunk: tokens of a segment in the order "streamed", a multiple of 256.
        first_position: where the session began.
        held: by group id: the oldest row that the sender has, where a whole window is not there.

    Raises:
        ArgumentError: an illegal cut, no position, an order of no such name, rows missing that the
            next token needs, or too many segments.
    """

    geometry: ModelGeometry
    position: int
    cut: int = 0
    name: str = STREAMED
    chunk: int = CHUNK
    first_position: int = 0
    held: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        handoff(self.geometry, self.position, cut=self.cut)
        if self.name not in NAMES:
            raise ArgumentError(argument="schedule", expected=str(NAMES), got=self.name)
        chunk = self.chunk
        if type(chunk) is not int or not 0 < chunk < CHUNK_STOP or chunk % BLOCK:
            expected = f"a multiple of {BLOCK} below {CHUNK_STOP}"
            raise ArgumentError(argument="chunk", expected=expected, got=chunk)
        begin = self.first_position
        most = self.position - 1 if self.cut == 0 else 0
        if type(begin) is not int or not 0 <= begin <= most:
            expected = f"within [0, {most}]"
            raise ArgumentError(argument="first_position", expected=expected, got=begin)
        for group in self.geometry.groups:
            first, needed = self.first_row(group), self.first_needed(group)
            if first > max(needed, self.cut):
                expected = f"rows of {group.id} from {needed} on"
                raise ArgumentError(argument="position", expected=expected, got=first)
        if self.num_segments > SEGMENTS:
            expected = f"at most {SEGMENTS} segments"
            raise ArgumentError(argument="chunk", expected=expected, got=self.num_segments)

    def first_needed(self, group: LayerGroup) -> int:
        """The oldest position that the next token sees, and so the receiver must have."""
        if group.sliding_window is None:
            return self.first_position
        return max(self.first_position, self.position - (group.sliding_window - 1))

    def first_row(self, group: LayerGroup) -> int:
        """The oldest position that the sender holds of what a whole window is."""
        if group.sliding_window is None:
            return self.first_position
        held = (self.held or {}).get(group.id, 0)
        return max(self.first_position, self.position - group.sliding_window, held)

    def rows(self, group: LayerGroup) -> range:
        """The positions that are sent of a group."""
        return range(max(self.cut, self.first_row(group)), self.position)

    @property
    def payload(self) -> Payload:
        """Bytes of all segments."""
        full = sliding = 0
        for group in self.geometry.groups:
            nbytes = len(self.rows(group)) * group.row_nbytes * len(group.layers)
            if group.sliding_window is None:
                full += nbytes
            else:
                sliding += nbytes
        return Payload(full=full, sliding=sliding)

    @property
    def num_segments(self) -> int:
        """How many there are; counted without making them."""
        total = 0
        for group in self.geometry.groups:
            tokens, layers = self._tile
            rows = self.rows(group)
            chunks = -(-rows.stop // tokens) - rows.start // tokens if rows else 0
            total += chunks * -(-len(group.layers) // layers)
        return total

    @property
    def _tile(self) -> tuple[int, int]:
        """Tokens and layers of a segment."""
        return (TILE_TOKENS, TILE_LAYERS) if self.name == CHAPTER else (self.chunk, 1)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Every segment, in the order of sending."""
        tokens, layers = self._tile
        pieces = [
            (group, group.layers[place : place + layers], part)
            for group in self.geometry.groups
            for part in _parts(self.rows(group), tokens)
            for place in range(0, len(group.layers), layers)
        ]
        if self.name == CHAPTER:
            # whole groups of layers one after another, each by its tokens
            pieces.sort(key=lambda piece: (not piece[0].is_sliding, piece[1][0], piece[2].start))
        else:
            pieces.sort(key=lambda piece: (piece[2].stop, piece[1][0]))
        return tuple(
            Segment(number=number, group=group, layers=members, first=part.start, stop=part.stop)
            for number, (group, members, part) in enumerate(pieces)
        )


def _parts(rows: range, tokens: int) -> Iterator[range]:
    """The parts of a range that lie between multiples of `tokens`."""
    first = rows.start
    while first < rows.stop:
        stop = min(rows.stop, first - first % tokens + tokens)
        yield range(first, stop)
        first = stop
