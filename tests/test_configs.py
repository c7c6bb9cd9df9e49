import json
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from kvplane.configs.layers import MAX_CONFIG_NBYTES, REFUSED, ROWLESS
from kvplane.errors import GeometryError
from kvplane.geometry import FULL, SLIDING, ModelGeometry, Rotary

S, F = SLIDING, FULL

# a model that transformers does not know, so that its dict is read as it stands
PLAIN = {
    "model_type": "a_model_of_tomorrow",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": [S, S, S, F],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
MISSING = object()


def changed(**facts):
    both = PLAIN | facts
    return {name: value for name, value in both.items() if value is not MISSING}


def read(**facts):
    return ModelGeometry.from_config(changed(**facts))


def kinds(geometry):
    return [layer.kind for layer in geometry.layers]


def nope(geometry):
    return [layer.rotary is None for layer in geometry.layers]


def refusal(**facts):
    with pytest.raises(GeometryError) as refused:
        read(**facts)
    return refused.value


def known(model_type, **facts):
    """A dict that transformers completes."""
    return ModelGeometry.from_config({"model_type": model_type, **facts})


# forms


def test_a_dict_of_an_unknown_model_is_read_as_it_stands():
    expected = ModelGeometry.uniform([S, S, S, F], sliding_window=8, num_kv_heads=2, head_dim=16)

    assert expected.groups == read().groups
    assert Rotary(base=10_000.0, dim=16) == read().layers[0].rotary


def test_an_object_is_read_like_its_dict():
    assert read() == ModelGeometry.from_config(SimpleNamespace(**PLAIN))


@pytest.mark.parametrize("part", ["text_config", "language_config", "llm_config"])
def test_the_decoder_of_a_composite_is_found(part):
    vision = {"num_hidden_layers": 2, "head_dim": 8}

    assert read() == ModelGeometry.from_config({part: PLAIN, "vision_config": vision})
    assert read() == ModelGeometry.from_config(SimpleNamespace(**{part: PLAIN}))


def test_a_composite_of_transformers_is_asked_for_its_decoder():
    whole = CONFIG_MAPPING["gemma3"]()

    assert ModelGeometry.from_config(whole.text_config) == ModelGeometry.from_config(whole)


def test_a_known_models_dict_gets_its_class_defaults():
    # what the released gemma-3-4b-it says of its text part: neither layer types nor heads
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "num_attention_heads": 8,
    }

    for config in (text, {"model_type": "gemma3", "text_config": text}):
        assert ModelGeometry.preset("gemma-3-4b") == ModelGeometry.from_config(config)


def test_reading_a_dict_changes_nothing_in_it():
    text = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    before = json.dumps(text)
    ModelGeometry.from_config(text)

    assert before == json.dumps(text)


def test_without_transformers_a_known_models_dict_is_read_as_it_stands(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)

    assert read() == known(**changed(model_type="gpt_oss"))


@pytest.mark.parametrize(
    ("preset", "config"),
    [
        (
            "gemma-3-270m",
            {
                "model_type": "gemma3_text",
                "num_hidden_layers": 18,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "sliding_window": 512,
            },
        ),
        (
            "gemma-3-1b",
            {
                "model_type": "gemma3_text",
                "num_hidden_layers": 26,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "sliding_window": 512,
                "sliding_window_pattern": 6,
                "rope_theta": 1_000_000,
                "rope_local_base_freq": 10_000,
            },
        ),
        (
            "gemma-3-12b",
            {
                "model_type": "gemma3_text",
                "num_hidden_layers": 48,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        ),
        (
            "gemma-3-27b",
            {
                "model_type": "gemma3_text",
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "hidden_size": 5376,
                "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        ),
        ("gpt-oss-20b", {"model_type": "gpt_oss", "num_hidden_layers": 24}),
        ("gpt-oss-120b", {"model_type": "gpt_oss", "num_hidden_layers": 36}),
        (
            "command-r7b",
            {
                "model_type": "cohere2",
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "rope_theta": 50_000,
            },
        ),
        (
            "olmo-3-7b",
            {
                "model_type": "olmo3",
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "max_position_embeddings": 65_536,
                "rope_theta": 500_000,
                "rope_scaling": {
                    "attention_factor": 1.2079441541679836,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "rope_type": "yarn",
                },
            },
        ),
        (
            "exaone-4-32b",
            {
                "model_type": "exaone4",
                "hidden_size": 5120,
                "head_dim": 128,
                "num_hidden_layers": 64,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
                "rope_theta": 1_000_000.0,
                "sliding_window": 4096,
                "sliding_window_pattern": "LLLG",
                "layer_types": [S, S, S, F] * 16,
                "rope_scaling": {
                    "factor": 16.0,
                    "high_freq_factor": 4.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                    "rope_type": "llama3",
                },
            },
        ),
    ],
)
def test_a_preset_is_what_transformers_makes_of_the_models_configuration(preset, config):
    assert ModelGeometry.preset(preset) == ModelGeometry.from_config(config)


def test_muse_glimmers_preset_has_the_rows_of_its_class_but_the_chapters_rotation():
    preset = ModelGeometry.preset("muse-glimmer-30b")
    config = ModelGeometry.from_config(CONFIG_MAPPING["muse_glimmer"](), dtype="float16")

    assert preset.groups == config.groups
    assert [layer.rotary is None for layer in preset.layers] == [
        layer.rotary is None for layer in config.layers
    ]
    assert Rotary(base=10_000.0, dim=128) == config.layers[0].rotary


# paths


def test_a_file_and_its_folder_are_read_alike(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))

    assert read() == ModelGeometry.from_config(tmp_path)
    assert read() == ModelGeometry.from_config(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000], ids=repr
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(GeometryError) as refused:
        ModelGeometry.from_config(path)

    assert ("config", str(path)) == (refused.value.field, refused.value.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(GeometryError, match="cannot be read"):
        ModelGeometry.from_config(tmp_path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_CONFIG_NBYTES + 1)
    with pytest.raises(GeometryError, match=f"is larger than {MAX_CONFIG_NBYTES} bytes"):
        ModelGeometry.from_config(path)


def test_a_file_of_the_largest_size_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN).ljust(MAX_CONFIG_NBYTES))

    assert read() == ModelGeometry.from_config(path)


# dtype


@pytest.mark.parametrize(
    ("facts", "dtype"),
    [
        ({}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16"),
        ({"dtype": "torch.float16"}, "float16"),
    ],
)
def test_rows_take_the_models_dtype_when_none_is_given(facts, dtype):
    assert dtype == ModelGeometry.from_config(changed(**facts), dtype=None).dtype


def test_rows_are_bfloat16_unless_said():
    config = changed(dtype="float16")

    assert "bfloat16" == ModelGeometry.from_config(config).dtype
    assert "float32" == ModelGeometry.from_config(config, dtype="float32").dtype


# kinds


def test_a_legacy_name_of_full_attention_is_understood():
    assert [S, F, F, F] == kinds(read(layer_types=[S, "attention", F, "attention"]))


@pytest.mark.parametrize("name", ROWLESS)
def test_a_layer_without_rows_keeps_its_name(name):
    geometry = read(layer_types=[S, name, name, F])

    assert [S, name, name, F] == kinds(geometry)
    assert [(0,), (3,)] == [group.layers for group in geometry.groups]


@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_that_is_not_supported_is_refused_by_name_and_reason(name):
    refused = refusal(layer_types=[S, S, name, F])

    assert ("layer_types[2]", name) == (refused.field, refused.value)
    assert f"is not supported: {REFUSED[name]}" == refused.reason


@pytest.mark.parametrize("name", ["slidng_attention", "", None, 3])
def test_a_kind_that_is_not_known_is_refused(name):
    refused = refusal(layer_types=[name, S, S, F])

    assert ("layer_types[0]", name) == (refused.field, refused.value)
    assert "is no kind of layer known here" == refused.reason


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_as_many_kinds_as_layers(count):
    refused = refusal(layer_types=[F] * count)

    assert ("layer_types", [F] * count) == (refused.field, refused.value)
    assert f"has {count} entries, num_hidden_layers is 4" == refused.reason


@pytest.mark.parametrize("kinds", ["full_attention", {"0": F}, 4])
def test_kinds_are_a_list(kinds):
    assert ("layer_types", "must be a list") == (
        refusal(layer_types=kinds).field,
        refusal(layer_types=kinds).reason,
    )


def test_a_known_models_lists_are_checked_before_transformers_sees_them():
    with pytest.raises(GeometryError) as refused:
        known("gpt_oss", num_hidden_layers=4, layer_types=[S, F])

    assert "layer_types" == refused.value.field
    with pytest.raises(GeometryError) as refused:
        known("gpt_oss", num_hidden_layers=2, layer_types=[S, "chunked_attention"])

    assert "layer_types[1]" == refused.value.field


def test_what_transformers_itself_refuses_is_a_geometry_error():
    with pytest.raises(GeometryError) as refused:
        known("gemma3_text", hidden_size="many")

    assert ("config", "gemma3_text") == (refused.value.field, refused.value.value)
    assert refused.value.reason.startswith("transformers refuses it: ")
    assert "\n" not in refused.value.reason


@pytest.mark.parametrize(
    "name",
    ["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules"],
)
def test_layers_that_predict_further_tokens_may_be_listed_after_the_models_own(name):
    with_more = [S, S, S, F, F, S]

    assert [S, S, S, F] == kinds(read(layer_types=with_more, **{name: 2}))
    assert [S, S, S, F] == kinds(read(**{name: 2}))
    for count in (1, 3, "2", None):
        assert "layer_types" == refusal(layer_types=with_more, **{name: count}).field


def test_a_model_of_transformers_with_such_layers_is_read():
    geometry = known(
        "step3p5",
        num_hidden_layers=3,
        num_nextn_predict_layers=2,
        layer_types=[F, S, S, F, F],
        sliding_window=512,
        num_attention_heads=64,
        num_attention_groups=8,
        mlp_layer_types=["dense"] * 3,
        rope_theta=[1e6, 1e4, 1e4, 1e6, 1e6],
    )

    assert [F, S, S] == kinds(geometry)
    assert [1e6, 1e4, 1e4] == [layer.rotary.base for layer in geometry.layers]


def test_a_model_without_kinds_is_full_or_all_sliding_by_its_window():
    assert [F] * 4 == kinds(read(layer_types=MISSING, sliding_window=None))
    assert [S] * 4 == kinds(read(layer_types=MISSING))
    assert [F] * 4 == kinds(read(layer_types=None, use_sliding_window=False))


def test_a_pattern_without_kinds_is_not_guessed():
    refused = refusal(layer_types=MISSING, sliding_window_pattern=6)

    assert "layer_types" == refused.field
    assert "must be given: the pattern's meaning depends on the model" == refused.reason


def test_chunks_without_kinds_are_refused_too():
    refused = refusal(layer_types=MISSING, sliding_window=None, attention_chunk_size=8192)

    assert ("layer_types[0]", "chunked_attention") == (refused.field, refused.value)


def test_llama_4_is_refused_for_its_chunks():
    with pytest.raises(GeometryError) as refused:
        ModelGeometry.from_config(CONFIG_MAPPING["llama4"]())

    assert "chunked_attention" == refused.value.value
    assert "is not supported: attention in chunks sees back to a chunk's start, not a window" == (
        refused.value.reason
    )


# numbers


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads"])
def test_a_number_that_is_missing_is_named(name):
    refused = refusal(**{name: MISSING})

    assert (name, None, "must be given") == (refused.field, refused.value, refused.reason)


def test_a_sliding_layer_needs_a_window():
    assert "sliding_window" == refusal(sliding_window=None).field


@pytest.mark.parametrize(
    "name",
    [
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "v_head_dim",
        "sliding_window",
    ],
)
@pytest.mark.parametrize("number", [0, -1, 2.0, True, "4"])
def test_an_impossible_number_is_refused_by_its_name(name, number):
    refused = refusal(**{name: number})

    assert (name, "must be a whole number of at least 1") == (refused.field, refused.reason)
    assert number is refused.value


def test_more_layers_than_any_model_has_are_refused_before_anything_is_made():
    for facts in ({"layer_types": MISSING}, {}):
        refused = refusal(num_hidden_layers=10**12, **facts)

        assert refused.field in ("num_hidden_layers", "layer_types")
    assert 1024 == len(read(num_hidden_layers=1024, layer_types=MISSING).layers)
    assert "num_hidden_layers" == refusal(num_hidden_layers=1025, layer_types=MISSING).field


def test_without_kv_heads_every_head_has_its_own():
    assert 4 == read(num_key_value_heads=None).groups[0].num_kv_heads


def test_kv_heads_divide_the_heads():
    refused = refusal(num_key_value_heads=3)

    assert ("num_key_value_heads", 3) == (refused.field, refused.value)
    assert "must divide num_attention_heads = 4" == refused.reason


def test_without_a_head_dim_it_is_the_hidden_sizes_share():
    assert 24 == read(head_dim=None, hidden_size=96).groups[0].head_dim
    assert 24 == read(head_dim=None, hidden_size=99).groups[0].head_dim
    assert "hidden_size" == refusal(head_dim=None).field


def test_values_may_have_another_dim_than_keys():
    (ring, plane) = read(v_head_dim=8).groups

    assert (16, 8) == (ring.head_dim, ring.value_head_dim)
    assert (16, 8) == (plane.head_dim, plane.value_head_dim)


def test_mimo_has_twice_the_kv_heads_in_its_sliding_layers():
    geometry = ModelGeometry.from_config(CONFIG_MAPPING["mimo_v2_flash"]())

    assert {"f0.4x192x128.bf16": 9, "s129.8x192x128.bf16": 39} == {
        group.id: len(group.layers) for group in geometry.groups
    }
    assert {(5e6, 64), (1e4, 64)} == {
        (layer.rotary.base, layer.rotary.dim) for layer in geometry.layers
    }


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"multi_query": True}, "multi_query"),
        ({"rotary_dim": 64, "rope_parameters": None}, "rotary_dim"),
    ],
)
def test_a_model_that_keeps_something_else_is_refused(facts, field):
    refused = refusal(**facts)

    assert (field, facts[field]) == (refused.field, refused.value)
    assert refused.reason.startswith(("latent attention", "give num_key", "rotary tables"))


@pytest.mark.parametrize(
    "facts", [{"kv_lora_rank": None}, {"kv_lora_rank": 0}, {"multi_query": False}]
)
def test_a_field_that_is_off_says_nothing(facts):
    assert read() == read(**facts)


def test_a_rotary_dim_beside_rotary_parameters_is_none_of_our_business():
    assert read() == read(rotary_dim=8)


# layers that differ


def test_layers_may_differ_in_any_field():
    geometry = read(
        per_layer_config={
            "1": {"sliding_window": 4},
            "02": {"num_key_value_heads": 1},
            3: {"head_dim": 32, "v_head_dim": 8, "rope_parameters": {"rope_theta": 5.0}},
        }
    )

    assert [
        "s8.2x16x16.bf16",
        "s4.2x16x16.bf16",
        "s8.1x16x16.bf16",
        "f0.2x32x8.bf16",
    ] == [group.id for group in geometry.groups]
    assert Rotary(base=5.0, dim=32) == geometry.layers[3].rotary


def test_kinds_without_a_list_are_each_layers_own():
    per_layer = {"3": {"use_sliding_window": False}}

    assert [S, S, S, F] == kinds(read(layer_types=MISSING, per_layer_config=per_layer))


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
def test_gemma_4_has_larger_heads_in_its_full_layers(model_type):
    config = CONFIG_MAPPING[model_type](num_global_key_value_heads=2, attention_k_eq_v=True)
    ring, plane = ModelGeometry.from_config(config).groups

    assert (4, 256) == (ring.num_kv_heads, ring.head_dim)
    assert (2, 512) == (plane.num_kv_heads, plane.head_dim)


def test_neomme_has_several_windows():
    pytest.importorskip("transformers.models.neomme")
    geometry = ModelGeometry.from_config(CONFIG_MAPPING["neomme"]())

    assert {256, 1024, None} == {group.sliding_window for group in geometry.groups}


# shared rows


def test_the_last_layers_read_the_rows_of_the_last_of_their_kind_that_has_some():
    geometry = read(num_hidden_layers=7, layer_types=[S, F, S, F, S, F, S], num_kv_shared_layers=3)

    assert [None, None, None, None, 2, 3, 2] == [layer.shares_kv_with for layer in geometry.layers]


def test_gemma_3n_shares_its_last_15_layers():
    geometry = ModelGeometry.from_config(CONFIG_MAPPING["gemma3n"]())

    assert [18 if layer.kind == S else 19 for layer in geometry.layers[20:]] == [
        layer.shares_kv_with for layer in geometry.layers[20:]
    ]
    assert not any(layer.shares_kv_with for layer in geometry.layers[:20])


def test_a_model_says_which_layers_share_by_modes_too():
    modes = ["store", None, "store", "reuse"]
    geometry = read(layer_types=[S, F, S, S], kv_sharing_modes=modes)

    assert [None, None, None, 2] == [layer.shares_kv_with for layer in geometry.layers]


def test_layers_that_share_nobodys_rows_are_refused():
    refused = refusal(num_kv_shared_layers=1)

    assert "num_kv_shared_layers" == refused.field
    assert "layer 3 shares the keys of no earlier full_attention layer" == refused.reason
    assert "num_kv_shared_layers" == refusal(num_kv_shared_layers=4).field


@pytest.mark.parametrize("number", [-1, 5, 1.0, "1", True])
def test_an_impossible_number_of_shared_layers_is_refused(number):
    refused = refusal(num_kv_shared_layers=number)

    assert ("num_kv_shared_layers", "must be within [0, 4]") == (refused.field, refused.reason)


def test_a_list_of_modes_of_another_length_is_refused():
    assert "kv_sharing_modes" == refusal(kv_sharing_modes=[None]).field


# rotation


def rotaries(**facts):
    return [layer.rotary for layer in read(**facts).layers]


def test_a_theta_of_0_leaves_a_layer_unrotated():
    plain = Rotary(base=10_000.0, dim=16)

    assert [plain, plain, plain, None] == rotaries(layer_rope_theta=[1e4, 1e4, 1e4, 0])
    assert [None, plain, plain, plain] == rotaries(layer_rope_theta=[0.0, 1, 1, 1])


@pytest.mark.parametrize("model_type", ["granite_swa", "granitemoe_swa"])
def test_granite_takes_its_thetas_from_the_list(model_type):
    thetas = [1e4, 2e4, 3e4, 0]
    found = rotaries(model_type=model_type, layer_rope_theta=thetas, **GRANITE)

    assert [1e4, 2e4, 3e4] == [rotary.base for rotary in found[:3]]
    assert found[3] is None
    assert [10_000.0] * 4 == [rotary.base for rotary in rotaries(model_type=model_type, **GRANITE)]


GRANITE = {"hidden_size": 64, "num_experts_per_tok": 2, "num_local_experts": 4}


def test_the_list_of_unrotated_layers_has_zeros_for_them():
    plain = Rotary(base=10_000.0, dim=16)

    assert [plain, None, plain, None] == rotaries(no_rope_layers=[1, 0, 1, 0])
    assert [plain] * 4 == rotaries(no_rope_layers=[])


@pytest.mark.parametrize("name", ["layer_rope_theta", "no_rope_layers"])
@pytest.mark.parametrize("values", [[1, 1, 1], "1111", {"0": 1}])
def test_a_list_that_is_none_or_too_short_is_refused(name, values):
    refused = refusal(**{name: values})

    assert (name, values) == (refused.field, refused.value)


def test_a_longer_list_has_the_layers_that_predict_further_tokens():
    assert rotaries() == rotaries(layer_rope_theta=[1, 1, 1, 1, 0])


@pytest.mark.parametrize("parameters", [None, {}, {S: None, F: None}, {S: {}, F: {}}])
def test_a_model_without_rotary_parameters_rotates_nothing(parameters):
    assert [None] * 4 == rotaries(rope_parameters=parameters)


def test_kinds_of_layers_may_be_rotated_differently():
    local = {"rope_type": "default", "rope_theta": 10_000.0}
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}
    found = rotaries(rope_parameters={S: local, F: scaled})

    assert Rotary(base=10_000.0, dim=16) == found[0]
    assert (
        Rotary(base=1_000_000.0, dim=16, scaling=(("factor", 8.0), ("rope_type", "linear")))
        == found[3]
    )
    assert found[3] is not None
    assert rotaries(rope_parameters={S: local})[3] is None


def test_legacy_scaling_is_an_object():
    refused = refusal(rope_parameters=None, rope_theta=1e4, rope_scaling="linear")

    assert ("rope_scaling", "linear", "must be an object") == (
        refused.field,
        refused.value,
        refused.reason,
    )


def test_legacy_fields_say_the_same():
    scaling = {"type": "linear", "factor": 8.0}
    found = rotaries(
        rope_parameters=None,
        rope_theta=1_000_000,
        rope_local_base_freq=10_000,
        rope_scaling=scaling,
        partial_rotary_factor=0.5,
    )

    assert Rotary(base=10_000.0, dim=16) == found[0]
    assert (
        Rotary(base=1_000_000.0, dim=8, scaling=(("factor", 8.0), ("rope_type", "linear")))
        == found[3]
    )


def test_a_legacy_theta_alone_rotates_every_layer_alike():
    assert [Rotary(base=5.0, dim=16)] * 4 == rotaries(rope_parameters=None, rope_theta=5)


@pytest.mark.parametrize(("factor", "dim"), [(None, 16), (0.5, 8), (0.25, 4), (1, 16), (0.334, 6)])
def test_a_share_of_a_head_may_be_rotated(factor, dim):
    parameters = {"rope_theta": 10_000.0, "partial_rotary_factor": factor}

    assert Rotary(base=10_000.0, dim=dim) == rotaries(rope_parameters=parameters)[0]


def test_a_share_of_the_pairs_is_kept_as_scaling():
    parameters = {"rope_type": "proportional", "rope_theta": 5.0, "partial_rotary_factor": 0.25}
    scaling = (("partial_rotary_factor", 0.25), ("rope_type", "proportional"))

    assert Rotary(base=5.0, dim=16, scaling=scaling) == rotaries(rope_parameters=parameters)[0]


def test_everything_that_angles_depend_on_is_kept():
    parameters = {"rope_theta": 5.0, "mrope_section": [2, 3, 3], "factor": None}

    assert (("mrope_section", (2, 3, 3)),) == rotaries(rope_parameters=parameters)[0].scaling


@pytest.mark.parametrize("name", ["rope_theta", "partial_rotary_factor"])
@pytest.mark.parametrize("number", [0, -1.0, float("nan"), "10000", True, [1e4]])
def test_an_impossible_rotary_number_is_refused_by_its_name(name, number):
    refused = refusal(rope_parameters={"rope_theta": 10_000.0, name: number})

    assert (name, "must be a number above 0") == (refused.field, refused.reason)


def test_rotary_parameters_without_a_theta_are_refused():
    assert "rope_theta" == refusal(rope_parameters={"rope_type": "default"}).field


@pytest.mark.parametrize("parameters", ["default", [1e4], 1e4])
def test_rotary_parameters_are_an_object(parameters):
    refused = refusal(rope_parameters=parameters)

    assert ("rope_parameters", "must be an object") == (refused.field, refused.reason)
    nested = refusal(rope_parameters={S: parameters, F: parameters})

    assert ("rope_parameters", "must be an object") == (nested.field, nested.reason)


@pytest.mark.parametrize("model_type", ["exaone4", "exaone_moe", "kolibri1"])
def test_some_models_rotate_full_layers_only_where_there_is_no_window(model_type):
    beside_a_window = SimpleNamespace(**changed(model_type=model_type))
    alone = changed(model_type=model_type, layer_types=[F] * 4, sliding_window=None)

    assert [False, False, False, True] == nope(ModelGeometry.from_config(beside_a_window))
    assert [False] * 4 == nope(ModelGeometry.from_config(SimpleNamespace(**alone)))


def test_command_a_moe_rotates_a_dense_full_layer_when_it_is_told_to():
    facts = {"model_type": "cohere2_moe", "layer_types": [F, S, S, F]}
    facts |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    for pattern, first in ((1, False), (4, True), (None, True)):
        config = SimpleNamespace(**changed(**facts, prefix_dense_sliding_window_pattern=pattern))

        assert [first, False, False, True] == nope(ModelGeometry.from_config(config))
    del facts["mlp_layer_types"]
    config = SimpleNamespace(**changed(**facts, prefix_dense_sliding_window_pattern=1))

    assert [True, False, False, True] == nope(ModelGeometry.from_config(config))


def test_granite_hybrid_is_rotated_only_when_it_says_so():
    config = CONFIG_MAPPING["granitemoehybrid"](
        num_hidden_layers=2, layer_types=["mamba", "attention"]
    )

    assert ModelGeometry.from_config(config).layers[1].rotary is None
    config.position_embedding_type = "rope"

    assert ModelGeometry.from_config(config).layers[1].rotary is not None


# anything

FIELDS = [
    *PLAIN,
    "text_config",
    "per_layer_config",
    "kv_sharing_modes",
    "num_kv_shared_layers",
    "num_nextn_predict_layers",
    "layer_rope_theta",
    "no_rope_layers",
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "hidden_size",
    "v_head_dim",
    "mlp_layer_types",
    "dtype",
]
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2000)
    | st.floats()
    | st.sampled_from([S, F, "conv", "mrope", "cohere2_moe", "granite_swa", "float16"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["0", "x", S, F, *FIELDS]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4), st.booleans())
def test_whatever_a_configuration_holds_it_is_read_or_refused(facts, as_object):
    config = PLAIN | facts
    if as_object:
        config = SimpleNamespace(**config)
    try:
        geometry = ModelGeometry.from_config(config, dtype=None)
    except GeometryError:
        return

    assert geometry == ModelGeometry.from_dict(geometry.to_dict())


def test_a_configuration_that_cannot_be_understood_says_what_it_is():
    refused = refusal(per_layer_config={"first": {}})

    assert ("config", "dict") == (refused.field, refused.value)
    assert refused.reason.startswith("cannot be understood: ")
