"""What makes rows another model's rows: each part alone, and what must make no difference."""

import dataclasses

import pytest
import torch
from transformers import Gemma3TextConfig, MuseGlimmerTextConfig

from kvplane import LayerGeometry, ModelGeometry, Rotary
from kvplane.errors import ArgumentError, PackMismatch
from kvplane.pack import Fingerprint, weights_of
from kvplane.pack.encoding import canonical
from kvplane.pack.fingerprint import config_part, parts_problem
from kvplane.pack.values import exact, is_exact

ROTARY = Rotary(base=1e6, dim=4, scaling=(("factor", 8.0), ("rope_type", "linear")))
LAYER = LayerGeometry(
    kind="sliding_attention",
    sliding_window=8,
    num_kv_heads=2,
    head_dim=4,
    value_head_dim=4,
    rotary=ROTARY,
)
GEOMETRY = ModelGeometry(layers=(LAYER,), dtype="float16")
MINE = Fingerprint.of(GEOMETRY, weights="w")


def changed(**facts):
    return ModelGeometry(layers=(dataclasses.replace(LAYER, **facts),), dtype="float16")


def rotary(**facts):
    return changed(rotary=dataclasses.replace(ROTARY, **facts))


OTHERS = {
    "groups.s9.2x4x4.f16": (changed(sliding_window=9), {}),
    "groups.s8.4x2x2.f16": (changed(num_kv_heads=4, head_dim=2, value_head_dim=2), {}),
    "groups.s8.2x4x2.f16": (changed(value_head_dim=2), {}),
    "groups.s8.2x4x4.bf16": (dataclasses.replace(GEOMETRY, dtype="bfloat16"), {}),
    "groups.f0.2x4x4.f16": (changed(kind="full_attention", sliding_window=None), {}),
    "groups.s8.2x4x4.f16": (ModelGeometry(layers=(LAYER, LAYER), dtype="float16"), {}),
    "rotary.0.base": (rotary(base=1e4), {}),
    "rotary.0.dim": (rotary(dim=2), {}),
    "rotary.0.convention": (rotary(convention="interleaved"), {}),
    "rotary.0.scaling": (rotary(scaling=None), {}),
    "rotary.0.scaling.factor": (rotary(scaling=(("factor", 4.0), ("rope_type", "linear"))), {}),
    "rotary.0": (changed(rotary=None), {}),
    "weights": (GEOMETRY, {"weights": "other"}),
    "adapters": (GEOMETRY, {"adapters": ["lora"]}),
    "quantisation": (GEOMETRY, {"quantisation": "int8"}),
    "keys_rotated": (GEOMETRY, {"keys_rotated": False}),
    "config.hidden_size": (GEOMETRY, {"config": {"hidden_size": 7}}),
}


@pytest.mark.parametrize("field", OTHERS)
def test_b36_every_part_that_rows_depend_on_is_told_apart_and_named(field):
    geometry, facts = OTHERS[field]
    other = Fingerprint.of(geometry, **{"weights": "w", **facts})

    with pytest.raises(PackMismatch) as refused:
        MINE.check(other.parts)

    assert MINE.hex != other.hex
    # the first difference: of two groups with one layer, the one that is only there comes by name
    fields = {f"fingerprint.{field}", "fingerprint.groups.s8.2x4x4.f16"}
    assert refused.value.field in fields


def test_b64_heads_and_dims_of_equal_size_are_other_rows():
    two, four = changed(head_dim=4), changed(num_kv_heads=4, head_dim=2, value_head_dim=2)

    assert (
        Fingerprint.of(two, weights="w").hex
        != Fingerprint.of(four, weights="w").hex
        != Fingerprint.of(dataclasses.replace(two, dtype="bfloat16"), weights="w").hex
    )


def test_the_golden_fingerprint_of_a_model_by_hand():
    text = (
        b'{"adapters":[],"config":{},"groups":{"s8.2x4x4.f16":[0]},"keys_rotated":true,'
        b'"quantisation":null,"rotary":{"0":{"base":"0x1.e848000000000p+19","convention":"half",'
        b'"dim":4,"scaling":{"factor":"0x1.0000000000000p+3","rope_type":"linear"}}},"weights":"w"}'
    )

    assert text == canonical(MINE.parts)
    assert "4d65dd1eb9a53101f111ee2f0ee271723f495de6e883571db2b7549a7095efa9" == MINE.hex


def test_the_order_of_what_it_is_told_makes_no_difference():
    parts = dict(reversed(MINE.parts.items()))

    assert MINE.hex == Fingerprint(parts).hex
    MINE.check(parts)


@pytest.mark.parametrize(
    "facts",
    [
        {"_name_or_path": "/home/x"},
        {"architectures": ["X"]},
        {"dtype": "float16"},
        {"use_cache": False},
        {"eos_token_id": 7, "pad_token_id": 3},
        {"output_attentions": True},
        {"attn_implementation": "eager"},
        {"id2label": {0: "a"}},
        {"attention_dropout": 0.5},
    ],
    ids=str,
)
def test_what_rows_do_not_depend_on_makes_no_difference(facts):
    plain = MuseGlimmerTextConfig(num_hidden_layers=4)
    told = MuseGlimmerTextConfig(num_hidden_layers=4, **facts)

    assert config_part(plain) == config_part(told)


@pytest.mark.parametrize("facts", [{"hidden_size": 64}, {"rms_norm_eps": 1e-3}, {"vocab_size": 99}])
def test_what_rows_depend_on_makes_one(facts):
    assert config_part(Gemma3TextConfig()) != config_part(Gemma3TextConfig(**facts))


def test_a_whole_number_in_a_field_of_fractions_is_a_fraction():
    assert exact({"rope_theta": 10000}) == exact({"rope_theta": 10000.0})
    assert {"rope_theta": "0x1.3880000000000p+13"} == exact({"rope_theta": 10000})
    assert {"n": 3} == exact({"n": 3})


def test_the_text_part_of_a_composite_is_what_counts():
    from transformers import MuseGlimmerConfig

    text = {"num_hidden_layers": 4, "hidden_size": 64}

    assert config_part(MuseGlimmerConfig(text_config=text)) == config_part(
        MuseGlimmerTextConfig(**text)
    )


@pytest.mark.parametrize(
    "value", [..., float("nan"), 1 << 53, "\ud800", {"a": {1, 2}}, torch.zeros(1)], ids=str
)
def test_a_value_without_one_form_is_refused(value):
    with pytest.raises(ArgumentError):
        exact(value)


def test_dtypes_bools_nulls_and_lists_have_one_form():
    assert [None, True, "torch.float16", ["0x1.8000000000000p+0"]] == exact(
        (None, True, torch.float16, (1.5,))
    )


def test_parts_made_by_hand_are_checked():
    good = dict(MINE.parts)
    bad = {
        "adapters": ["x", None, [1]],
        "config": [[], {"a": 1.5}],
        "groups": [{}, {"x": [0]}, {"s8.2x4x4.f16": []}, {"s8.2x4x4.f16": [1, 0]}, None],
        "keys_rotated": [1, None],
        "quantisation": [1],
        "rotary": [{}, {"0": 1}, {"0": {}}, {"1": None}],
        "weights": ["", None, "\ud800"],
    }
    for field, values in bad.items():
        for value in values:
            with pytest.raises(ArgumentError):
                Fingerprint({**good, field: value})
    with pytest.raises(ArgumentError):
        Fingerprint({name: value for name, value in good.items() if name != "weights"})
    assert "other fields" in parts_problem([])
    assert is_exact(good)


def test_weights_need_a_name():
    with pytest.raises(ArgumentError, match="identifies"):
        Fingerprint.of(GEOMETRY, weights="")


def test_the_identity_of_weight_files_is_their_names_and_bytes_alone(tmp_path):
    def folder(name, **files):
        made = tmp_path / name
        made.mkdir()
        for file, data in files.items():
            (made / file.replace("_", ".")).write_bytes(data)
        return weights_of(made)

    one = folder("one", a_safetensors=b"1", b_bin=b"2", config_json=b"{}")

    assert one.startswith("files:")
    assert one == folder("same", b_bin=b"2", a_safetensors=b"1", readme_md=b"x")
    assert one != folder("other bytes", a_safetensors=b"1", b_bin=b"3")
    assert one != folder("other names", a_safetensors=b"1", c_bin=b"2")
    assert one != folder("bytes moved", a_safetensors=b"12", b_bin=b"")
    for bad in (tmp_path / "nowhere", tmp_path / "one" / "a.safetensors"):
        with pytest.raises(ArgumentError, match="folder"):
            weights_of(bad)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match="weight files"):
        weights_of(tmp_path / "empty")
