"""A model's layers as a saved session holds them: whole, without floats, checked when read."""

from typing import Any

from kvplane.errors import GeometryError, PackCorrupt
from kvplane.geometry import LayerGeometry, ModelGeometry, Rotary
from kvplane.pack.values import exact

_LAYER = frozenset(
    {
        "head_dim",
        "kind",
        "num_kv_heads",
        "rotary",
        "shares_kv_with",
        "sliding_window",
        "value_head_dim",
    }
)
_ROTARY = frozenset({"base", "convention", "dim", "scaling"})


def geometry_fields(geometry: ModelGeometry) -> dict[str, Any]:
    """The geometry as JSON without floats: what a reader needs to plan memory."""
    return {
        "dtype": geometry.dtype,
        "layers": [
            {
                "head_dim": layer.head_dim,
                "kind": layer.kind,
                "num_kv_heads": layer.num_kv_heads,
                "rotary": rotary_fields(layer.rotary),
                "shares_kv_with": layer.shares_kv_with,
                "sliding_window": layer.sliding_window,
                "value_head_dim": layer.value_head_dim,
            }
            for layer in geometry.layers
        ],
    }


def rotary_fields(rotary: Rotary | None) -> dict[str, Any] | None:
    """How a layer's keys carry their position, as JSON without floats."""
    if rotary is None:
        return None
    return {
        "base": float(rotary.base).hex(),
        "convention": rotary.convention,
        "dim": rotary.dim,
        "scaling": None if rotary.scaling is None else exact(dict(rotary.scaling), "scaling"),
    }


def geometry_of(fields: Any, path: str) -> ModelGeometry:  # noqa: ANN401 - any JSON value
    """The geometry in a document: PackCorrupt when it is none."""
    try:
        return _geometry_of(fields)
    except (GeometryError, TypeError, ValueError, KeyError) as error:
        raise PackCorrupt(path=path, what=f"geometry is none: {error}") from error


def _geometry_of(fields: Any) -> ModelGeometry:  # noqa: ANN401
    layers = []
    if set(fields) != {"dtype", "layers"} or not isinstance(fields["layers"], list):
        raise ValueError("not dtype and layers")
    for facts in fields["layers"]:
        if set(facts) != _LAYER:
            raise ValueError(f"a layer with the fields {sorted(facts)[:8]}")
        rotary = facts["rotary"]
        rotary = None if rotary is None else _rotary_of(rotary)
        layers.append(LayerGeometry(**{**facts, "rotary": rotary}))
    return ModelGeometry(layers=tuple(layers), dtype=fields["dtype"])


def _rotary_of(facts: Any) -> Rotary:  # noqa: ANN401
    if set(facts) != _ROTARY:
        raise ValueError(f"a rotary with the fields {sorted(facts)[:8]}")
    # its numbers stay text: no reader turns keys by them
    scaling = facts["scaling"]
    return Rotary(
        base=float.fromhex(facts["base"]),
        dim=facts["dim"],
        convention=facts["convention"],
        scaling=None if scaling is None else tuple(sorted(scaling.items())),
    )
