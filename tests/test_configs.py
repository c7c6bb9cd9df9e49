import json
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from kvplane.configs.layers import MAX_CONFIG_NBYTES
from kvplane.errors import GeometryError
from kvplane.geometry import ModelGeometry, Rotary
from plain_config import PLAIN, F, S, changed, read, refusal


def known(model_type, **facts):
    """A dict that transformers completes."""
    return ModelGeometry.from_config({"model_type": model_type, **facts})


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


def test_an_object_that_knows_its_decoder_is_asked_for_it():
    class Whole:
        def get_text_config(self, *, decoder):
            assert decoder is True
            return SimpleNamespace(**PLAIN)

    assert read() == ModelGeometry.from_config(Whole())


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
    # the class completes what it is given in place
    parameters = {kind: {"rope_type": "default"} for kind in (S, F)}
    config = {"model_type": "gemma3_text", "rope_parameters": parameters}
    before = json.dumps(config)
    ModelGeometry.from_config(config)

    assert before == json.dumps(config)


def test_without_transformers_a_known_models_dict_is_read_as_it_stands(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)

    assert read() == known(**changed(model_type="gpt_oss"))


# paths


def test_a_file_and_its_folder_are_read_alike(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))

    assert read() == ModelGeometry.from_config(tmp_path)
    assert read() == ModelGeometry.from_config(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000],
    ids=["empty", "cut", "list", "null", "no text", "deep"],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(GeometryError) as refused:
        ModelGeometry.from_config(path)

    assert ("config", str(path)) == (refused.value.field, refused.value.value)
    assert refused.value.reason.startswith(("cannot be read: ", "is not a JSON object"))


def test_a_list_is_no_configuration(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(GeometryError) as refused:
        ModelGeometry.from_config(path)

    assert "is not a JSON object" == refused.value.reason


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(GeometryError, match="cannot be read"):
        ModelGeometry.from_config(tmp_path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_CONFIG_NBYTES + 1)
    with pytest.raises(GeometryError) as refused:
        ModelGeometry.from_config(path)

    assert ("config", str(path), f"is larger than {MAX_CONFIG_NBYTES} bytes") == (
        refused.value.field,
        refused.value.value,
        refused.value.reason,
    )


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


def test_an_object_without_a_dtype_is_not_asked_by_the_name_that_warns():
    class Config(SimpleNamespace):
        @property
        def torch_dtype(self):
            raise AssertionError

    config = Config(**PLAIN, dtype=None)

    assert "bfloat16" == ModelGeometry.from_config(config, dtype=None).dtype


def test_rows_are_bfloat16_unless_said():
    config = changed(dtype="float16")

    assert "bfloat16" == ModelGeometry.from_config(config).dtype
    assert "float32" == ModelGeometry.from_config(config, dtype="float32").dtype


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
