"""The representation family: what every cache of one model, engine and layout has in common.

It goes into every key, so that rows of another layout are other rows. A shape has one dimension
that is zero: the tokens'.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from kvplane.kvpack import limits
from kvplane.kvpack.keys import hashed
from kvplane.kvpack.prefix import NONE
from kvplane.kvpack.wire import (
    Reader,
    StateKey,
    check_ascending,
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

MAGIC = "KVFAM1"
# the fixed part of a state, a name of one byte and one dimension
_STATE_NBYTES = 7 + 14 + 8 + 9 + 2


class DType(IntEnum):
    """Element types by their wire value."""

    U8 = 1
    U32 = 2
    I8 = 3
    I16 = 4
    I32 = 5
    F16 = 6
    BF16 = 7
    F32 = 8
    F64 = 9

    @property
    def nbytes(self) -> int:
        """Of one element."""
        return _WIDTHS[self]


_WIDTHS = dict(zip(DType, (1, 4, 1, 2, 4, 2, 2, 4, 8), strict=True))


class Mode(IntEnum):
    """Whose representation it is."""

    NATIVE = 1
    PORTABLE = 2


class Codec(IntEnum):
    """How a chunk's bytes are framed."""

    RAW = 1
    LOSSLESS = 2


class Layout(IntEnum):
    """How a state's elements lie."""

    CONTIGUOUS = 1
    STRIDED = 2


class TokenAxis(IntEnum):
    """Which tokens a state has rows of."""

    DIRECT = 1
    GATHER = 2
    TAIL_WINDOW = 3


class CacheKind(IntEnum):
    """Only ordinary keys and values."""

    KV = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyState:
    """One tensor of the cache."""

    key: StateKey
    dtype: DType
    dims: tuple[int, ...]
    codec: Codec = Codec.RAW
    layout: Layout = Layout.CONTIGUOUS
    rule: TokenAxis = TokenAxis.DIRECT
    token_axis: int = 0
    dependencies: tuple[StateKey, ...] = ()

    @property
    def elements_per_token(self) -> int:
        """The product of the fixed dimensions."""
        return prod(dim for dim in self.dims if dim)

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token."""
        return self.elements_per_token * self.dtype.nbytes

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        """The shape with so many tokens."""
        before, after = self.dims[: self.token_axis], self.dims[self.token_axis + 1 :]
        return (*before, num_tokens, *after)

    def encoded(self) -> bytes:
        """Its part of a family."""
        return b"".join(
            (
                key_bytes(self.key),
                u16(CacheKind.KV),
                u16(self.dtype),
                u16(self.codec),
                u16(1),
                u16(self.layout),
                u16(self.rule),
                u8(self.token_axis),
                u8(0),
                u64(self.elements_per_token),
                shape_bytes(self.dims),
                u16(len(self.dependencies)),
                *map(key_bytes, self.dependencies),
            )
        )

    def check(self) -> None:
        """Nothing, when it says something possible: KvpackRejected."""
        check_key(self.key)
        if not 1 <= len(self.dims) <= limits.RANK:
            raise reject("bounds", f"{self.key}: rank {len(self.dims)}")
        tokens = [axis for axis, dim in enumerate(self.dims) if dim == 0]
        if tokens != [self.token_axis]:
            raise reject("semantics", f"{self.key}: token axis {self.token_axis} of {self.dims}")
        if not 1 <= self.elements_per_token <= limits.U64:
            raise reject("bounds", f"{self.key}: {self.elements_per_token} elements a token")
        if self.layout is Layout.CONTIGUOUS and self.rule is TokenAxis.GATHER:
            raise reject("semantics", f"{self.key}: gathered tokens are not contiguous")
        if len(self.dependencies) > limits.DEPENDENCIES:
            raise reject("bounds", f"{self.key}: {len(self.dependencies)} dependencies")
        check_ascending(self.dependencies, what=f"{self.key} depends", category="graph")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """States, and the ids of what they are for."""

    engine_cache_abi: bytes
    topology: bytes
    shard_map: bytes
    states: tuple[FamilyState, ...]
    mode: Mode = Mode.NATIVE
    page_size_tokens: int = limits.BLOCK

    def body(self) -> bytes:
        """As a manifest holds it."""
        self.check()
        return b"".join(
            (
                id32(self.engine_cache_abi),
                u16(self.mode),
                u16(0),
                u32(self.page_size_tokens),
                id32(self.topology),
                id32(self.shard_map),
                u32(len(self.states)),
                *(state.encoded() for state in self.states),
            )
        )

    def encoded(self) -> bytes:
        """As an object of its own."""
        return head(MAGIC) + self.body()

    @property
    def id(self) -> bytes:
        """What goes into keys."""
        return hashed("kvpack/v1/representation-family", self.encoded())

    def check(self) -> None:
        """Nothing, when it is a family: KvpackRejected."""
        if NONE in (self.engine_cache_abi, self.topology, self.shard_map):
            raise reject("semantics", "family: an id is all zero")
        if self.page_size_tokens == 0:
            raise reject("bounds", "family: pages of no token")
        if not 1 <= len(self.states) <= limits.STATES:
            raise reject("bounds", f"family: {len(self.states)} states")
        check_ascending((state.key for state in self.states), what="family")
        for state in self.states:
            state.check()
            portable = state.layout is Layout.CONTIGUOUS and state.rule is not TokenAxis.GATHER
            if self.mode is Mode.PORTABLE and not portable:
                raise reject("semantics", f"{state.key}: a portable family is contiguous")
        check_acyclic({state.key: state.dependencies for state in self.states})


def check_acyclic(graph: Mapping[StateKey, tuple[StateKey, ...]]) -> None:
    """Nothing, when every dependency is there and none leads back: KvpackRejected."""
    waiting = {key: len(needs) for key, needs in graph.items()}
    wanted_by: dict[StateKey, list[StateKey]] = {key: [] for key in graph}
    for key, needs in graph.items():
        for need in needs:
            if need not in wanted_by:
                raise reject("graph", f"{key} depends on {need}, which is not there")
            wanted_by[need].append(key)
    ready = [key for key, count in waiting.items() if count == 0]
    done = 0
    while ready:
        done += 1
        for key in wanted_by[ready.pop()]:
            waiting[key] -= 1
            if waiting[key] == 0:
                ready.append(key)
    if done != len(graph):
        raise reject("graph", "dependencies lead in a circle")


def read_family(reader: Reader) -> Family:
    """A family's body: KvpackRejected."""
    abi = reader.id32()
    mode = reader.enum(Mode, reader.u16())
    reader.zero(2)
    page_size = reader.u32()
    topology, shard_map = reader.id32(), reader.id32()
    states = reader.many(
        reader.u32(), lambda: _read_state(reader), limit=limits.STATES, nbytes=_STATE_NBYTES
    )
    return Family(
        engine_cache_abi=abi,
        mode=mode,
        page_size_tokens=page_size,
        topology=topology,
        shard_map=shard_map,
        states=states,
    )


def _read_state(reader: Reader) -> FamilyState:
    key = reader.key()
    reader.enum(CacheKind, reader.u16())
    dtype = reader.enum(DType, reader.u16())
    codec = reader.enum(Codec, reader.u16())
    version = reader.u16()
    if version != 1:
        raise reject("unknown_enum", f"{key}: codec version {version}")
    layout = reader.enum(Layout, reader.u16())
    rule = reader.enum(TokenAxis, reader.u16())
    axis = reader.u8()
    reader.zero(1)
    elements = reader.u64()
    dims = reader.dims(zero=True)
    dependencies = reader.many(
        reader.u16(), reader.key, limit=limits.DEPENDENCIES, nbytes=7, least=0
    )
    state = FamilyState(
        key=key,
        dtype=dtype,
        codec=codec,
        layout=layout,
        rule=rule,
        token_axis=axis,
        dims=dims,
        dependencies=dependencies,
    )
    state.check()
    if state.elements_per_token != elements:
        raise reject("semantics", f"{key}: {elements} elements a token, its shape says otherwise")
    return state


def decode_family(data: bytes | memoryview) -> Family:
    """The family of a KVFAM1 object: KvpackRejected."""
    reader = Reader(data, MAGIC)
    reader.head(MAGIC)
    family = read_family(reader)
    reader.end()
    check_canonical(data, family.encoded(), what=MAGIC)
    return family
