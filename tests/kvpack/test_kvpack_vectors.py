"""kvpack v1 byte for byte: the published digests, made again from the published inputs."""

import hashlib

import pytest
import suites

from kvplane.kvpack import Codec, decode_manifest, decode_pack, read_rows

# of a suite's lines, joined by newlines, as the draft publishes them: fixture, then delta chain
PUBLISHED_SUITES = {
    "raw/plain/plain": "dd7431ae4ef1b509ff64347b14261bc11f9422f8fd98cb2e37321be8c8d8e559",
    "raw/plain/encrypted": "bb5c24ac65504be9cc57d050b0e94747b28e8af0ba30468570ce760dc3591d8e",
    "raw/encrypted/plain": "1521dff981d24ac91062acaa0189beac8e02f6b670a59c6daf79b77b81d13e26",
    "raw/encrypted/encrypted": "be34a24f83cc16b14ad4ceb0ca72e0e350e862d745ee1cb65c32e2f4991ab3f1",
    "lossless/plain/plain": "a54cefb6ffeb40818b46af32b5f08fe4642b74643b65fc1a0eea560b9b5571c7",
    "lossless/plain/encrypted": "eb4d7df0bfba137265de140bc0d5e77b32b09b7d7ca726a931eeb167a8e4ef1c",
    "lossless/encrypted/plain": "a693ee1196a3e6118a62356da6b5b989513e632066a626a014fcb877f2fa9ba8",
    "lossless/encrypted/encrypted": (
        "98efdb473a6e1aa263661788b0028772996c511cfa51ea0a49eb11c33c7719b2"
    ),
}


def arguments(suite):
    codec, chunks, pack = suite.split("/")
    sealed = {"chunks_sealed": chunks == "encrypted", "pack_sealed": pack == "encrypted"}
    return Codec[codec.upper()], sealed


def test_the_published_suite_is_made_again_byte_for_byte():
    published = [
        line for line in suites.PUBLISHED.read_text().splitlines() if not line.startswith("#")
    ]

    assert published == list(suites.lines(Codec.RAW, chunks_sealed=False, pack_sealed=False))


@pytest.mark.parametrize("suite", PUBLISHED_SUITES)
def test_every_other_suite_comes_out_right_from_the_same_inputs(suite):
    codec, sealed = arguments(suite)
    text = "".join(f"{line}\n" for line in suites.lines(codec, **sealed))

    assert PUBLISHED_SUITES[suite] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("suite", PUBLISHED_SUITES)
def test_what_was_written_is_read_back(suite):
    codec, sealed = arguments(suite)
    made = suites.fixture(codec, **sealed)

    manifest = decode_pack(suites.keys(), made.pack)
    rows = list(read_rows(suites.keys(), [manifest], lambda _: made.chunk.data))

    assert made.manifest == manifest
    assert [suites.PLAINTEXT] == [one.plaintext for one in rows]
    assert made.manifest == decode_manifest(made.manifest.encoded())


@pytest.mark.parametrize("suite", PUBLISHED_SUITES)
def test_a_chain_of_deltas_gives_all_rows_in_order(suite):
    codec, sealed = arguments(suite)
    stages = suites.delta_chain(codec, **sealed)
    files = {stage.chunk.ref.object_key: stage.chunk.data for stage in stages}
    manifests = [decode_pack(suites.keys(), stage.pack) for stage in stages]

    rows = list(read_rows(suites.keys(), manifests, lambda ref: files[ref.object_key]))

    assert bytes(range(32)) == b"".join(one.plaintext for one in rows)
    assert list(range(8)) == [one.span.token_start for one in rows]
