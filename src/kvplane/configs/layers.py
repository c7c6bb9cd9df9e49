"""What a transformers configuration says about each layer's keys and values; no tensors.

Takes a configuration object, a dict, or the path of a `config.json` or of its folder. A dict whose
`model_type` transformers knows is first made into its configuration class, so that the defaults and
legacy fields mean what they mean to the model; any other dict is read as it stands. Fields are read
from one layer's view where there is one: on a model whose layers differ, reading them from the
whole raises.
"""

import copy
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvplane.configs.fields import Fields
from kvplane.configs.rotary import rotary_of
from kvplane.errors import GeometryError

Facts = dict[str, Any]

ATTENTION = ("sliding_attention", "full_attention")
# layers that hold no rows: their states, if any, are the model's own affair
ROWLESS = ("linear_attention", "mamba", "conv", "recurrent", "moe", "mlp", "dense", "sparse")
LEGACY = {"attention": "full_attention"}
REFUSED = {
    "chunked_attention": "attention in chunks sees back to a chunk's start, not a window",
    "window_attention": "windows that do not slide belong to encoders",
    "indexed_attention": "sparse attention keeps an index beside keys and values",
    "compressed_sparse_attention": "compressed rows are not keys and values of tokens",
    "heavily_compressed_attention": "compressed rows are not keys and values of tokens",
    "minimax_m3_sparse": "sparse attention keeps an index beside keys and values",
    "hybrid": "a layer with attention and a recurrent state at once",
    "hybrid_sliding": "a layer with attention and a recurrent state at once",
    "reference_sliding_attention": "a window that never leaves the prompt",
}
# fields that say a model keeps something else than keys and values of num_key_value_heads
FOREIGN = {
    "kv_lora_rank": "latent attention (MLA) is not supported",
    "multi_query": "give num_key_value_heads instead",
    "rotary_dim": "rotary tables that rope_parameters does not describe are not supported",
}
NUM_MTP_LAYERS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
)
# models that have more heads of keys and values in their sliding layers than the field says
SLIDING_KV_FACTOR = {"mimo_v2_flash": 2}
TEXT_PARTS = ("text_config", "language_config", "llm_config")
MAX_LAYERS = 1024
MAX_CONFIG_NBYTES = 16 << 20


def read(config: object, *, dtype: str | None) -> Facts:
    """The layers of `config` in the form `ModelGeometry.from_dict` takes.

    Args:
        config: an object, a dict, or a path.
        dtype: of the rows; None takes what the configuration says, else bfloat16.

    Raises:
        GeometryError: names the field that is missing, unknown, impossible or not supported.
    """
    try:
        return _read(config, dtype)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        # fields of a configuration from anywhere may hold anything
        reason = f"cannot be understood: {error}"
        raise GeometryError(field="config", value=type(config).__name__, reason=reason) from error


def _read(config: object, dtype: str | None) -> Facts:
    text = _text_of(_loaded(config))
    num_layers = Fields(text).size("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        reason = f"must be at most {MAX_LAYERS}"
        raise GeometryError(field="num_hidden_layers", value=num_layers, reason=reason)
    layers = [_layer_fields(text, layer) for layer in range(num_layers)]
    kinds = _kinds(Fields(text), layers)
    owners = _owners(Fields(text), kinds)
    facts = [
        _layer_facts(kinds[layer], layer, layers[layer], owners[layer])
        for layer in range(num_layers)
    ]
    if dtype is None:
        said = Fields(text).get("dtype")
        if said is None and isinstance(text, Mapping):
            # what transformers called it before 5; its objects say both, and warn of this one
            said = Fields(text).get("torch_dtype")
        said = "bfloat16" if said is None else said
        dtype = str(said).removeprefix("torch.")
    return {"dtype": dtype, "layers": facts}


def _loaded(config: object) -> object:
    if isinstance(config, str | os.PathLike):
        config = _from_file(Path(config))
    if not isinstance(config, Mapping):
        return config
    text = _text_of(config)
    if isinstance(text, Mapping) and "layer_types" in text and "num_hidden_layers" in text:
        # by ourselves first: transformers' own complaint would not name the field
        fields = Fields(text)
        _kinds(fields, [fields] * min(fields.size("num_hidden_layers"), MAX_LAYERS))
    return _in_its_class(config)


def _from_file(path: Path) -> Facts:
    if path.is_dir():
        path /= "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_NBYTES:
            reason = f"is larger than {MAX_CONFIG_NBYTES} bytes"
            raise GeometryError(field="config", value=str(path), reason=reason)
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = f"cannot be read: {error}"
        raise GeometryError(field="config", value=str(path), reason=reason) from error
    if not isinstance(facts, dict):
        raise GeometryError(field="config", value=str(path), reason="is not a JSON object")
    return facts


def _in_its_class(config: Mapping[str, Any]) -> object:
    model_type = config.get("model_type")
    try:
        from transformers import CONFIG_MAPPING  # noqa: PLC0415 - heavy, and only dicts need it
    except ImportError:
        return config
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return config
    try:
        return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(config)))
    except Exception as error:  # a configuration class may raise anything over what it is given
        reason = f"transformers refuses it: {' '.join(str(error).split())}"
        raise GeometryError(field="config", value=model_type, reason=reason) from error


def _text_of(config: object) -> object:
    """The part of a composite configuration that describes the decoder."""
    if hasattr(type(config), "get_text_config"):
        return config.get_text_config(decoder=True)  # type: ignore[attr-defined]
    fields = Fields(config)
    for name in TEXT_PARTS:
        part = fields.get(name)
        if part is not None:
            return part
    return config


def _layer_fields(text: object, layer: int) -> Fields:
    views = Fields(text).get("per_layer_config", {})
    if not isinstance(views, Mapping):
        return Fields(views[layer])
    overrides = {int(key): value for key, value in views.items()}
    return Fields(text, overrides.get(layer))


def _kinds(text: Fields, layers: Sequence[Fields]) -> list[str]:
    kinds = text.get("layer_types")
    if kinds is None:
        kinds = [_kind_from_window(layer) for layer in layers]
    if isinstance(kinds, str) or not isinstance(kinds, Sequence):
        raise GeometryError(field="layer_types", value=kinds, reason="must be a list")
    num_layers = len(layers)
    extra = next((n for n in map(text.get, NUM_MTP_LAYERS) if type(n) is int), 0)
    # some configurations list the layers that predict further tokens too, after the model's own
    if len(kinds) not in {num_layers, num_layers + extra}:
        reason = f"has {len(kinds)} entries, num_hidden_layers is {num_layers}"
        raise GeometryError(field="layer_types", value=list(kinds), reason=reason)
    known = []
    for layer, name in enumerate(kinds[:num_layers]):
        kind = LEGACY.get(str(name), str(name))
        if kind not in ATTENTION and kind not in ROWLESS:
            reason = REFUSED.get(kind, "is no kind of layer known here")
            if kind in REFUSED:
                reason = f"is not supported: {reason}"
            raise GeometryError(field=f"layer_types[{layer}]", value=name, reason=reason)
        known.append(kind)
    return known


def _kind_from_window(layer: Fields) -> str:
    if layer.get("sliding_window_pattern") is not None:
        reason = "must be given: the pattern's meaning depends on the model"
        raise GeometryError(field="layer_types", value=None, reason=reason)
    if layer.get("use_sliding_window", default=True) and layer.get("sliding_window") is not None:
        return "sliding_attention"
    chunked = layer.get("attention_chunk_size") is not None
    return "chunked_attention" if chunked else "full_attention"


def _owners(text: Fields, kinds: Sequence[str]) -> list[int | None]:
    """For each layer, the earlier one whose keys and values it reads, if it has none of its own."""
    modes = text.get("kv_sharing_modes")
    if modes is None:
        num_shared = text.get("num_kv_shared_layers", 0)
        if type(num_shared) is not int or not 0 <= num_shared <= len(kinds):
            reason = f"must be within [0, {len(kinds)}]"
            raise GeometryError(field="num_kv_shared_layers", value=num_shared, reason=reason)
        modes = [None] * (len(kinds) - num_shared) + ["reuse"] * num_shared
    if len(modes) != len(kinds):
        reason = f"has {len(modes)} entries, num_hidden_layers is {len(kinds)}"
        raise GeometryError(field="kv_sharing_modes", value=modes, reason=reason)
    owners: list[int | None] = []
    newest: dict[str, int] = {}
    for layer, kind in enumerate(kinds):
        if modes[layer] != "reuse":
            newest[kind] = layer
        elif kind not in newest:
            reason = f"layer {layer} shares the keys of no earlier {kind} layer"
            shared = text.get("num_kv_shared_layers")
            raise GeometryError(field="num_kv_shared_layers", value=shared, reason=reason)
        # the last layer of its kind that has rows of its own: what the models themselves do
        owners.append(newest[kind] if modes[layer] == "reuse" else None)
    return owners


def _layer_facts(kind: str, layer: int, fields: Fields, owner: int | None) -> Facts:
    facts: Facts = {
        "kind": kind,
        "sliding_window": None,
        "num_kv_heads": 0,
        "head_dim": 0,
        "value_head_dim": 0,
        "rotary": None,
        "shares_kv_with": owner,
    }
    if kind not in ATTENTION:
        return facts
    for name, reason in FOREIGN.items():
        if fields.get(name) and not (name == "rotary_dim" and fields.get("rope_parameters")):
            raise GeometryError(field=name, value=fields.get(name), reason=reason)
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if kind == "sliding_attention":
        facts["sliding_window"] = fields.size("sliding_window")
        num_kv_heads *= SLIDING_KV_FACTOR.get(fields.get("model_type"), 1)
    if num_heads % num_kv_heads:
        reason = f"must divide num_attention_heads = {num_heads}"
        raise GeometryError(field="num_key_value_heads", value=num_kv_heads, reason=reason)
    if fields.get("head_dim") is None:
        head_dim = fields.size("hidden_size") // num_heads
    else:
        head_dim = fields.size("head_dim")
    facts["num_kv_heads"] = num_kv_heads
    facts["head_dim"] = head_dim
    facts["value_head_dim"] = fields.size("v_head_dim", head_dim)
    facts["rotary"] = rotary_of(kind, layer, fields, head_dim)
    return facts
