"""One piece's file: a header of 4,096 bytes, the framed bytes, zeros to a multiple of 4,096.

A reader believes nothing before it has compared it, in this order: lengths, magic, enumerators,
sizes, zeros; the file's digest against the manifest's; the header's; whose it is; the ids, given
and computed again; the encryption; the frame; and the content's id, computed from the bytes.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple

from kvplane.kvpack import limits
from kvplane.kvpack.family import Codec
from kvplane.kvpack.frame import decode_frame, encode_frame
from kvplane.kvpack.keys import Keys, hkdf, keyed, same
from kvplane.kvpack.manifest import ChunkRef
from kvplane.kvpack.schema import ChunkSpan
from kvplane.kvpack.seal import PLAIN, Seal, decrypt, encrypt
from kvplane.kvpack.sidecar import Sidecar, decode_sidecar
from kvplane.kvpack.wire import StateKey, key_bytes, magic, reject, u8, u16, u32, u64

MAGIC = magic("KVCHK1")
HEADER = struct.Struct("<8sHHIIHHIIIIQ32s32s32s32s16s12s32sH")
_DIGEST = slice(204, 236)
_SIDECAR = 238
_AEAD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rows a piece holds, and how it is framed."""

    family_id: bytes
    key: StateKey
    span: ChunkSpan
    codec: Codec


class Chunk(NamedTuple):
    """A piece's file, and the reference that a manifest needs."""

    data: bytes
    ref: ChunkRef


class _Header(NamedTuple):
    magic: bytes
    version: int
    header_nbytes: int
    alignment: int
    flags: int
    codec: int
    codec_version: int
    plaintext_nbytes: int
    frame_nbytes: int
    payload_nbytes: int
    object_nbytes: int
    epoch: int
    tenant: bytes
    family_id: bytes
    content_id: bytes
    object_key: bytes
    salt: bytes
    nonce: bytes
    digest: bytes
    sidecar_nbytes: int


def content_id(keys: Keys, place: Place, plaintext: bytes | memoryview) -> bytes:
    """The id of these rows at this place, whatever they are stored as."""
    span = place.span
    return keyed(
        keys.stable("chunk-identity"),
        "kvpack/v1/chunk-content",
        keys.tenant,
        place.family_id,
        key_bytes(place.key),
        u64(span.token_start),
        u64(span.token_count),
        u64(span.plaintext_offset),
        u32(len(plaintext)),
        bytes(plaintext),
    )


def object_key(
    keys: Keys, place: Place, content: bytes, *, epoch: int, seal: Seal | None, sidecar: bytes
) -> bytes:
    """The name of one stored form of a content."""
    salt, nonce = seal or PLAIN
    parts = [keys.tenant, place.family_id, content, u64(epoch), u16(place.codec), u16(1)]
    parts += [u8(seal is not None), salt, nonce]
    if sidecar:
        parts += [b"kvpack/v1/chunk-object-stats\0", hashlib.sha256(sidecar).digest()]
    key = keys.epoch("object-identity", epoch)
    return keyed(key, "kvpack/v1/chunk-object", *parts)


def encode_chunk(
    keys: Keys,
    place: Place,
    plaintext: bytes | memoryview,
    *,
    seal: Seal | None = None,
    sidecar: Sidecar | None = None,
) -> Chunk:
    """A piece's file, written at the active epoch.

    Args:
        keys: the tenant's.
        place: which rows they are.
        plaintext: the rows.
        seal: encrypts with a fresh salt and nonce; None stores them readable.
        sidecar: statistics to store in the header.

    Raises:
        KvpackRejected: the rows are not as long as their place says.
        ExtraMissing: cryptography is not installed, which `seal` needs.
    """
    if len(plaintext) != place.span.plaintext_nbytes:
        raise reject("semantics", f"{place.key}: {len(plaintext)} bytes for {tuple(place.span)}")
    if seal is not None:
        seal.check()
    beside = b"" if sidecar is None else sidecar.encoded()
    epoch = keys.active_epoch
    frame = encode_frame(place.codec, plaintext)
    content = content_id(keys, place, plaintext)
    name = object_key(keys, place, content, epoch=epoch, seal=seal, sidecar=beside)
    payload_nbytes = len(frame) + (limits.TAG_NBYTES if seal is not None else 0)
    nbytes = -(-(limits.ALIGNMENT + payload_nbytes) // limits.ALIGNMENT) * limits.ALIGNMENT
    salt, nonce = seal or PLAIN
    fields = _Header(
        magic=MAGIC,
        version=1,
        header_nbytes=limits.ALIGNMENT,
        alignment=limits.ALIGNMENT,
        flags=_AEAD if seal is not None else 0,
        codec=place.codec,
        codec_version=1,
        plaintext_nbytes=len(plaintext),
        frame_nbytes=len(frame),
        payload_nbytes=payload_nbytes,
        object_nbytes=nbytes,
        epoch=epoch,
        tenant=keys.tenant,
        family_id=place.family_id,
        content_id=content,
        object_key=name,
        salt=salt,
        nonce=nonce,
        digest=bytes(32),
        sidecar_nbytes=len(beside),
    )
    header = bytearray((HEADER.pack(*fields) + beside).ljust(limits.ALIGNMENT, b"\0"))
    header[_DIGEST] = hashlib.sha256(header).digest()
    sealed = bytes(header)
    if seal is not None:
        frame = encrypt(_data_key(keys, fields), seal, frame, header=sealed)
    data = (sealed + frame).ljust(nbytes, b"\0")
    digest = hashlib.sha256(data).digest()
    return Chunk(data, ChunkRef(content, name, digest, epoch, len(plaintext), nbytes))


def decode_chunk(keys: Keys, data: bytes, *, place: Place, ref: ChunkRef) -> bytes:
    """The rows of a piece, once every byte of its file is known to be right.

    Args:
        keys: the tenant's.
        data: the file.
        place: which rows the manifest says that they are.
        ref: the manifest's reference.

    Raises:
        KvpackRejected: anything is not as it should be.
        ExtraMissing: cryptography is not installed, and the piece is encrypted.
    """
    fields = _framing(data)
    _check_sizes(data, fields)
    _check_zeros(data, fields)
    sizes = (fields.plaintext_nbytes, fields.object_nbytes)
    if sizes != (ref.plaintext_nbytes, ref.object_nbytes) or sizes[0] != (
        place.span.plaintext_nbytes
    ):
        raise reject("semantics", f"{place.key}: a chunk of other sizes than its reference")
    if not same(hashlib.sha256(data).digest(), ref.object_digest):
        raise reject("checksum", f"{place.key}: the file's digest is not its reference's")
    header = bytearray(data[: limits.ALIGNMENT])
    header[_DIGEST] = bytes(32)
    if not same(hashlib.sha256(header).digest(), fields.digest):
        raise reject("checksum", f"{place.key}: the header's digest")
    if fields.codec != place.codec:
        raise reject("codec", f"{place.key}: codec {fields.codec}, the family has {place.codec}")
    owner = (fields.tenant, fields.family_id, fields.epoch)
    if owner != (keys.tenant, place.family_id, ref.epoch):
        raise reject("semantics", f"{place.key}: a chunk of another tenant, family or epoch")
    seal = Seal(fields.salt, fields.nonce) if fields.flags & _AEAD else None
    beside = data[_SIDECAR : _SIDECAR + fields.sidecar_nbytes]
    _check_names(keys, place, ref, fields, seal, beside)
    payload = data[limits.ALIGNMENT : limits.ALIGNMENT + fields.payload_nbytes]
    if seal is not None:
        key = _data_key(keys, fields)
        payload = decrypt(key, seal, payload, header=data[: limits.ALIGNMENT])
    plaintext = decode_frame(place.codec, payload)
    if not same(content_id(keys, place, plaintext), ref.content_id):
        raise reject("authentication", f"{place.key}: other rows than the manifest names")
    return plaintext


def chunk_sidecar(data: bytes) -> Sidecar | None:
    """The statistics in a chunk's header, which `decode_chunk` has verified; None without any."""
    fields = _framing(data)
    beside = data[_SIDECAR : _SIDECAR + fields.sidecar_nbytes]
    return decode_sidecar(beside) if beside else None


def _framing(data: bytes) -> _Header:
    nbytes = len(data)
    if nbytes < limits.ALIGNMENT or nbytes % limits.ALIGNMENT:
        raise reject("truncated", f"a chunk of {nbytes} bytes")
    if nbytes > limits.CHUNK_NBYTES:
        raise reject("bounds", f"a chunk of {nbytes} bytes")
    fields = _Header(*HEADER.unpack_from(data))
    if fields.magic != MAGIC or fields.version != 1:
        raise reject("bad_magic", f"a chunk begins with {fields.magic!r} {fields.version}")
    if (fields.header_nbytes, fields.alignment) != (limits.ALIGNMENT, limits.ALIGNMENT):
        raise reject("bounds", "a chunk's header or alignment is not 4096")
    if fields.flags & ~_AEAD:
        raise reject("unknown_enum", f"a chunk's flags are {fields.flags:#x}")
    if fields.codec not in tuple(Codec):
        raise reject("unknown_enum", f"a chunk's codec is {fields.codec}")
    if fields.codec_version != 1:
        raise reject("unknown_enum", f"a chunk's codec version is {fields.codec_version}")
    return fields


def _check_sizes(data: bytes, fields: _Header) -> None:
    if not 1 <= fields.plaintext_nbytes <= limits.PLAINTEXT_NBYTES:
        raise reject("bounds", f"a chunk of {fields.plaintext_nbytes} bytes of rows")
    if not limits.FRAME_HEAD_NBYTES < fields.frame_nbytes <= limits.FRAME_NBYTES:
        raise reject("bounds", f"a chunk's frame of {fields.frame_nbytes} bytes")
    tag = limits.TAG_NBYTES if fields.flags & _AEAD else 0
    if fields.payload_nbytes != fields.frame_nbytes + tag:
        raise reject("bounds", f"a chunk's payload of {fields.payload_nbytes} bytes")
    if fields.object_nbytes > len(data):
        raise reject("truncated", f"{len(data)} of a chunk's {fields.object_nbytes} bytes")
    if fields.object_nbytes < len(data):
        raise reject("reserved", f"{len(data) - fields.object_nbytes} bytes after a chunk's end")
    used = limits.ALIGNMENT + fields.payload_nbytes
    if -(-used // limits.ALIGNMENT) * limits.ALIGNMENT != len(data):
        raise reject("bounds", f"a chunk of {len(data)} bytes for {used}")
    if fields.epoch == 0:
        raise reject("bounds", "a chunk of epoch 0")


def _check_zeros(data: bytes, fields: _Header) -> None:
    if any(data[limits.ALIGNMENT + fields.payload_nbytes :]):
        raise reject("reserved", "a chunk's padding is not zero")
    if fields.sidecar_nbytes > limits.SIDECAR_NBYTES:
        raise reject("bounds", f"a sidecar of {fields.sidecar_nbytes} bytes")
    if any(data[_SIDECAR + fields.sidecar_nbytes : limits.ALIGNMENT]):
        raise reject("reserved", "a chunk's header has reserved bytes that are not zero")
    if fields.sidecar_nbytes:
        decode_sidecar(data[_SIDECAR : _SIDECAR + fields.sidecar_nbytes])
    if not fields.flags & _AEAD and (fields.salt, fields.nonce) != PLAIN:
        raise reject("reserved", "a salt without encryption")


def _check_names(
    keys: Keys, place: Place, ref: ChunkRef, fields: _Header, seal: Seal | None, beside: bytes
) -> None:
    name = object_key(keys, place, ref.content_id, epoch=ref.epoch, seal=seal, sidecar=beside)
    equal = [
        same(fields.content_id, ref.content_id),
        same(fields.object_key, ref.object_key),
        same(name, ref.object_key),
    ]
    if not all(equal):
        raise reject("authentication", f"{place.key}: a chunk under another's name")


def _data_key(keys: Keys, fields: _Header) -> bytes:
    info = b"kvpack/v1/chunk-aead\0" + fields.content_id + fields.object_key
    return hkdf(keys.epoch("chunk-encryption", fields.epoch), salt=fields.salt, info=info)
