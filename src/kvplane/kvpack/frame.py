"""How a piece's bytes are framed: as they are, or with runs of equal bytes packed.

    frame = magic | u16 1 | u16 0 | u32 decoded bytes | data
    lossless data: control c, length (c & 127) + 1; bit 7 clear: so many bytes as they are;
                   set: one byte, so many times

One encoding is canonical: runs of at least three are repeats, everything else is joined to
literals of at most 128. A decoder encodes what it decoded and compares.
"""

import hmac

import numpy as np

from kvplane.kvpack import limits
from kvplane.kvpack.family import Codec
from kvplane.kvpack.wire import Reader, head, reject, u32

MAGICS = {Codec.RAW: "KVRAW1", Codec.LOSSLESS: "KVRLE1"}
_PACKET = 128
_SHORTEST = 3


def encode_frame(codec: Codec, plaintext: bytes | memoryview) -> bytes:
    """The frame of a piece: KvpackRejected when it is empty or too long."""
    nbytes = len(plaintext)
    if not 1 <= nbytes <= limits.PLAINTEXT_NBYTES:
        raise reject("bounds", f"a piece of {nbytes} bytes")
    data = bytes(plaintext) if codec is Codec.RAW else packed(plaintext)
    return head(MAGICS[codec]) + u32(nbytes) + data


def decode_frame(codec: Codec, frame: bytes | memoryview) -> bytes:
    """A piece's bytes: KvpackRejected when this is not their one frame."""
    reader = Reader(frame, MAGICS[codec])
    reader.head(MAGICS[codec])
    nbytes = reader.u32()
    if not 1 <= nbytes <= limits.PLAINTEXT_NBYTES:
        raise reject("bounds", f"a frame of {nbytes} bytes")
    data = reader.take(nbytes if codec is Codec.RAW else reader.left)
    reader.end()
    if codec is Codec.RAW:
        return data
    plaintext = _unpacked(data, nbytes)
    if not hmac.compare_digest(data, packed(plaintext)):
        raise reject("codec", "packets that an encoder does not write")
    return plaintext


def packed(plaintext: bytes | memoryview) -> bytes:
    """The canonical packets of a piece."""
    data = np.frombuffer(plaintext, dtype=np.uint8)
    # where a run begins, and where the last one ends
    edges = np.flatnonzero(data[1:] != data[:-1]) + 1
    edges = np.concatenate(([0], edges, [len(data)]))
    lengths = np.diff(edges)
    out = bytearray()
    literal = 0
    for number in np.flatnonzero(lengths >= _SHORTEST):
        at, length = int(edges[number]), int(lengths[number])
        _put_literals(out, data[literal:at])
        value = int(data[at])
        while length >= _SHORTEST:
            taken = min(length, _PACKET)
            out += bytes(((taken - 1) | 0x80, value))
            at, length = at + taken, length - taken
        # what is left of a long run is joined to what follows
        literal = at
    _put_literals(out, data[literal:])
    return bytes(out)


def _put_literals(out: bytearray, data: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
    whole = len(data) // _PACKET
    if whole:
        rows = np.empty((whole, 1 + _PACKET), dtype=np.uint8)
        rows[:, 0] = _PACKET - 1
        rows[:, 1:] = data[: whole * _PACKET].reshape(whole, _PACKET)
        out += rows.tobytes()
    rest = data[whole * _PACKET :]
    if len(rest):
        out.append(len(rest) - 1)
        out += rest.tobytes()


def _unpacked(data: bytes, nbytes: int) -> bytes:
    out = bytearray()
    at = 0
    while at < len(data):
        control = data[at]
        length = (control & 0x7F) + 1
        if len(out) + length > nbytes:
            raise reject("codec", f"packets of more than {nbytes} bytes")
        stop = at + 2 if control & 0x80 else at + 1 + length
        if stop > len(data):
            raise reject("truncated", "a packet ends before its bytes")
        out += data[at + 1 : stop] * length if control & 0x80 else data[at + 1 : stop]
        at = stop
    if len(out) != nbytes:
        raise reject("truncated", f"packets of {len(out)} bytes, {nbytes} are announced")
    return bytes(out)
