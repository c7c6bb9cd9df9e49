"""How a layer's keys are rotated by their positions, or that they are not (NoPE).

Which layers are left unrotated is said in four ways: a list of thetas with zeros, a list of flags,
no rotary parameters for a kind of layer, or only in the model's code. The last, and which elements
of a head form a pair, no configuration says: both are facts of the model class, listed here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvplane.configs.fields import Fields
from kvplane.errors import GeometryError

# full layers of these are not rotated, by the model's code
FULL_IS_NOPE = {"afmoe", "cohere2", "cohere2_moe", "flint", "lara_mini"}
# the same, but only when there is a window at all
FULL_IS_NOPE_BESIDE_A_WINDOW = {"exaone4", "exaone_moe", "kolibri1"}
# pairs are neighbours, not first half with second
INTERLEAVED = {
    "blt",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "ernie4_5",
    "ernie4_5_moe",
    "ernie4_5_vl_moe_text",
    "glm",
    "glm4",
    "glm4v_text",
    "glm_ocr_text",
    "helium",
    "llama4_text",
    "moonshine",
    "moonshine_streaming",
}
# each layer's theta is in the list; elsewhere the list only says whether a layer is rotated
OWN_THETA = {"granite_swa", "granitemoe_swa"}


def rotary_of(kind: str, layer: int, fields: Fields, head_dim: int) -> dict[str, Any] | None:
    """A layer's rotation in the form `Rotary` takes; None for NoPE.

    Raises:
        GeometryError: parameters that mean nothing.
    """
    model_type = fields.get("model_type")
    if _is_nope(model_type, kind, layer, fields):
        return None
    parameters = _parameters(kind, fields)
    if not parameters:
        return None
    thetas = fields.get("layer_rope_theta")
    own = model_type in OWN_THETA and thetas is not None
    base = _positive("rope_theta", thetas[layer] if own else parameters.get("rope_theta"))
    factor = parameters.get("partial_rotary_factor")
    factor = 1.0 if factor is None else _positive("partial_rotary_factor", factor)
    scaling = _scaling(parameters)
    if scaling is not None and scaling.get("rope_type") == "proportional":
        # the factor is a share of the pairs of a whole head
        scaling["partial_rotary_factor"] = factor
        factor = 1.0
    dim = int(head_dim * factor)
    return {
        "base": base,
        # an odd one is rounded up, as the models' own ranges of frequencies do
        "dim": dim + dim % 2,
        "convention": "interleaved" if model_type in INTERLEAVED else "half",
        "scaling": scaling,
    }


def _is_nope(model_type: str | None, kind: str, layer: int, fields: Fields) -> bool:
    if model_type == "granitemoehybrid":
        return bool(fields.get("position_embedding_type") != "rope")
    for name in ("layer_rope_theta", "no_rope_layers"):
        # the second is named for its zeros: 1 stands for a rotated layer
        values = fields.get(name)
        if values:
            if isinstance(values, str) or not isinstance(values, Sequence) or len(values) <= layer:
                raise GeometryError(field=name, value=values, reason=f"says nothing of {layer}")
            return not values[layer]
    if kind != "full_attention":
        return False
    if model_type == "cohere2_moe" and _is_forced(layer, fields):
        return False
    if model_type in FULL_IS_NOPE_BESIDE_A_WINDOW:
        return fields.get("sliding_window") is not None
    return model_type in FULL_IS_NOPE


def _is_forced(layer: int, fields: Fields) -> bool:
    is_dense: bool = fields.get("mlp_layer_types", [])[layer : layer + 1] == ["dense"]
    return is_dense and fields.get("prefix_dense_sliding_window_pattern") == 1


def _positive(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise GeometryError(field=field, value=value, reason="must be a number above 0")
    return float(value)


def _parameters(kind: str, fields: Fields) -> Mapping[str, Any]:
    """This kind of layer's rotary parameters; empty for none."""
    name = "rope_parameters"
    parameters = _mapping(name, fields.get(name, _legacy_parameters(kind, fields)))
    if any(key.endswith("_attention") for key in parameters):
        return _mapping(name, parameters.get(kind) or {})
    return parameters


def _mapping(field: str, parameters: object) -> Mapping[str, Any]:
    if not isinstance(parameters, Mapping):
        raise GeometryError(field=field, value=parameters, reason="must be an object")
    return parameters


def _legacy_parameters(kind: str, fields: Fields) -> Mapping[str, Any]:
    theta = fields.get("rope_theta")
    if theta is None:
        return {}
    local_theta = fields.get("rope_local_base_freq")
    if local_theta is not None and kind == "sliding_attention":
        return {"rope_theta": local_theta}
    return {
        "partial_rotary_factor": fields.get("partial_rotary_factor"),
        **_mapping("rope_scaling", fields.get("rope_scaling", {})),
        "rope_theta": theta,
    }


def _scaling(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Everything else that angles depend on; None for the plain rule."""
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    plain = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
    scaling = {
        key: value for key, value in parameters.items() if key not in plain and value is not None
    }
    if rope_type != "default":
        scaling["rope_type"] = rope_type
    return scaling or None
