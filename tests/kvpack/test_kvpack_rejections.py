"""What a reader of kvpack v1 refuses, and by which category."""

import hashlib
import struct
from contextlib import suppress
from dataclasses import replace

import pytest
import suites
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import KvpackRejected
from kvplane.kvpack import (
    Codec,
    decode_chunk,
    decode_declaration,
    decode_family,
    decode_frame,
    decode_manifest,
    decode_pack,
    decode_schema,
    encode_frame,
    packfile,
)
from kvplane.kvpack.manifest import manifest_id
from kvplane.kvpack.wire import LEGACY_MAGICS

FIXTURE = suites.fixture()
SEALED = suites.fixture(chunks_sealed=True, pack_sealed=True)
OBJECTS = {
    "state": (suites.declaration().encoded(), decode_declaration),
    "family": (FIXTURE.manifest.family.encoded(), decode_family),
    "schema": (FIXTURE.manifest.schema.encoded(), decode_schema),
    "manifest": (FIXTURE.manifest.encoded(), decode_manifest),
}
FILES = {
    "chunk": (FIXTURE.chunk.data, lambda data: read_chunk(FIXTURE, data)),
    "sealed chunk": (SEALED.chunk.data, lambda data: read_chunk(SEALED, data)),
    "pack": (FIXTURE.pack, lambda data: decode_pack(suites.keys(), data)),
    "sealed pack": (SEALED.pack, lambda data: decode_pack(suites.keys(), data)),
}
EVERY = OBJECTS | FILES


def read_chunk(made, data, **changes):
    return decode_chunk(
        suites.keys(), data, place=made.place, ref=made.chunk.ref._replace(**changes)
    )


def changed(data, offset, new):
    return data[:offset] + new + data[offset + len(new) :]


def flipped(data, offset):
    return changed(data, offset, bytes([data[offset] ^ 1]))


def category(read, data):
    with pytest.raises(KvpackRejected) as refused:
        read(data)
    return refused.value.category


@pytest.mark.parametrize("name", EVERY)
def test_cut_short_anywhere_it_is_truncated(name):
    data, read = EVERY[name]
    # of the files every length near an edge, and steps of an odd size between
    lengths = range(len(data)) if name in OBJECTS else {*range(0, len(data), 61), len(data) - 1}

    assert {"truncated"} == {category(read, data[:length]) for length in lengths}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("offset", "new"), [(0, b"X"), (8, b"\x02\x00")], ids=["magic", "version"])
def test_another_magic_or_version_is_a_bad_magic(name, offset, new):
    data, read = EVERY[name]

    assert "bad_magic" == category(read, changed(data, offset, new))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("legacy", LEGACY_MAGICS, ids=lambda one: one.decode())
def test_designs_that_were_given_up_are_refused(name, legacy):
    data, read = EVERY[name]

    assert "bad_magic" == category(read, changed(data, 0, legacy.ljust(8, b"\0")))


@pytest.mark.parametrize("name", OBJECTS)
def test_a_reserved_field_that_is_set_is_refused(name):
    data, read = OBJECTS[name]

    assert "reserved" == category(read, changed(data, 10, b"\x01\x00"))


@pytest.mark.parametrize("name", [*OBJECTS, "pack", "sealed pack"])
def test_a_byte_more_is_refused(name):
    data, read = EVERY[name]

    assert "reserved" == category(read, data + b"\0")


@pytest.mark.parametrize(
    ("name", "offset", "new", "expected"),
    [
        ("family", 44, b"\x63\x00", "unknown_enum"),
        ("schema", 12, b"\x09", "unknown_enum"),
        ("schema", 13, b"\x01", "reserved"),
        ("schema", 14, b"\x01\x00", "reserved"),
    ],
    ids=["mode", "kind", "depth of a full one", "kind's reserved"],
)
def test_unknown_enumerators_and_impossible_unions(name, offset, new, expected):
    data, read = OBJECTS[name]

    assert expected == category(read, changed(data, offset, new))


FAMILY_STATE = 12 + 32 + 2 + 2 + 4 + 32 + 32 + 4
ENUMS = FAMILY_STATE + 4 + 2 + len(suites.KEY.name)


@pytest.mark.parametrize("field", range(6), ids=str)
def test_each_enumerator_of_a_state_is_checked(field):
    data, read = OBJECTS["family"]

    assert "unknown_enum" == category(read, changed(data, ENUMS + 2 * field, b"\x0a\x00"))


CHUNK_FIELDS = {
    "header bytes": (10, "<H", 4095, "bounds"),
    "alignment": (12, "<I", 512, "bounds"),
    "flags": (16, "<I", 2, "unknown_enum"),
    "codec": (20, "<H", 3, "unknown_enum"),
    "codec version": (22, "<H", 2, "unknown_enum"),
    "plaintext": (24, "<I", 5 << 20, "bounds"),
    "plaintext of another size": (24, "<I", 17, "semantics"),
    "frame": (28, "<I", 33, "bounds"),
    "payload": (32, "<I", 1 << 31, "bounds"),
    "object, longer": (36, "<I", 12288, "truncated"),
    "object, shorter": (36, "<I", 4096, "reserved"),
    "epoch 0": (40, "<Q", 0, "bounds"),
    "encryption that is none": (16, "<I", 1, "bounds"),
    "salt": (176, "<B", 1, "reserved"),
    "reserved": (4095, "<B", 1, "reserved"),
    "padding": (8191, "<B", 1, "reserved"),
    "sidecar": (236, "<H", 3859, "bounds"),
    "a sidecar that is none": (236, "<H", 40, "bad_magic"),
    "other rows": (4096 + 16, "<B", 7, "checksum"),
    "tenant": (48, "<B", 7, "checksum"),
}


@pytest.mark.parametrize("field", CHUNK_FIELDS)
def test_each_field_of_a_chunk_is_checked(field):
    data, read = FILES["chunk"]
    offset, form, value, expected = CHUNK_FIELDS[field]

    assert expected == category(read, changed(data, offset, struct.pack(form, value)))


PACK_FIELDS = {
    "header bytes": (10, "<H", 4095, "bounds"),
    "flags": (16, "<I", 2, "unknown_enum"),
    "reserved": (20, "<I", 1, "reserved"),
    "stored, longer": (24, "<Q", 797, "bounds"),
    "plain": (32, "<Q", 1 << 40, "bounds"),
    "epoch 0": (40, "<Q", 0, "bounds"),
    "catalog": (48, "<Q", 1, "reserved"),
    "epoch": (40, "<Q", 6, "semantics"),
    "tenant": (56, "<B", 9, "checksum"),
    "salt": (120, "<B", 9, "reserved"),
    "digest": (148, "<B", 9, "checksum"),
    "far reserved": (4095, "<B", 9, "reserved"),
    "manifest": (4096 + 20, "<B", 9, "authentication"),
    "footer's magic": (4096 + 796, "<B", 9, "bad_magic"),
    "footer's size": (4096 + 796 + 10, "<H", 9, "bounds"),
    "footer's reserved": (4096 + 796 + 12, "<I", 9, "reserved"),
    "footer's length": (4096 + 796 + 40, "<Q", 9, "semantics"),
    "footer's seal": (4096 + 796 + 80, "<B", 9, "authentication"),
    "footer's far reserved": (4096 + 796 + 4095, "<B", 9, "reserved"),
}


@pytest.mark.parametrize("field", PACK_FIELDS)
def test_each_field_of_a_pack_is_checked(field):
    data, read = FILES["pack"]
    offset, form, value, expected = PACK_FIELDS[field]

    assert expected == category(read, changed(data, offset, struct.pack(form, value)))


def sealed_anew(manifest, name):
    """The fixture's pack with another manifest of its size and an id, sealed with the key."""
    header = bytearray(FIXTURE.pack[:4096])
    header[88:120] = name
    header[148:180] = bytes(32)
    header[148:180] = hashlib.sha256(header).digest()
    footer = bytearray(FIXTURE.pack[-4096:])
    footer[48:80] = name
    footer[80:112] = packfile._authentication(suites.keys(), bytes(header), manifest, 7)
    return bytes(header) + manifest + bytes(footer)


@pytest.mark.parametrize(
    ("offset", "new"), [(12, b"\x02" * 32), (44, b"\x06" + bytes(7))], ids=["tenant", "epoch"]
)
def test_a_sealed_pack_of_anothers_manifest_is_refused(offset, new):
    manifest = changed(FIXTURE.manifest.encoded(), offset, new)
    pack = sealed_anew(manifest, manifest_id(manifest))

    assert "semantics" == category(FILES["pack"][1], pack)


def test_a_sealed_pack_whose_manifest_has_another_id_is_refused():
    manifest = FIXTURE.manifest.encoded()
    pack = sealed_anew(manifest, manifest_id(b"another"))

    assert FIXTURE.pack == sealed_anew(manifest, manifest_id(manifest))
    assert "checksum" == category(FILES["pack"][1], pack)


def test_a_count_that_cannot_be_is_refused_before_any_entry_is_read():
    data = OBJECTS["family"][0]
    claims = changed(changed(data, ENUMS, b"\x0a\x00"), 116, struct.pack("<I", 65_536))

    assert "truncated" == category(decode_family, claims)


@pytest.mark.parametrize("name", FILES)
def test_no_bit_of_a_file_can_change_unseen(name):
    data, read = FILES[name]
    # zeros in the middle of headers and padding are alike: one of seven
    offsets = [n for n in range(len(data)) if data[n] or n % 7 == 0]

    for offset in offsets:
        with pytest.raises(KvpackRejected):
            read(flipped(data, offset))


@pytest.mark.parametrize("name", OBJECTS)
def test_any_change_of_an_object_is_read_as_it_says_or_refused(name):
    data, read = OBJECTS[name]

    for offset in range(len(data)):
        for new in (0, 1, 0x7F, 0xFF):
            with suppress(KvpackRejected):
                read(changed(data, offset, bytes([new])))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"object_digest": bytes(32)}, "checksum"),
        ({"content_id": bytes(32)}, "authentication"),
        ({"object_key": bytes(32)}, "authentication"),
        ({"plaintext_nbytes": 12}, "semantics"),
        ({"object_nbytes": 12288}, "semantics"),
        ({"epoch": 6}, "semantics"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else one,
)
def test_a_chunk_that_is_not_what_its_reference_says(changes, expected):
    with pytest.raises(KvpackRejected) as refused:
        read_chunk(FIXTURE, FIXTURE.chunk.data, **changes)

    assert expected == refused.value.category


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"family_id": bytes(32)}, "semantics"),
        ({"codec": Codec.LOSSLESS}, "codec"),
        ({"key": suites.KEY._replace(layer=1)}, "authentication"),
        ({"span": FIXTURE.place.span._replace(token_start=4)}, "authentication"),
    ],
    ids=["family", "codec", "layer", "tokens"],
)
def test_rows_are_not_taken_for_those_of_another_place(changes, expected):
    place = replace(FIXTURE.place, **changes)
    with pytest.raises(KvpackRejected) as refused:
        decode_chunk(suites.keys(), FIXTURE.chunk.data, place=place, ref=FIXTURE.chunk.ref)

    assert expected == refused.value.category


def naive_packets(data):
    """The rules as they are written down, a byte at a time."""
    out, literal, at = bytearray(), bytearray(), 0

    def flush():
        if literal:
            out.append(len(literal) - 1)
            out.extend(literal)
            literal.clear()

    while at < len(data):
        run = 1
        while at + run < len(data) and data[at + run] == data[at] and run < 128:
            run += 1
        if run >= 3:
            flush()
            out.extend((0x80 | (run - 1), data[at]))
        else:
            for value in data[at : at + run]:
                literal.append(value)
                if len(literal) == 128:
                    flush()
        at += run
    flush()
    return bytes(out)


RUNS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 1, 2, 3, 4, 127, 128, 129, 130, 131, 300])),
    min_size=1,
    max_size=12,
).map(lambda runs: b"".join(bytes([value]) * count for value, count in runs))


@given(RUNS | st.binary(min_size=1, max_size=600))
def test_packets_are_those_of_the_rules_and_are_read_back(data):
    frame = encode_frame(Codec.LOSSLESS, data)

    assert naive_packets(data) == frame[16:]
    assert data == decode_frame(Codec.LOSSLESS, frame)


@pytest.mark.parametrize(
    ("packets", "nbytes", "expected"),
    [
        (b"\x00a\x00b", 2, "codec"),
        (b"\x81a", 2, "codec"),
        (b"\x02aaa", 3, "codec"),
        (b"\x82a", 2, "codec"),
        (b"\x82a", 4, "truncated"),
        (b"\x82", 3, "truncated"),
        (b"\x05ab", 6, "truncated"),
    ],
    ids=["split", "short run", "run as literal", "too much", "too little", "no byte", "cut"],
)
def test_packets_that_no_encoder_writes_are_refused(packets, nbytes, expected):
    frame = encode_frame(Codec.LOSSLESS, bytes(nbytes))[:12] + struct.pack("<I", nbytes) + packets

    assert expected == category(lambda data: decode_frame(Codec.LOSSLESS, data), frame)


@pytest.mark.parametrize("nbytes", [0, (4 << 20) + 1, (1 << 32) - 1], ids=str)
@pytest.mark.parametrize("codec", Codec)
def test_a_frame_that_claims_an_impossible_size_is_refused(codec, nbytes):
    frame = encode_frame(codec, b"x")[:12] + struct.pack("<I", nbytes) + b"x"

    assert "bounds" == category(lambda data: decode_frame(codec, data), frame)
