import pytest
from transformers import CONFIG_MAPPING

from kvplane.errors import GeometryError
from kvplane.geometry import FULL, ModelGeometry, Rotary, preset_names
from plain_config import F, S

# layers, full ones, KV heads, head_dim, window, dtype: the models' published numbers
PUBLISHED = {
    "command-r7b": (32, 8, 8, 128, 4096, "bfloat16"),
    "exaone-4-32b": (64, 16, 8, 128, 4096, "bfloat16"),
    "gemma-3-270m": (18, 3, 1, 256, 512, "bfloat16"),
    "gemma-3-1b": (26, 4, 1, 256, 512, "bfloat16"),
    "gemma-3-4b": (34, 5, 4, 256, 1024, "bfloat16"),
    "gemma-3-12b": (48, 8, 8, 256, 1024, "bfloat16"),
    "gemma-3-27b": (62, 10, 16, 128, 1024, "bfloat16"),
    "gpt-oss-20b": (24, 12, 8, 64, 128, "bfloat16"),
    "gpt-oss-120b": (36, 18, 8, 64, 128, "bfloat16"),
    "muse-glimmer-30b": (52, 13, 2, 128, 2048, "float16"),
    "olmo-3-7b": (32, 8, 32, 128, 4096, "bfloat16"),
}


def test_every_preset_is_checked_against_published_numbers():
    assert sorted(PUBLISHED) == preset_names()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_models_published_numbers(name):
    num_layers, num_full, heads, dim, window, dtype = PUBLISHED[name]
    geometry = ModelGeometry.preset(name)
    ring, plane = sorted(geometry.groups, key=lambda group: group.kind, reverse=True)

    assert num_layers == len(geometry.layers)
    assert num_full == len(plane.layers)
    assert (heads, dim, dim) == (ring.num_kv_heads, ring.head_dim, ring.value_head_dim)
    assert (heads, dim, dim) == (plane.num_kv_heads, plane.head_dim, plane.value_head_dim)
    assert (window, None) == (ring.sliding_window, plane.sliding_window)
    assert dtype == geometry.dtype


def test_the_full_layers_of_three_presets_are_not_rotated():
    nope = {
        name
        for name in PUBLISHED
        if any(
            layer.kind == FULL and layer.rotary is None
            for layer in ModelGeometry.preset(name).layers
        )
    }

    assert {"command-r7b", "exaone-4-32b", "muse-glimmer-30b"} == nope


def test_muse_glimmer_turns_neighbours_at_a_base_of_500000():
    geometry = ModelGeometry.preset("muse-glimmer-30b")

    assert Rotary(base=500_000.0, dim=128, convention="interleaved") == geometry.layers[0].rotary


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(GeometryError) as refused:
        ModelGeometry.preset("muse-glimer-30")

    assert ("preset", "muse-glimer-30") == (refused.value.field, refused.value.value)
    assert "no preset of that name; nearest: muse-glimmer-30b" == refused.value.reason


def test_a_preset_that_is_like_none_names_them_all():
    with pytest.raises(GeometryError) as refused:
        ModelGeometry.preset("??")

    assert refused.value.reason.endswith(", ".join(preset_names()))


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
