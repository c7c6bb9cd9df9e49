"""Statistics beside a piece, and what kvpack needs of its surroundings."""

import struct
import subprocess
import sys

import numpy as np
import pytest
import suites

from kvplane.errors import ExtraMissing, KvpackRejected
from kvplane.kvpack import (
    ChunkSpan,
    Codec,
    Seal,
    Sidecar,
    chunk_sidecar,
    decode_chunk,
    decode_sidecar,
    encode_chunk,
)
from kvplane.kvpack.chunk import Place

ROWS = np.array(
    [[1, 0.5, -1, 2], [0, 1.5, -0.5, 1], [-2, 0.25, 3, 0], [4, -0.75, 0.5, 1]], dtype=np.float16
)
PLACE = Place(family_id=b"f" * 32, key=suites.KEY, span=ChunkSpan(0, 4, 0, 32), codec=Codec.RAW)


def sidecar(num_sinks=2):
    return Sidecar.of_rows(ROWS, num_sinks=num_sinks)


def test_it_says_each_channels_range_each_tokens_norm_and_the_largest():
    found = sidecar()

    assert ((-2.0, 4.0), (-0.75, 1.5), (-1.0, 3.0), (0.0, 2.0)) == found.ranges
    assert [float(np.float16(np.sqrt(np.float32(n)))) for n in (6.25, 3.5, 13.0625, 17.8125)] == (
        list(found.norms)
    )
    assert [3, 2] == [sink.token for sink in found.sinks]


def test_of_equal_norms_the_lower_token_comes_first():
    rows = np.ones((5, 3), dtype=np.float16)

    assert [0, 1, 2] == [one.token for one in Sidecar.of_rows(rows, num_sinks=3).sinks]


def test_its_bytes_are_as_written_down():
    data = sidecar().encoded()

    assert 12 + 4 + 16 + 4 + 8 + 2 + 16 == len(data)
    assert b"KVSSC1\0\0\x01\0\0\0\x04\0\0\0" == data[:16]
    assert struct.pack("<ee", -2.0, 4.0) == data[16:20]
    assert sidecar() == decode_sidecar(data)


@pytest.mark.parametrize("seal", [None, Seal(b"s" * 16, b"n" * 12)], ids=["plain", "sealed"])
def test_it_is_stored_in_the_chunks_header_and_names_another_object(seal):
    data = ROWS.tobytes()
    bare = encode_chunk(suites.keys(), PLACE, data, seal=seal)
    chunk = encode_chunk(suites.keys(), PLACE, data, seal=seal, sidecar=sidecar())

    assert data == decode_chunk(suites.keys(), chunk.data, place=PLACE, ref=chunk.ref)
    assert sidecar() == chunk_sidecar(chunk.data)
    assert chunk_sidecar(bare.data) is None
    assert bare.ref.content_id == chunk.ref.content_id
    assert bare.ref.object_key != chunk.ref.object_key


@pytest.mark.parametrize("length", range(62))
def test_cut_short_it_is_refused(length):
    with pytest.raises(KvpackRejected) as refused:
        decode_sidecar(sidecar().encoded()[:length])

    assert "truncated" == refused.value.category


@pytest.mark.parametrize(
    ("offset", "new", "expected"),
    [
        (16, struct.pack("<e", np.nan), "semantics"),
        (16, struct.pack("<e", 5.0), "semantics"),
        (36, struct.pack("<e", np.inf), "semantics"),
        (36, struct.pack("<e", -1.0), "semantics"),
        (46, struct.pack("<I", 2), "semantics"),
        (52, b"\x01\0", "reserved"),
        (12, struct.pack("<I", 513), "bounds"),
        (32, struct.pack("<I", 769), "bounds"),
        (44, struct.pack("<H", 0), "bounds"),
        (44, struct.pack("<H", 9), "bounds"),
    ],
    ids=str,
)
def test_what_no_rows_have_is_refused(offset, new, expected):
    data = bytearray(sidecar().encoded())
    data[offset : offset + len(new)] = new
    with pytest.raises(KvpackRejected) as refused:
        decode_sidecar(bytes(data))

    assert expected == refused.value.category


@pytest.mark.parametrize("shape", [(769, 1), (1, 513)], ids=str)
def test_pieces_that_are_too_large_have_none(shape):
    with pytest.raises(KvpackRejected, match="a sidecar of"):
        Sidecar.of_rows(np.ones(shape, dtype=np.float16), num_sinks=1)


def test_rows_whose_norm_overflows_have_none():
    with pytest.raises(KvpackRejected, match="not finite"):
        Sidecar.of_rows(np.full((2, 2), 65504, dtype=np.float16), num_sinks=1)


def test_a_seal_of_another_length_is_refused():
    with pytest.raises(KvpackRejected, match="16 bytes"):
        encode_chunk(suites.keys(), PLACE, ROWS.tobytes(), seal=Seal(b"", b""))


def test_rows_of_another_length_are_refused():
    with pytest.raises(KvpackRejected, match="31 bytes"):
        encode_chunk(suites.keys(), PLACE, ROWS.tobytes()[:-1])


def test_fresh_seals_are_never_the_same():
    assert 20 == len({Seal.fresh() for _ in range(20)})


def test_without_its_extra_encryption_names_it(monkeypatch):
    sealed = suites.fixture(chunks_sealed=True)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ExtraMissing, match=r"kvplane\[kvpack\]"):
        suites.fixture(chunks_sealed=True)
    with pytest.raises(ExtraMissing, match=r"kvplane\[kvpack\]"):
        decode_chunk(suites.keys(), sealed.chunk.data, place=sealed.place, ref=sealed.chunk.ref)


def test_it_needs_neither_tensors_nor_a_store_nor_encryption():
    program = (
        "import sys, kvplane.kvpack; "
        "unwanted = ('torch', 'cryptography', 'transformers', 'zstandard', 'kvplane.store', "
        "'kvplane.pack', 'kvplane.storage'); "
        "print([name for name in unwanted if name in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout

    assert "[]\n" == said
