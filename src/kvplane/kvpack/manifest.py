"""The cut manifest: a text's identity, its family and schema, and a reference to every piece."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvplane.kvpack import limits
from kvplane.kvpack.family import Family, FamilyState, read_family
from kvplane.kvpack.keys import hashed
from kvplane.kvpack.prefix import NONE, InputCut
from kvplane.kvpack.realize import check_schema
from kvplane.kvpack.schema import ChunkSpan, Schema, read_schema
from kvplane.kvpack.wire import (
    Reader,
    StateKey,
    check_canonical,
    head,
    id32,
    key_bytes,
    reject,
    u32,
    u64,
)

MAGIC = "KVMNF1"
_REF_NBYTES = 112
_STATE_NBYTES = 7 + 4 + _REF_NBYTES


class Semantics(NamedTuple):
    """Five ids of what a model computes; none may be zero."""

    weights_config: bytes
    adapters: bytes
    tokenizer_template: bytes
    position_semantics: bytes
    qualified_math: bytes

    def encoded(self) -> bytes:
        """160 bytes."""
        return b"".join(map(id32, self))

    @property
    def id(self) -> bytes:
        """What prefixes are keyed by."""
        return hashed("kvpack/v1/semantic-model", self.encoded())

    def check(self) -> None:
        """Nothing, when none is zero: KvpackRejected."""
        if NONE in self:
            raise reject("semantics", "a semantic id is all zero")


class ChunkRef(NamedTuple):
    """A piece's content, where it is stored, and what its file has to be."""

    content_id: bytes
    object_key: bytes
    object_digest: bytes
    epoch: int
    plaintext_nbytes: int
    object_nbytes: int

    def encoded(self) -> bytes:
        """112 bytes."""
        ids = (self.content_id, self.object_key, self.object_digest)
        sizes = u32(self.plaintext_nbytes) + u32(self.object_nbytes)
        return b"".join(map(id32, ids)) + u64(self.epoch) + sizes

    def check(self) -> None:
        """Nothing, when it can refer to something: KvpackRejected."""
        if NONE in (self.content_id, self.object_key, self.object_digest):
            raise reject("semantics", "a chunk reference is all zero")
        if self.epoch == 0:
            raise reject("bounds", "a chunk of epoch 0")
        size = self.object_nbytes
        if size % limits.ALIGNMENT or not limits.ALIGNMENT < size <= limits.CHUNK_NBYTES:
            raise reject("bounds", f"a chunk of {size} bytes")


class Payload(NamedTuple):
    """The pieces of one state, in order."""

    key: StateKey
    refs: tuple[ChunkRef, ...]


class Piece(NamedTuple):
    """One piece: of which state, which tokens, and where it is."""

    state: FamilyState
    span: ChunkSpan
    ref: ChunkRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a pack holds."""

    tenant: bytes
    epoch: int
    semantics: Semantics
    cut: InputCut
    family: Family
    schema: Schema
    payload: tuple[Payload, ...]

    def encoded(self) -> bytes:
        """The KVMNF1 object."""
        self.check()
        parts = [head(MAGIC), id32(self.tenant), u64(self.epoch), self.semantics.encoded()]
        parts += [self.cut.encoded(), self.family.body(), self.schema.body()]
        parts.append(u32(len(self.payload)))
        for one in self.payload:
            parts += [key_bytes(one.key), u32(len(one.refs))]
            parts += [ref.encoded() for ref in one.refs]
        data = b"".join(parts)
        if len(data) > limits.MANIFEST_NBYTES:
            raise reject("bounds", f"a manifest of {len(data)} bytes")
        return data

    @property
    def id(self) -> bytes:
        """Of the object's bytes."""
        return manifest_id(self.encoded())

    def pieces(self) -> Iterator[Piece]:
        """Every piece, state by state."""
        states = zip(self.family.states, self.schema.states, self.payload, strict=True)
        for state, realized, payload in states:
            for span, ref in zip(realized.spans, payload.refs, strict=True):
                yield Piece(state, span, ref)

    def check(self) -> None:
        """Nothing, when its parts agree with each other: KvpackRejected."""
        if self.epoch == 0:
            raise reject("bounds", "a manifest of epoch 0")
        self.semantics.check()
        self.family.check()
        check_schema(self.schema, self.family, self.cut)
        if [one.key for one in self.payload] != [state.key for state in self.family.states]:
            raise reject("semantics", "payload: other states than the family's")
        for realized, payload in zip(self.schema.states, self.payload, strict=True):
            if len(payload.refs) != len(realized.spans):
                raise reject("semantics", f"{payload.key}: {len(payload.refs)} references")
            for span, ref in zip(realized.spans, payload.refs, strict=True):
                ref.check()
                if ref.plaintext_nbytes != span.plaintext_nbytes:
                    raise reject("semantics", f"{payload.key}: a piece of another size")


def manifest_id(data: bytes) -> bytes:
    """The id of a manifest's bytes."""
    return hashed("kvpack/v1/manifest", data)


def decode_manifest(data: bytes | memoryview) -> Manifest:
    """The manifest of a KVMNF1 object; nothing is known yet of who wrote it: KvpackRejected."""
    if len(data) > limits.MANIFEST_NBYTES:
        raise reject("bounds", f"a manifest of {len(data)} bytes")
    reader = Reader(data, MAGIC)
    reader.head(MAGIC)
    tenant, epoch = reader.id32(), reader.u64()
    semantics = Semantics(*(reader.id32() for _ in range(5)))
    cut = InputCut.read(reader)
    family = read_family(reader)
    schema = read_schema(reader)
    payload = reader.many(
        reader.u32(), lambda: _read_payload(reader), limit=limits.STATES, nbytes=_STATE_NBYTES
    )
    reader.end()
    manifest = Manifest(
        tenant=tenant,
        epoch=epoch,
        semantics=semantics,
        cut=cut,
        family=family,
        schema=schema,
        payload=payload,
    )
    check_canonical(data, manifest.encoded(), what=MAGIC)
    return manifest


def _read_payload(reader: Reader) -> Payload:
    key = reader.key()
    refs = reader.many(
        reader.u32(), lambda: _read_ref(reader), limit=limits.CHUNKS, nbytes=_REF_NBYTES
    )
    return Payload(key, refs)


def _read_ref(reader: Reader) -> ChunkRef:
    ids = reader.id32(), reader.id32(), reader.id32()
    return ChunkRef(*ids, reader.u64(), reader.u32(), reader.u32())
