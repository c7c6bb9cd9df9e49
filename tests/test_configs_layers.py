import pytest
from transformers import CONFIG_MAPPING

from kvplane.configs.layers import REFUSED, ROWLESS
from kvplane.errors import GeometryError
from kvplane.geometry import LayerGeometry, ModelGeometry, Rotary
from plain_config import MISSING, F, S, kinds, read, refusal


def known(model_type, **facts):
    """A dict that transformers completes."""
    return ModelGeometry.from_config({"model_type": model_type, **facts})


# kinds


def test_a_legacy_name_of_full_attention_is_understood():
    assert [S, F, F, F] == kinds(read(layer_types=[S, "attention", F, "attention"]))


@pytest.mark.parametrize("name", ROWLESS)
def test_a_layer_without_rows_keeps_its_name(name):
    geometry = read(layer_types=[S, name, name, F])

    assert [S, name, name, F] == kinds(geometry)
    assert LayerGeometry(kind=name) == geometry.layers[1] == geometry.layers[2]
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
    refused = refusal(layer_types=kinds)

    assert ("layer_types", kinds) == (refused.field, refused.value)
    assert "must be a list" == refused.reason


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
    assert refused.value.reason.startswith(
        "transformers refuses it: Validation error for field 'hidden_size': "
    )
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
    refused = refusal(num_hidden_layers=1025, layer_types=MISSING)

    assert ("num_hidden_layers", 1025) == (refused.field, refused.value)
    assert "must be at most 1024" == refused.reason


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
    geometry = ModelGeometry.from_config(CONFIG_MAPPING["mimo_v2_flash"](sliding_window=129))

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

    assert ("num_kv_shared_layers", 1) == (refused.field, refused.value)
    assert "layer 3 shares the keys of no earlier full_attention layer" == refused.reason
    refused = refusal(num_kv_shared_layers=4)

    assert "layer 0 shares the keys of no earlier sliding_attention layer" == refused.reason


@pytest.mark.parametrize("number", [-1, 5, 1.0, "1", True])
def test_an_impossible_number_of_shared_layers_is_refused(number):
    refused = refusal(num_kv_shared_layers=number)

    assert ("num_kv_shared_layers", number) == (refused.field, refused.value)
    assert "must be within [0, 4]" == refused.reason


def test_a_list_of_modes_of_another_length_is_refused():
    refused = refusal(kv_sharing_modes=[None])

    assert ("kv_sharing_modes", [None]) == (refused.field, refused.value)
    assert "has 1 entries, num_hidden_layers is 4" == refused.reason
