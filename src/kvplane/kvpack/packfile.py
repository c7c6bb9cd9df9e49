"""A pack: a header, the manifest, and a footer that says with a key that all of it is there.

The footer's seal is keyed also where nothing is encrypted: without the root there is no reading.
"""

import hashlib
import struct
from typing import NamedTuple

from kvplane.kvpack import limits
from kvplane.kvpack.keys import Keys, hkdf, keyed, same
from kvplane.kvpack.manifest import Manifest, decode_manifest, manifest_id
from kvplane.kvpack.seal import PLAIN, Seal, decrypt, encrypt
from kvplane.kvpack.wire import magic, reject, u64

MAGIC = magic("KVPKP1")
FOOTER_MAGIC = magic("KVCMT1")
HEADER = struct.Struct("<8sHHIIIQQQQ32s32s16s12s32s")
FOOTER = struct.Struct("<8sHHIQQQQ32s32s")
_SIDE = limits.ALIGNMENT
_DIGEST = slice(148, 180)
_AEAD = 1


class _Header(NamedTuple):
    magic: bytes
    version: int
    header_nbytes: int
    alignment: int
    flags: int
    zero: int
    stored_nbytes: int
    plain_nbytes: int
    epoch: int
    catalog: int
    tenant: bytes
    manifest_id: bytes
    salt: bytes
    nonce: bytes
    digest: bytes


class _Footer(NamedTuple):
    magic: bytes
    version: int
    footer_nbytes: int
    zero: int
    stored_nbytes: int
    epoch: int
    catalog: int
    file_nbytes: int
    manifest_id: bytes
    seal: bytes


def encode_pack(keys: Keys, manifest: Manifest, *, seal: Seal | None = None) -> bytes:
    """The file of a manifest.

    Raises:
        KvpackRejected: the manifest is of another tenant, or cannot be written.
        ExtraMissing: cryptography is not installed, which `seal` needs.
    """
    if manifest.tenant != keys.tenant:
        raise reject("semantics", "a manifest of another tenant")
    if seal is not None:
        seal.check()
    plain = manifest.encoded()
    name = manifest_id(plain)
    stored_nbytes = len(plain) + (limits.TAG_NBYTES if seal is not None else 0)
    salt, nonce = seal or PLAIN
    fields = _Header(
        magic=MAGIC,
        version=1,
        header_nbytes=_SIDE,
        alignment=limits.ALIGNMENT,
        flags=_AEAD if seal is not None else 0,
        zero=0,
        stored_nbytes=stored_nbytes,
        plain_nbytes=len(plain),
        epoch=manifest.epoch,
        catalog=0,
        tenant=manifest.tenant,
        manifest_id=name,
        salt=salt,
        nonce=nonce,
        digest=bytes(32),
    )
    filled = bytearray(HEADER.pack(*fields).ljust(_SIDE, b"\0"))
    filled[_DIGEST] = hashlib.sha256(filled).digest()
    header = bytes(filled)
    stored = plain
    if seal is not None:
        stored = encrypt(_data_key(keys, fields), seal, plain, header=header)
    file_nbytes = 2 * _SIDE + stored_nbytes
    footer = _Footer(
        magic=FOOTER_MAGIC,
        version=1,
        footer_nbytes=_SIDE,
        zero=0,
        stored_nbytes=stored_nbytes,
        epoch=manifest.epoch,
        catalog=0,
        file_nbytes=file_nbytes,
        manifest_id=name,
        seal=_authentication(keys, header, stored, manifest.epoch),
    )
    return header + stored + FOOTER.pack(*footer).ljust(_SIDE, b"\0")


def decode_pack(keys: Keys, data: bytes) -> Manifest:
    """The manifest of a pack, once it is known who wrote it.

    Raises:
        KvpackRejected: anything is not as it should be.
        ExtraMissing: cryptography is not installed, and the manifest is encrypted.
    """
    if len(data) < 2 * _SIDE:
        raise reject("truncated", f"a pack of {len(data)} bytes")
    fields = _header(data)
    _check_lengths(data, fields)
    footer = _footer(data)
    if (footer.stored_nbytes, footer.epoch, footer.file_nbytes, footer.manifest_id) != (
        fields.stored_nbytes,
        fields.epoch,
        len(data),
        fields.manifest_id,
    ):
        raise reject("semantics", "a pack's footer is of another header")
    header, stored = data[:_SIDE], data[_SIDE:-_SIDE]
    blank = bytearray(header)
    blank[_DIGEST] = bytes(32)
    if not same(hashlib.sha256(blank).digest(), fields.digest):
        raise reject("checksum", "a pack's header digest")
    if not same(_authentication(keys, header, stored, fields.epoch), footer.seal):
        raise reject("authentication", "a pack written with another key, or changed since")
    if fields.flags & _AEAD:
        seal = Seal(fields.salt, fields.nonce)
        stored = decrypt(_data_key(keys, fields), seal, stored, header=header)
    if len(stored) != fields.plain_nbytes:
        raise reject("bounds", f"a manifest of {len(stored)} bytes, {fields.plain_nbytes} are said")
    if not same(manifest_id(stored), fields.manifest_id):
        raise reject("checksum", "a manifest under another's id")
    manifest = decode_manifest(stored)
    owner = (manifest.tenant, manifest.epoch)
    if owner != (fields.tenant, fields.epoch) or manifest.tenant != keys.tenant:
        raise reject("semantics", "a manifest of another tenant or epoch than its pack")
    return manifest


def _header(data: bytes) -> _Header:
    fields = _Header(*HEADER.unpack_from(data))
    if fields.magic != MAGIC or fields.version != 1:
        raise reject("bad_magic", f"a pack begins with {fields.magic!r} {fields.version}")
    if (fields.header_nbytes, fields.alignment) != (_SIDE, limits.ALIGNMENT):
        raise reject("bounds", "a pack's header or alignment is not 4096")
    if fields.flags & ~_AEAD:
        raise reject("unknown_enum", f"a pack's flags are {fields.flags:#x}")
    if fields.zero or fields.catalog or any(data[HEADER.size : _SIDE]):
        raise reject("reserved", "a pack's header has reserved bytes that are not zero")
    if not fields.flags & _AEAD and (fields.salt, fields.nonce) != PLAIN:
        raise reject("reserved", "a salt without encryption")
    return fields


def _check_lengths(data: bytes, fields: _Header) -> None:
    tag = limits.TAG_NBYTES if fields.flags & _AEAD else 0
    if not 1 <= fields.plain_nbytes <= limits.MANIFEST_NBYTES:
        raise reject("bounds", f"a manifest of {fields.plain_nbytes} bytes")
    if fields.stored_nbytes != fields.plain_nbytes + tag:
        raise reject("bounds", f"a stored manifest of {fields.stored_nbytes} bytes")
    if fields.epoch == 0:
        raise reject("bounds", "a pack of epoch 0")
    expected = 2 * _SIDE + fields.stored_nbytes
    if len(data) < expected:
        raise reject("truncated", f"{len(data)} of a pack's {expected} bytes")
    if len(data) > expected:
        raise reject("reserved", f"{len(data) - expected} bytes after a pack's end")


def _footer(data: bytes) -> _Footer:
    footer = _Footer(*FOOTER.unpack_from(data, len(data) - _SIDE))
    if footer.magic != FOOTER_MAGIC or footer.version != 1:
        raise reject("bad_magic", f"a pack ends with {footer.magic!r} {footer.version}")
    if footer.footer_nbytes != _SIDE:
        raise reject("bounds", "a pack's footer is not 4096 bytes")
    if footer.zero or footer.catalog or any(data[len(data) - _SIDE + FOOTER.size :]):
        raise reject("reserved", "a pack's footer has reserved bytes that are not zero")
    return footer


def _authentication(keys: Keys, header: bytes, stored: bytes, epoch: int) -> bytes:
    return keyed(
        keys.epoch("manifest-auth", epoch),
        "kvpack/v1/manifest-auth",
        header,
        stored,
        u64(len(stored)),
        u64(epoch),
        u64(2 * _SIDE + len(stored)),
    )


def _data_key(keys: Keys, fields: _Header) -> bytes:
    info = b"kvpack/v1/manifest-aead\0" + fields.manifest_id
    return hkdf(keys.epoch("manifest-encryption", fields.epoch), salt=fields.salt, info=info)
