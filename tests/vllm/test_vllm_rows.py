"""Cuts of an engine's rows: written, read, damaged; with the transformers side's fingerprint."""

import pytest
import torch

import model_folders
from kvplane.errors import ArgumentError, PackError
from kvplane.integrations.transformers.identity import fingerprint_of as of_model
from kvplane.integrations.vllm.identity import fingerprint_of, weights_identity
from kvplane.integrations.vllm.options import ConnectorOptions
from kvplane.integrations.vllm.rows import Captured, CutWriter, Known, read_rows
from kvplane.pack.chain import packed_ids
from kvplane.storage import MemoryStorage
from small_models import small

FINGERPRINT = "ab" * 32
NUMERICS = {"engine": "vllm", "chunk": 2048}


def captured(geometry, first_full, cut):
    """Rows whose bits say their layer and position."""
    found = []
    for group in geometry.groups:
        window = group.sliding_window
        first = first_full if window is None else max(0, cut - (window - 1))
        rows = {}
        for layer in group.layers:
            numbers = torch.arange(first, cut).view(-1, 1, 1) + 1000 * layer
            key = numbers.expand(-1, group.num_kv_heads, group.head_dim).to(torch.float16)
            rows[layer] = (key.contiguous(), (key + 0.5).contiguous())
        found.append(Captured(group=group, first=first, rows=rows))
    return found


def written(storage, geometry, cuts, known=None):
    writer = CutWriter(storage, FINGERPRINT)
    known = known or Known()
    ids = packed_ids(range(1000))
    done = 0
    for cut in cuts:
        known.made(cut, NUMERICS)
        found = writer.write(cut, ids, captured(geometry, done, cut), known)
        done = cut
    return found


@pytest.mark.parametrize("local", [0, 128, 256, 600])
def test_rows_come_back_from_where_the_engine_ends(local):
    geometry = small(window=100, num_sliding=2)
    storage = MemoryStorage()
    cut = written(storage, geometry, [256, 640, 700])
    groups = {group.id: group for group in geometry.groups}
    for found in read_rows(storage, cut, groups, local, "test").values():
        window = found.group.sliding_window
        assert found.first == max(local, 0 if window is None else 700 - 99)
        for layer, (key, value) in found.rows.items():
            expected = torch.arange(found.first, 700) + 1000 * layer
            assert torch.equal(key[:, 0, 0], expected.to(torch.float16))
            assert value.shape == key.shape


def test_a_second_engine_writes_nothing_that_is_there():
    geometry = small(window=100)
    storage = MemoryStorage()
    written(storage, geometry, [256, 700])
    before = storage.list()
    assert written(storage, geometry, [256, 700]) is None
    assert storage.list() == before


def test_a_damaged_blob_is_refused_before_anything_is_visible():
    geometry = small(window=100)
    storage = MemoryStorage()
    cut = written(storage, geometry, [300])
    blob = next(name for name in storage.list("blobs"))
    data = bytearray(storage.read(blob, limit=1 << 20))
    data[-1] ^= 1
    storage.replace(blob, data)
    groups = {group.id: group for group in geometry.groups}
    with pytest.raises(PackError):
        read_rows(storage, cut, groups, 0, "test")


def test_rows_that_are_not_at_hand_are_no_cut():
    geometry = small(window=100)
    storage = MemoryStorage()
    writer = CutWriter(storage, FINGERPRINT)
    known = Known()
    known.made(700, NUMERICS)
    with pytest.raises(PackError):
        writer.write(700, packed_ids(range(700)), captured(geometry, 256, 700), known)
    assert not storage.list("cuts")


def test_who_made_the_rows_is_kept():
    known = Known()
    known.made(128, {"a": 1, "chunk": 1})
    known.made(300, NUMERICS)
    known.made(700, NUMERICS)
    assert known.numerics_until(500) == ((128, {"a": 1, "chunk": 1}), (500, NUMERICS))


def test_the_fingerprint_is_that_of_the_transformers_side(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_folders.sliding(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = weights_identity(str(folder), given=None, revision=None)
    _, fingerprint = fingerprint_of(
        AutoConfig.from_pretrained(folder), dtype="bfloat16", weights=weights
    )
    assert fingerprint.parts == of_model(model).parts


def test_options_that_are_unknown_or_missing_are_refused():
    assert ConnectorOptions.of({"root": "x", "every": 512}).every == 512
    for extra in ({}, {"root": ""}, {"root": "x", "ever": 1}, {"root": "x", "every": -1}):
        with pytest.raises(ArgumentError):
            ConnectorOptions.of(extra)
    with pytest.raises(ArgumentError):
        weights_identity("some/name", given=None, revision=None)


def test_without_vllm_the_class_says_what_to_install():
    import kvplane.integrations.vllm as package

    with pytest.raises(ImportError, match="pip install vllm"):
        _ = package.KVPlaneConnector
