"""What is fuzzed: every reader of bytes that strangers may have written.

A target takes any bytes. It may refuse them by a PackError; everything else that leaves it is a
finding. Documents are sealed by a digest of themselves, which no mutation would get past: each is
read as it is, and once more after it was sealed anew.
"""

import hashlib
import json
from contextlib import suppress

from kvplane.errors import PackError
from kvplane.kvpack import (
    ChunkRef,
    ChunkSpan,
    Codec,
    Keys,
    Place,
    StateKey,
    chunk_sidecar,
    decode_chunk,
    decode_declaration,
    decode_family,
    decode_frame,
    decode_manifest,
    decode_pack,
    decode_schema,
    decode_sidecar,
)
from kvplane.kvpack.chunk import HEADER
from kvplane.pack.blob import check_rows, check_states, tensors_of
from kvplane.pack.documents import Cut, Node, SavedSession
from kvplane.pack.encoding import sealed
from kvplane.pack.groups import group_in
from kvplane.pack.header import header_of
from kvplane.pack.zstd_bytes import is_packed, unpacked

PATH = "fuzzed"
KEYS = Keys(bytes([99]) * 32, tenant=bytes([1]) * 32, epoch=7)


def _document(kind, decoded):
    def target(data):
        with suppress(PackError):
            decoded(data, PATH)
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(fields, dict):
            fields.pop("self", None)
            try:
                again = sealed(kind, fields)
            except (ValueError, RecursionError, TypeError):
                # what no writer could have written
                return
            with suppress(PackError):
                decoded(again, PATH)

    return target


def blob_header(data):
    """The header of a blob, then what a loader asks of it."""
    with suppress(PackError):
        header = header_of(data, PATH)
        with suppress(PackError):
            check_states(header, 7, PATH)
        if is_packed(data):
            unpacked(data, PATH, limit=1 << 20)
        group = group_in(header, PATH)
        check_rows(header, group, PATH)
        for _ in tensors_of(header, bytearray(data)):
            pass


def _chunk(data):
    with suppress(PackError):
        chunk_sidecar(data)
    if len(data) < HEADER.size:
        return
    fields = HEADER.unpack_from(data)
    ref = ChunkRef(
        fields[14], fields[15], hashlib.sha256(data).digest(), fields[11], *fields[7:11:3]
    )
    span = ChunkSpan(0, 4, 0, fields[7])
    place = Place(family_id=fields[13], key=StateKey(0, "attention.k"), span=span, codec=Codec.RAW)
    decode_chunk(KEYS, data, place=place, ref=ref)


BY_MAGIC = {
    b"KVFAM1\0\0": decode_family,
    b"KVRCS1\0\0": decode_schema,
    b"KVSTS1\0\0": decode_declaration,
    b"KVMNF1\0\0": decode_manifest,
    b"KVSSC1\0\0": decode_sidecar,
    b"KVRAW1\0\0": lambda data: decode_frame(Codec.RAW, data),
    b"KVRLE1\0\0": lambda data: decode_frame(Codec.LOSSLESS, data),
    b"KVPKP1\0\0": lambda data: decode_pack(KEYS, data),
    b"KVCHK1\0\0": _chunk,
}


def kvpack(data):
    """An object of kvpack by its magic; of no known one, a family."""
    with suppress(PackError):
        BY_MAGIC.get(bytes(data[:8]), decode_family)(data)


TARGETS = {
    "manifest": _document("session", SavedSession.decoded),
    "cut": _document("cut", Cut.decoded),
    "node": _document("node", Node.decoded),
    "blob-header": blob_header,
    "kvpack": kvpack,
}
