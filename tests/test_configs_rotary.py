from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING

from kvplane.geometry import ModelGeometry, Rotary
from plain_config import F, S, changed, read, refusal


def nope(geometry):
    return [layer.rotary is None for layer in geometry.layers]


def rotaries(**facts):
    return [layer.rotary for layer in read(**facts).layers]


def test_a_theta_of_0_leaves_a_layer_unrotated():
    plain = Rotary(base=10_000.0, dim=16)

    assert [plain, plain, plain, None] == rotaries(layer_rope_theta=[1e4, 1e4, 1e4, 0])
    assert [None, plain, plain, plain] == rotaries(layer_rope_theta=[0.0, 1, 1, 1])


@pytest.mark.parametrize("model_type", ["granite_swa", "granitemoe_swa"])
def test_granite_takes_its_thetas_from_the_list(model_type):
    config = SimpleNamespace(**changed(model_type=model_type))

    assert [10_000.0] * 4 == [
        layer.rotary.base for layer in ModelGeometry.from_config(config).layers
    ]
    config.layer_rope_theta = [1e4, 2e4, 3e4, 0]
    *first, last = ModelGeometry.from_config(config).layers

    assert [1e4, 2e4, 3e4] == [layer.rotary.base for layer in first]
    assert last.rotary is None


def test_the_list_of_unrotated_layers_has_zeros_for_them():
    plain = Rotary(base=10_000.0, dim=16)

    assert [plain, None, plain, None] == rotaries(no_rope_layers=[1, 0, 1, 0])
    assert [plain] * 4 == rotaries(no_rope_layers=[])


@pytest.mark.parametrize("name", ["layer_rope_theta", "no_rope_layers"])
@pytest.mark.parametrize("values", [[1, 1, 1], "1111", {"0": 1}])
def test_a_list_that_is_none_or_too_short_is_refused(name, values):
    refused = refusal(**{name: values})

    assert (name, values) == (refused.field, refused.value)
    assert refused.reason in ("says nothing of 3", "says nothing of 0")


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
    assert number is refused.value


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
