"""Blobs packed by `zstd-bytes`: the same rows, fewer bytes, every lie refused."""

import sys
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as safetensors_load

from kvplane.errors import ExtraMissing, PackCorrupt, PackError, PackMissing, PackTooLarge
from kvplane.geometry import LayerGroup
from kvplane.pack import Codec, PrefixCache, load_session, open_root, read_session, save_session
from kvplane.pack.blob import blob_name, row_blob
from kvplane.pack.encoding import digest
from kvplane.pack.header import header_of, written_header
from kvplane.pack.inventory import Kind, kind_of
from kvplane.pack.verify import verify
from kvplane.pack.whole import gathered, rows_digest
from kvplane.pack.zstd_bytes import is_packed, packed, unpacked
from kvplane.storage import MemoryStorage
from saved_roots import FINGERPRINT, grow, new_store

LIMIT = 1 << 20


def group(dtype="float16", layers=(1, 2, 10), head_dim=4, value_head_dim=6):
    return LayerGroup(
        layers=layers,
        kind="full_attention",
        sliding_window=None,
        num_kv_heads=2,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        dtype=dtype,
    )


def blob(count=40, first=7, seed=0, **options):
    mine = group(**options)
    torch.manual_seed(seed)
    dtype = getattr(torch, mine.dtype)
    rows = {
        layer: [
            (
                torch.randn(count, 2, mine.head_dim).to(dtype),
                torch.randn(count, 2, mine.value_head_dim).to(dtype),
            )
        ]
        for layer in mine.layers
    }
    return row_blob(mine, first, rows)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_was_packed_is_the_raw_blob_again(dtype):
    data = blob(dtype=dtype, count=200)
    small = packed(data)

    assert len(small) < len(data)
    assert is_packed(small)
    assert not is_packed(data)
    assert data == unpacked(small, "blob", limit=len(data))


@given(count=st.integers(1, 249), seed=st.integers(0, 9), value_dim=st.integers(1, 5))
def test_blobs_of_any_size_come_back(count, seed, value_dim):
    data = blob(count=count, seed=seed, value_head_dim=value_dim)
    small = packed(data)

    assert small is None or data == unpacked(small, "blob", limit=len(data))


def test_what_would_be_no_shorter_is_left_raw():
    assert packed(blob(count=1)) is None


def test_the_safetensors_library_opens_it_and_finds_bytes_by_significance():
    data = blob(count=200)
    tensors = safetensors_load(bytes(packed(data)))
    raw = safetensors_load(bytes(data))["layers.10.key"].view(torch.uint8).reshape(-1, 2)

    assert {"layers.10.key.b0", "layers.10.key.b1"} <= set(tensors)
    for number in range(2):
        frame = tensors[f"layers.10.key.b{number}"].numpy().tobytes()
        found = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
        assert np.array_equal(raw[:, number].numpy(), found)


@pytest.fixture
def storage():
    return open_root(MemoryStorage(), create=True)


def saved(storage, name, codec, num_tokens=600):
    session = grow(new_store().open(tokens=[]), list(range(num_tokens)))
    return session, save_session(storage, name, session, FINGERPRINT, codec=codec)


def test_a_packed_session_goes_on_bit_for_bit_in_fewer_bytes(storage):
    _, raw = saved(storage, "raw", Codec.RAW)
    _, small = saved(storage, "small", Codec.ZSTD_BYTES)
    digests = {
        rows_digest(gathered(storage, read_session(storage, name))) for name in ("raw", "small")
    }
    loaded = load_session(storage, "small", new_store(), FINGERPRINT)[1]

    assert small.nbytes_written < raw.nbytes_written
    assert 1 == len(digests)
    assert 600 == loaded.session.position
    assert loaded.nbytes < raw.nbytes_written
    assert verify(storage).sound


def test_saved_again_it_writes_only_what_is_new(storage):
    session, _ = saved(storage, "small", Codec.ZSTD_BYTES)
    again = save_session(storage, "small", session, FINGERPRINT, codec=Codec.ZSTD_BYTES)
    other = save_session(storage, "other", session, FINGERPRINT)
    resumed = load_session(storage, "small", new_store(), FINGERPRINT)[1].session
    later = save_session(storage, "later", resumed, FINGERPRINT)

    assert (0, 0, 0) == (again.blobs_written, other.blobs_written, later.blobs_written)


def test_a_cut_of_packed_blobs_is_matched_and_loaded(storage):
    cache = PrefixCache(storage, FINGERPRINT, codec=Codec.ZSTD_BYTES)
    session = grow(new_store().open(tokens=[]), list(range(512)))
    cache.publish(session)
    match, loaded = cache.load(list(range(513)), new_store())

    assert (512, 512) == (match.position, loaded.session.position)
    packed_blobs = [is_packed(storage.read(name, limit=LIMIT)) for name in storage.list("blobs")]
    assert any(packed_blobs)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_of_a_packed_blob_is_found(storage, damage):
    saved(storage, "small", Codec.ZSTD_BYTES, num_tokens=300)
    for name in [file for file in storage.list() if kind_of(file) is Kind.BLOB]:
        data = storage.read(name, limit=LIMIT)
        if damage == "gone":
            storage.delete(name)
        elif damage == "cut":
            storage.replace(name, data[:-1])
        else:
            storage.replace(name, data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(PackMissing if damage == "gone" else PackCorrupt):
            load_session(storage, "small", new_store(), FINGERPRINT)
        storage.replace(name, data)


def forged(change):
    """A packed blob whose parts were changed by `change(metadata, frames, entries)`."""
    data = packed(blob(count=200))
    header = header_of(data, "blob")
    metadata, entries = dict(header.metadata), list(header.entries)
    frames = [bytes(data[header.data_first :][one.first : one.stop]) for one in entries]
    change(metadata, frames, entries)
    end = 0
    for number, (frame, entry) in enumerate(zip(frames, entries, strict=True)):
        entries[number] = entry._replace(shape=(len(frame),), first=end, stop=end + len(frame))
        end += len(frame)
    return bytearray(written_header(metadata, entries) + b"".join(frames))


def compress(data):
    return zstandard.ZstdCompressor(write_content_size=True).compress(data)


def says(**fields):
    return lambda metadata, *_: metadata.update(fields)


def frame(change):
    """The first frame is another."""
    return lambda _metadata, frames, _entries: frames.__setitem__(0, change(frames[0]))


def named(name):
    return lambda _metadata, _frames, entries: entries.__setitem__(
        0, entries[0]._replace(name=name)
    )


LIES = {
    "another digest of the rows": says(rows="0" * 64),
    "no digest": says(rows="x"),
    "a field more": says(more=1),
    "another codec": says(codec="zstd-bytes-2"),
    "no group": says(group="f0.2x4"),
    "another group": says(group="f0.3x4x6.f16"),
    "another width": says(group="f0.2x4x6.f32"),
    "more rows": says(count=201),
    "rows of two blocks": says(first=200),
    "no row": says(count=0),
    "a frame that is none": frame(lambda _: b"hello"),
    "a frame cut short": frame(lambda old: old[:-1]),
    "bytes behind a frame": frame(lambda old: old + b"\0"),
    "two frames": frame(lambda _: compress(b"a" * 800) * 2),
    "a frame of other bytes": frame(lambda _: compress(bytes(1600))),
    "a frame of more": frame(lambda _: compress(bytes(1601))),
    "a frame that does not say its size": frame(
        lambda _: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1600))
    ),
    "a tensor less": lambda _, frames, entries: (frames.pop(), entries.pop()),
    "another name": named("layers.1.key.b2"),
    "a name that is none": named("a"),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_of_a_packed_blob_is_refused(lie):
    data = forged(LIES[lie])
    with pytest.raises(PackCorrupt):
        unpacked(data, "blob", limit=LIMIT)


def test_a_group_of_impossible_size_takes_no_memory():
    data = forged(says(group="f0.999999999x999999999x6.f16"))
    tracemalloc.start()
    with pytest.raises(PackTooLarge):
        unpacked(data, "blob", limit=LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < LIMIT


def test_a_frame_that_grows_beyond_what_it_says_takes_no_memory():
    bomb = compress(bytes(100 << 20))
    data = forged(frame(lambda _: bomb))
    tracemalloc.start()
    with pytest.raises(PackCorrupt, match="a frame of"):
        unpacked(data, "blob", limit=LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < LIMIT


@pytest.mark.parametrize("seed", range(4))
def test_any_changed_byte_of_a_forged_blob_is_read_or_refused(seed):
    data = forged(says())
    for at in range(seed, len(data), 29):
        lie = bytearray(data)
        lie[at] ^= 1 << (at % 8)
        try:
            found = unpacked(lie, "blob", limit=LIMIT)
        except PackError:
            continue
        # only what the header may say otherwise: which rows they are
        assert len(found) > 0


def test_without_its_extra_packing_and_reading_name_it(storage, monkeypatch):
    saved(storage, "small", Codec.ZSTD_BYTES, num_tokens=300)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ExtraMissing, match=r"kvplane\[zstd\]"):
        load_session(storage, "small", new_store(), FINGERPRINT)
    with pytest.raises(ExtraMissing, match=r"kvplane\[zstd\]"):
        saved(storage, "more", Codec.ZSTD_BYTES, num_tokens=300)


def test_a_packed_blobs_name_is_the_digest_of_its_file(storage):
    saved(storage, "small", Codec.ZSTD_BYTES, num_tokens=300)
    for name in storage.list("blobs"):
        assert blob_name(digest(storage.read(name, limit=LIMIT)).hex()) == name
