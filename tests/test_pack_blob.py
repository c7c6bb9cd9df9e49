"""Blobs, and every way in which one can lie: named after the lie, on literal bytes."""

import json

import pytest
import torch
from safetensors import safe_open

from kvplane.errors import PackCorrupt, PackError, PackTooLarge, PackVersion
from kvplane.geometry import LayerGroup
from kvplane.pack.blob import check_digest, check_rows, header_of, row_blob, tensors_of
from kvplane.pack.encoding import canonical, digest
from kvplane.pack.limits import HEADER_NBYTES

GROUP = LayerGroup(
    layers=(1, 4),
    kind="sliding_attention",
    sliding_window=8,
    num_kv_heads=2,
    head_dim=3,
    value_head_dim=2,
    dtype="bfloat16",
)


def some_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: [
            (
                torch.randn(count, 2, 3, generator=generator).bfloat16(),
                torch.randn(count, 2, 2, generator=generator).bfloat16(),
            )
        ]
        for layer in GROUP.layers
    }


def a_blob(count=5, first=10):
    return row_blob(GROUP, first, some_rows(count))


def with_header(change, *, data=None, pad=True):
    """A blob whose header went through `change`, written in canonical form again."""
    blob = a_blob() if data is None else data
    length = int.from_bytes(blob[:8], "little")
    fields = json.loads(blob[8 : 8 + length])
    fields = change(fields) or fields
    text = json.dumps(fields, separators=(",", ":")).encode()
    if pad:
        text += b" " * (-len(text) % 8)
    return bytearray(len(text).to_bytes(8, "little") + text + blob[8 + length :])


def read(blob):
    return check_rows(header_of(blob, "x"), GROUP, "x")


def test_the_safetensors_library_reads_what_we_write(tmp_path):
    rows = some_rows(5)
    file = tmp_path / "blob.safetensors"
    file.write_bytes(row_blob(GROUP, 10, rows))

    with safe_open(file, framework="pt") as opened:
        assert ["layers.1.key", "layers.1.value", "layers.4.key", "layers.4.value"] == sorted(
            opened.keys()
        )
        assert torch.equal(rows[4][0][1], opened.get_tensor("layers.4.value"))
        said = json.loads(opened.metadata()["kvplane"])
    assert {"codec": "raw", "count": 5, "first": 10, "format": 1, "group": GROUP.id} == said


def test_rows_come_back_bit_for_bit_nan_payloads_included():
    rows = some_rows(3)
    rows[1][0][0].view(torch.int16).copy_(torch.arange(-9, 9).view(3, 2, 3).short() * 4000)
    blob = row_blob(GROUP, 10, rows)
    back = dict(tensors_of(header_of(blob, "x"), blob))

    assert torch.equal(rows[1][0][0].view(torch.int16), back["layers.1.key"].view(torch.int16))
    assert range(10, 13) == read(blob)


def test_spans_are_joined_in_order_and_give_the_same_bytes():
    rows = some_rows(5)
    halves = {
        layer: [(key[:2], value[:2]), (key[2:], value[2:])]
        for layer, ((key, value),) in rows.items()
    }

    assert row_blob(GROUP, 10, rows) == row_blob(GROUP, 10, halves)


def test_a_header_that_claims_2_to_the_63_bytes_takes_no_memory():
    blob = a_blob()
    blob[:8] = (2**63).to_bytes(8, "little")

    with pytest.raises(PackTooLarge) as refused:
        header_of(blob, "x")

    assert (HEADER_NBYTES, 2**63) == (refused.value.limit, refused.value.got)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_a_file_that_ends_inside_its_header_is_refused(size):
    with pytest.raises(PackCorrupt):
        header_of(a_blob()[:size], "x")


def test_missing_and_surplus_data_are_refused():
    with pytest.raises(PackCorrupt, match="bytes"):
        header_of(a_blob()[:-1], "x")
    with pytest.raises(PackCorrupt, match="bytes"):
        header_of(a_blob() + b"\0", "x")


def renamed(fields):
    return {("layers.1.k" if name == "layers.1.key" else name): v for name, v in fields.items()}


def reordered(fields):
    first = {"__metadata__": fields.pop("__metadata__")}
    return {**first, **dict(reversed(fields.items()))}


def metadata_last(fields):
    own = fields.pop("__metadata__")
    return {**fields, "__metadata__": own}


def told(**changed):
    def change(fields):
        said = json.loads(fields["__metadata__"]["kvplane"])
        fields["__metadata__"]["kvplane"] = canonical({**said, **changed}).decode()

    return change


def tensor(**changed):
    def change(fields):
        fields["layers.1.key"].update(changed)

    return change


LIES = {
    "a tensor renamed": renamed,
    "tensors in another order": reordered,
    "metadata last": metadata_last,
    "a tensor missing": lambda fields: fields.pop("layers.4.value") and None,
    "a tensor too many": lambda fields: fields.update(extra=dict(fields["layers.4.value"])),
    "two metadata entries": lambda fields: fields["__metadata__"].update(more="x"),
    "no metadata entry": lambda fields: fields["__metadata__"].pop("kvplane") and None,
    "metadata a string": lambda fields: fields.update(__metadata__="x"),
    "metadata a number": lambda fields: fields.update(__metadata__={"kvplane": 1}),
    "dtype f16": tensor(dtype="F16"),
    "dtype f32": tensor(dtype="F32"),
    "dtype unknown": tensor(dtype="X"),
    "dtype null": tensor(dtype=None),
    "shape transposed": tensor(shape=[5, 3, 2]),
    "shape of four axes": tensor(shape=[5, 2, 3, 1]),
    "shape negative": tensor(shape=[-5, -2, 3]),
    "shape huge and empty": tensor(shape=[2**60, 2**60, 0]),
    "shape a string": tensor(shape="5"),
    "offsets too long": tensor(data_offsets=[0, 61]),
    "offsets with a gap": tensor(data_offsets=[1, 61]),
    "offsets backwards": tensor(data_offsets=[60, 0]),
    "offsets of one number": tensor(data_offsets=[0]),
    "offsets null": tensor(data_offsets=None),
    "overlapping tensors": lambda f: f["layers.1.value"].update(data_offsets=[0, 40]),
    "a field too many": lambda fields: fields["layers.1.key"].update(more=1),
    "another codec": told(codec="zip"),
    "fewer rows": told(count=4),
    "no rows": told(count=0),
    "negative rows": told(count=-1),
    "rows a string": told(count="5"),
    "rows a bool": told(count=True),
    "negative position": told(first=-1),
    "rows across a block's edge": told(first=254),
    "position null": told(first=None),
    "another group": told(group="f0.2x3x2.bf16"),
    "an unknown field": told(unknown=1),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused_by_name_of_the_lie(change):
    blob = with_header(change)

    with pytest.raises(PackCorrupt):
        read(blob)


def test_another_format_in_the_metadata_is_another_version():
    with pytest.raises(PackVersion):
        read(with_header(told(format=2)))


def test_a_header_that_is_not_canonical_json_is_refused():
    blob = a_blob()
    length = int.from_bytes(blob[:8], "little")
    text = bytes(blob[8 : 8 + length]).rstrip().replace(b":[", b": [", 1)
    text += b" " * (-len(text) % 8)

    with pytest.raises(PackCorrupt, match="canonical"):
        header_of(bytearray(len(text).to_bytes(8, "little") + text + blob[8 + length :]), "x")


@pytest.mark.parametrize("text", [b"", b"[]      ", b"{}      ", b'{"a":1} ', b"\xff" * 8])
def test_a_header_that_is_no_object_of_tensors_is_refused(text):
    with pytest.raises(PackError):
        header_of(bytearray(len(text).to_bytes(8, "little") + text), "x")


def test_a_digest_is_checked_over_every_byte():
    blob = a_blob()
    name = digest(blob).hex()
    check_digest(blob, name, "x")
    blob[-1] ^= 1

    with pytest.raises(PackCorrupt, match="digest"):
        check_digest(blob, name, "x")
