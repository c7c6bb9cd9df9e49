import dataclasses
import json
import re
import shutil

import pytest
import torch

from kvplane.pack import (
    read_session,
)
from kvplane.pack.blob import blob_name, row_blob, state_blob
from kvplane.pack.encoding import digest, sealed
from kvplane.pack.match import sealed_name
from kvplane.pack.verify import verify
from kvplane.storage import open_storage
from saved_roots import (
    broken,
    cut_at,
    grow,
    make_root,
    new_store,
    unusable,
)

FULL, SLIDING = "f0.2x4x4.f16", "s32.2x4x4.f16"
TOKENS = list(range(300))


@pytest.fixture(scope="module")
def sound_root(tmp_path_factory):
    """A root that nobody changes: sessions of 300, 300 and 10 tokens, cuts at 128, 200 and 256."""
    root = tmp_path_factory.mktemp("sound") / "root"
    make_root(root, lengths=(300, 300, 10), cuts=(128, 200, 256))
    return root


@pytest.fixture
def root(sound_root, tmp_path):
    """A copy to damage."""
    return shutil.copytree(sound_root, tmp_path / "root")


def with_blob(state, group, number, blob):
    """A state whose n-th span of a group is in another blob."""
    spans = list(state.groups[group].spans)
    spans[number] = spans[number]._replace(blob=blob)
    rows = dataclasses.replace(state.groups[group], spans=tuple(spans))
    return dataclasses.replace(state, groups={**state.groups, group: rows})


def plain_blob(group, *names):
    """A blob of one row that says it is of `group`, with tensors of these names."""
    metadata = {"codec": "raw", "count": 1, "first": 0, "format": 1, "group": group}
    header = {"__metadata__": {"kvplane": json.dumps(metadata, separators=(",", ":"))}}
    for number, name in enumerate(names):
        offsets = [number * 16, number * 16 + 16]
        header[name] = {"dtype": "F16", "shape": [1, 2, 4], "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(16 * len(names))


def put_blob(storage, data):
    name = digest(data).hex()
    storage.put(blob_name(name), data)
    return name


def test_a_blob_that_is_whole_but_not_what_a_session_says_makes_it_unusable(root):
    storage = open_storage(root)
    saved = read_session(storage, "a")
    session = grow(new_store().open(tokens=[]), TOKENS)
    group = next(group for group in session.groups if group.id == FULL)
    later = row_blob(group, 260, {layer: session.spans(layer, 260, 300) for layer in group.layers})
    other = dataclasses.replace(group, layers=(0, 2))
    layers = row_blob(other, 256, {layer: session.spans(1, 256, 300) for layer in (0, 2)})
    for blob, what in (
        (saved.state.groups[FULL].spans[0].blob, r"holds \[0, 128\)"),
        (saved.state.groups[SLIDING].spans[-1].blob, "holds s32.2x4x4.f16"),
        (put_blob(storage, later), r"holds \[260, 300\)"),
        (put_blob(storage, layers), r"holds f0.2x4x4.f16 of layers \[0, 2\]"),
    ):
        state = with_blob(saved.state, FULL, -1, blob)
        changed = dataclasses.replace(saved, state=state)
        storage.replace("sessions/a.json", changed.encoded())
        report = verify(storage)
        entry = next(entry for entry in report.entries if entry.name == "a")

        assert not report.problems
        assert {"a"} == unusable(report)
        assert any(re.search(what, why) for why in entry.why_not)


def test_a_cut_whose_blob_holds_another_groups_rows_is_unusable(root):
    storage = open_storage(root)
    cut = cut_at(root, 256).content
    # of every position that the span asks for, so that only the group is wrong
    span = cut.state.groups[FULL].spans[-1]
    session = grow(new_store().open(tokens=[]), TOKENS[:256])
    other = next(group for group in session.groups if group.sliding_window == 64)
    rows = {layer: session.spans(layer, span.first, span.stop) for layer in other.layers}
    blob = put_blob(storage, row_blob(other, span.first, rows))
    forged = dataclasses.replace(cut, state=with_blob(cut.state, FULL, -1, blob))
    data = forged.encoded()
    file = sealed_name(forged, "-", data)
    storage.put(file, data)
    report = verify(storage)

    assert not report.problems
    assert {file} == unusable(report)


def test_blobs_that_are_whole_and_hold_no_groups_rows_are_named(root):
    storage = open_storage(root)
    group = next(group for group in new_store().geometry.groups if group.id == FULL)
    rows = [(torch.zeros(1, 2, 4).half(), torch.zeros(1, 2, 4).half())]
    forged = (
        row_blob(dataclasses.replace(group, layers=(5000,)), 0, {5000: rows}),
        row_blob(group, 0, {1: rows, 4: rows}).replace(b".f16", b".f32"),
        plain_blob(FULL, "lm_head.weight"),
        plain_blob("x0.2x4x4.f16", "layers.1.key"),
        plain_blob(FULL),
        state_blob(-1, {"layers.0.conv": torch.zeros(1)}),
        state_blob("0", {"layers.0.conv": torch.zeros(1)}),
        state_blob(0, {"layers.0.conv": torch.zeros(1)}).replace(b"layers.0", b"lm_heads"),
    )
    names = {blob_name(put_blob(storage, data)) for data in forged}
    report = verify(storage)

    assert names == broken(report)
    assert set() == unusable(report)


def test_nodes_that_are_none_of_their_name_are_named_and_harm_nothing(root):
    storage = open_storage(root)
    (file,) = storage.list("nodes")
    node = json.loads(storage.read(file, limit=16 << 10))
    forged = (
        {**node, "chain": "0" * 64},
        {**node, "fingerprint": "0" * 64},
        {**node, "extra": 1},
        {**node, "parent": "x"},
        {name: value for name, value in node.items() if name != "tokens"},
    )
    for fields in forged:
        storage.replace(file, sealed("node", fields))
        report = verify(storage)

        assert {file} == broken(report)
        assert set() == unusable(report)


def test_states_of_another_position_are_not_those_a_session_needs(root):
    storage = open_storage(root)
    group = next(group for group in new_store().geometry.groups if group.id == FULL)
    rows = [(torch.zeros(1, 2, 4).half(), torch.zeros(1, 2, 4).half())]
    saved = read_session(storage, "a")
    for states, why in (
        (put_blob(storage, state_blob(300, {"layers.0.conv": torch.ones(3)})), None),
        (put_blob(storage, state_blob(299, {"layers.0.conv": torch.ones(3)})), "position 300"),
        (put_blob(storage, row_blob(group, 300, {1: rows, 4: rows})), "position 300"),
        ("0" * 64, "is missing"),
    ):
        state = dataclasses.replace(saved.state, states=states)
        storage.replace("sessions/a.json", dataclasses.replace(saved, state=state).encoded())
        entry = next(entry for entry in verify(storage).entries if entry.name == "a")

        assert entry.usable == (why is None)
        assert all(why in text for text in entry.why_not)
