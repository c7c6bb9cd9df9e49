"""The realized schema: which tokens' rows a manifest holds, in which pieces.

    full     direct and gathered states hold [0, cut); a tail window any [start, cut)
    delta    direct and gathered states hold [parent's cut, cut); tail windows cannot be expressed

Pieces (`ChunkSpan`) may be cut anywhere; a piece's offset counts from the state's first token ever,
so that the same piece serves a delta and, later, a full manifest.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvplane.kvpack import limits
from kvplane.kvpack.keys import hashed
from kvplane.kvpack.prefix import InputCut
from kvplane.kvpack.wire import (
    Reader,
    StateKey,
    check_canonical,
    check_key,
    head,
    id32,
    key_bytes,
    reject,
    shape_bytes,
    u8,
    u16,
    u32,
    u64,
)

MAGIC = "KVRCS1"
_SPAN_NBYTES = 28
# a name of one byte, two shapes and strides of rank 1, seven numbers, a count and one span
_STATE_NBYTES = 7 + 27 + 56 + 4 + _SPAN_NBYTES
_GROUP_NBYTES = 15


class Kind(IntEnum):
    """What a manifest holds."""

    FULL = 0
    DELTA = 1


class ChunkSpan(NamedTuple):
    """Tokens of one state, and their bytes in its stream."""

    token_start: int
    token_count: int
    plaintext_offset: int
    plaintext_nbytes: int

    def encoded(self) -> bytes:
        """28 bytes."""
        numbers = (self.token_start, self.token_count, self.plaintext_offset)
        return b"".join(map(u64, numbers)) + u32(self.plaintext_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealizedState:
    """The rows that are there of one state."""

    key: StateKey
    full_shape: tuple[int, ...]
    segment_shape: tuple[int, ...]
    strides: tuple[int, ...]
    logical_start: int
    logical_count: int
    physical_offset: int
    physical_span: int
    complete_physical: int
    absolute_position: int
    spans: tuple[ChunkSpan, ...]

    def encoded(self) -> bytes:
        """Its part of a schema."""
        numbers = (
            self.logical_start,
            self.logical_count,
            self.physical_offset,
            self.physical_span,
            self.complete_physical,
            self.absolute_position,
            0,
        )
        return b"".join(
            (
                key_bytes(self.key),
                shape_bytes(self.full_shape),
                shape_bytes(self.segment_shape),
                shape_bytes(self.strides),
                *map(u64, numbers),
                u32(len(self.spans)),
                *(span.encoded() for span in self.spans),
            )
        )


class Group(NamedTuple):
    """States that are restored together or not at all."""

    id: int
    members: tuple[StateKey, ...]

    def encoded(self) -> bytes:
        """Its part of a schema."""
        return u32(self.id) + u32(len(self.members)) + b"".join(map(key_bytes, self.members))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a delta goes on from; `depth` deltas lead to a full manifest."""

    depth: int
    parent_manifest: bytes
    parent_cut: InputCut


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What a manifest holds; `delta` is None when it holds all."""

    states: tuple[RealizedState, ...]
    groups: tuple[Group, ...]
    segment_restored: int
    complete_restored: int
    delta: Delta | None = None

    def body(self) -> bytes:
        """As a manifest holds it."""
        self.check()
        kind = u8(Kind.FULL) + u8(0) + u16(0)
        if self.delta is not None:
            kind = u8(Kind.DELTA) + u8(self.delta.depth) + u16(0)
            kind += id32(self.delta.parent_manifest) + self.delta.parent_cut.encoded()
        return b"".join(
            (
                kind,
                u32(len(self.states)),
                *(state.encoded() for state in self.states),
                u32(len(self.groups)),
                *(group.encoded() for group in self.groups),
                u64(self.segment_restored),
                u64(self.complete_restored),
            )
        )

    def encoded(self) -> bytes:
        """As an object of its own."""
        return head(MAGIC) + self.body()

    @property
    def id(self) -> bytes:
        """Of the object."""
        return hashed("kvpack/v1/realized-cut-schema", self.encoded())

    def check(self) -> None:
        """Nothing, when it is within the format's bounds, whatever the family: KvpackRejected."""
        if self.delta is not None and not 1 <= self.delta.depth <= limits.DELTA_DEPTH:
            raise reject("bounds", f"a delta of depth {self.delta.depth}")
        for count, what, limit in (
            (len(self.states), "states", limits.STATES),
            (len(self.groups), "groups", limits.GROUPS),
        ):
            if not 1 <= count <= limit:
                raise reject("bounds", f"schema: {count} {what}")
        for state in self.states:
            check_key(state.key)
            if not 1 <= len(state.spans) <= limits.CHUNKS:
                raise reject("bounds", f"{state.key}: {len(state.spans)} pieces")
        if self.complete_restored > limits.RESTORED_NBYTES:
            raise reject("bounds", f"{self.complete_restored} bytes would be restored")


def read_schema(reader: Reader) -> Schema:
    """A schema's body: KvpackRejected."""
    kind = reader.enum(Kind, reader.u8())
    depth = reader.u8()
    if kind is Kind.FULL and depth:
        raise reject("reserved", f"a full manifest of depth {depth}")
    reader.zero(2)
    delta = None
    if kind is Kind.DELTA:
        delta = Delta(depth=depth, parent_manifest=reader.id32(), parent_cut=InputCut.read(reader))
    states = reader.many(
        reader.u32(), lambda: _read_state(reader), limit=limits.STATES, nbytes=_STATE_NBYTES
    )
    groups = reader.many(
        reader.u32(), lambda: _read_group(reader), limit=limits.GROUPS, nbytes=_GROUP_NBYTES
    )
    schema = Schema(
        states=states,
        groups=groups,
        segment_restored=reader.u64(),
        complete_restored=reader.u64(),
        delta=delta,
    )
    schema.check()
    return schema


def _read_state(reader: Reader) -> RealizedState:
    key = reader.key()
    full, segment, strides = reader.dims(), reader.dims(), reader.dims()
    start, count, offset, span, complete, position, window = (reader.u64() for _ in range(7))
    if window:
        raise reject("semantics", f"{key}: a window of {window} in a schema")
    spans = reader.many(
        reader.u32(), lambda: _read_span(reader), limit=limits.CHUNKS, nbytes=_SPAN_NBYTES
    )
    return RealizedState(
        key=key,
        full_shape=full,
        segment_shape=segment,
        strides=strides,
        logical_start=start,
        logical_count=count,
        physical_offset=offset,
        physical_span=span,
        complete_physical=complete,
        absolute_position=position,
        spans=spans,
    )


def _read_span(reader: Reader) -> ChunkSpan:
    return ChunkSpan(reader.u64(), reader.u64(), reader.u64(), reader.u32())


def _read_group(reader: Reader) -> Group:
    number = reader.u32()
    return Group(number, reader.many(reader.u32(), reader.key, limit=limits.STATES, nbytes=7))


def decode_schema(data: bytes | memoryview) -> Schema:
    """The schema of a KVRCS1 object, by itself: KvpackRejected."""
    reader = Reader(data, MAGIC)
    reader.head(MAGIC)
    schema = read_schema(reader)
    reader.end()
    check_canonical(data, schema.encoded(), what=MAGIC)
    return schema
