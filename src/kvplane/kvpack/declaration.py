"""One state as a writer declares it: an object for conformance, which no pack holds."""

from dataclasses import dataclass

from kvplane.kvpack.wire import (
    Reader,
    StateKey,
    check_canonical,
    head,
    key_bytes,
    reject,
    shape_bytes,
    u32,
    u64,
)

MAGIC = "KVSTS1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Where a state's rows lie."""

    key: StateKey
    full_shape: tuple[int, ...]
    segment_shape: tuple[int, ...]
    strides: tuple[int, ...]
    logical_start: int
    logical_count: int
    absolute_position: int
    atomic_group: int
    window: int = 0

    def encoded(self) -> bytes:
        """The KVSTS1 object."""
        if not len(self.full_shape) == len(self.segment_shape) == len(self.strides):
            raise reject("semantics", f"{self.key}: shapes and strides of different ranks")
        numbers = (self.logical_start, self.logical_count, self.absolute_position, self.window)
        return b"".join(
            (
                head(MAGIC),
                key_bytes(self.key),
                shape_bytes(self.full_shape),
                shape_bytes(self.segment_shape),
                shape_bytes(self.strides),
                *map(u64, numbers),
                u32(self.atomic_group),
            )
        )


def decode_declaration(data: bytes | memoryview) -> Declaration:
    """The declaration of a KVSTS1 object: KvpackRejected."""
    reader = Reader(data, MAGIC)
    reader.head(MAGIC)
    declaration = Declaration(
        key=reader.key(),
        full_shape=reader.dims(),
        segment_shape=reader.dims(),
        strides=reader.dims(),
        logical_start=reader.u64(),
        logical_count=reader.u64(),
        absolute_position=reader.u64(),
        window=reader.u64(),
        atomic_group=reader.u32(),
    )
    reader.end()
    if declaration.window:
        raise reject("semantics", f"{declaration.key}: a window of {declaration.window}")
    if declaration.atomic_group == 0:
        raise reject("graph", f"{declaration.key}: group 0")
    check_canonical(data, declaration.encoded(), what=MAGIC)
    return declaration
