"""What kind of layer each of a model's is, in transformers' own words.

    store    rows of keys and values in the store: "full_attention", "sliding_attention"
    own      transformers' own cache layers in the same cache: convolution, linear attention,
             layers that read another's rows, layers with rows and a state at once
    refused  kinds whose rows the store would hold wrongly

Kinds and windows come from transformers' own helper, never from a layer's number.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from kvplane.errors import ArgumentError, GeometryError
from kvplane.geometry import FULL, SLIDING, ModelGeometry

REFUSED = {
    "chunked_attention": "attention in chunks (Llama 4) sees back to its chunk's start, which is "
    "not a window; use transformers' DynamicCache",
    "indexed_attention": "sparse attention keeps a second cache of indexer keys; use "
    "transformers' DynamicCache",
}
# layers that read another's rows, or none
STATELESS = ("dummy", "moe", "mlp")
# models whose forward does more with a cache than add each token to each layer once
REFUSED_MODELS = {
    "dory": "runs its layers several times in one call and copies cache layers while doing so; use "
    "transformers' DynamicCache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """One layer as transformers describes it.

    Args:
        kind: transformers' name for it.
        sliding_window: keys a query sees, its own included; None for other layers.
        options: what transformers' own layer class takes.
    """

    kind: str
    sliding_window: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def in_store(self) -> bool:
        """Whether the store holds the layer's rows."""
        return self.kind in (FULL, SLIDING)

    @property
    def has_state(self) -> bool:
        """Whether one of transformers' own layers keeps something for it."""
        return not self.in_store and self.kind not in STATELESS

    def own_layer(self) -> Any:  # noqa: ANN401 - transformers' class
        """A new layer of transformers' own class."""
        return DYNAMIC_LAYER_TYPE_MAPPING[self.kind](**self.options)


def text_config(config: Any) -> Any:  # noqa: ANN401 - any transformers config
    """The part of a config that describes the layers with rows.

    Raises:
        ArgumentError: it is no config of transformers.
    """
    if not hasattr(config, "get_text_config"):
        raise ArgumentError(
            argument="model", expected="a transformers model or its config", got=config
        )
    return config.get_text_config(decoder=True)


def kinds_of(config: Any) -> tuple[LayerKind, ...]:  # noqa: ANN401 - any transformers config
    """The kind of every layer of a text config.

    Raises:
        GeometryError: a model or a kind of layer that this cache does not hold.
    """
    model_type = getattr(config, "model_type", None)
    if model_type in REFUSED_MODELS:
        raise GeometryError(field="model_type", value=model_type, reason=REFUSED_MODELS[model_type])
    names, options = _described(config)
    if isinstance(options, dict):
        # up to 5.17 one set of options served every layer
        options = [options] * len(names)
    kinds = []
    for layer, (name, own) in enumerate(zip(names, options, strict=True)):
        where = f"layer_types[{layer}]"
        if name in REFUSED:
            raise GeometryError(field=where, value=name, reason=REFUSED[name])
        if name == SLIDING:
            window = own.get("sliding_window")
            if type(window) is not int or window < 1:
                reason = "a sliding layer needs a window of at least 1"
                raise GeometryError(field=f"{where}.sliding_window", value=window, reason=reason)
            kinds.append(LayerKind(kind=name, sliding_window=window))
        elif name == FULL:
            kinds.append(LayerKind(kind=name))
        elif name in DYNAMIC_LAYER_TYPE_MAPPING:
            kinds.append(LayerKind(kind=name, options=dict(own)))
        else:
            reason = "is a kind that neither the store nor transformers' caches know"
            raise GeometryError(field=where, value=name, reason=reason)
    if not any(kind.in_store for kind in kinds):
        reason = "holds no sliding_attention or full_attention layer: nothing for a store to keep"
        raise GeometryError(field="layer_types", value=sorted(set(names)), reason=reason)
    return tuple(kinds)


def _described(config: Any) -> tuple[list[str], Any]:  # noqa: ANN401 - any transformers config
    names, options = get_layer_types_and_kwargs(config)
    return list(names), options


def geometry_of(config: Any, kinds: tuple[LayerKind, ...], dtype: str) -> ModelGeometry:  # noqa: ANN401 - any transformers config
    """The store's geometry of a text config, checked against transformers' own reading.

    Raises:
        GeometryError: the two disagree about a layer.
    """
    geometry = ModelGeometry.from_config(config, dtype=dtype)
    for layer, kind in enumerate(kinds):
        facts = geometry.layers[layer]
        if kind.in_store:
            agrees = facts.owns_rows and (facts.kind, facts.sliding_window) == (
                kind.kind,
                kind.sliding_window,
            )
        else:
            agrees = not facts.owns_rows
        if not agrees:
            raise GeometryError(
                field=f"layers[{layer}]",
                value=(facts.kind, facts.sliding_window),
                reason=f"transformers says {kind.kind} with window {kind.sliding_window}",
            )
    return geometry
