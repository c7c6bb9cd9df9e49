"""The shape of a model's keys and values, layer by layer; no tensors.

    layer   one of the model's, by its 0-based index
    kind    transformers' `layer_types` values; only attention layers own rows
    group   layers that agree in everything that matters: one cursor, one blob shape, one mask

Nothing here is derived from a layer's number: which layer slides is what the configuration says.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import resources
from math import inf
from typing import Any, Self

from kvplane import configs
from kvplane.errors import GeometryError

SLIDING = "sliding_attention"
FULL = "full_attention"
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHORT_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
CONVENTIONS = ("half", "interleaved")
MAX_LAYERS = 1024
MAX_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """How a layer's keys carry their position.

    Args:
        base: theta.
        dim: rotated elements of a head.
        convention: "half" (first half with second) or "interleaved" (neighbours).
        scaling: further parameters of the rule, as sorted pairs; None for the plain one.
    """

    base: float
    dim: int
    convention: str = "half"
    scaling: tuple[tuple[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        if type(self.base) not in (int, float) or not 0 < self.base < inf:
            reason = "must be a finite number above 0"
            raise GeometryError(field="rotary.base", value=self.base, reason=reason)
        if type(self.dim) is not int or self.dim not in range(2, MAX_SIZE, 2):
            reason = f"must be an even number within [2, {MAX_SIZE})"
            raise GeometryError(field="rotary.dim", value=self.dim, reason=reason)
        if self.convention not in CONVENTIONS:
            reason = f"must be one of {CONVENTIONS}"
            raise GeometryError(field="rotary.convention", value=self.convention, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """One layer's keys and values.

    Args:
        kind: "sliding_attention", "full_attention", or the name of a layer that holds no rows.
        sliding_window: keys a query sees, its own included; None for a full layer.
        num_kv_heads: heads of keys and values; 0 for a layer that holds no rows.
        head_dim: elements of a key head.
        value_head_dim: elements of a value head.
        rotary: None when the stored keys carry no position (NoPE).
        shares_kv_with: the layer whose rows this one reads instead of owning some.
    """

    kind: str
    sliding_window: int | None = None
    num_kv_heads: int = 0
    head_dim: int = 0
    value_head_dim: int = 0
    rotary: Rotary | None = None
    shares_kv_with: int | None = None

    @property
    def has_attention(self) -> bool:
        """Whether the layer reads keys and values at all."""
        return self.kind in (SLIDING, FULL)

    @property
    def owns_rows(self) -> bool:
        """Whether the store holds rows for this layer."""
        return self.has_attention and self.shares_kv_with is None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that own rows of one shape.

    Args:
        layers: their indices, ascending.
        kind: "sliding_attention" or "full_attention".
        sliding_window: None for full layers.
        num_kv_heads: heads of keys and values.
        head_dim: elements of a key head.
        value_head_dim: elements of a value head.
        dtype: of the rows.
    """

    layers: tuple[int, ...]
    kind: str
    sliding_window: int | None
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str

    @property
    def id(self) -> str:
        """The group's name, also in packs: "s2048.2x128x128.f16"."""
        letter = "f0" if self.sliding_window is None else f"s{self.sliding_window}"
        dims = f"{self.num_kv_heads}x{self.head_dim}x{self.value_head_dim}"
        return f"{letter}.{dims}.{SHORT_DTYPES[self.dtype]}"

    @property
    def is_sliding(self) -> bool:
        """Whether the planes are rings."""
        return self.sliding_window is not None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZES[self.dtype]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of one layer, key and value."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """Every layer of a model, and the groups they fall into.

    Args:
        layers: in the model's order.
        dtype: of the rows: "float16", "bfloat16" or "float32".

    Raises:
        GeometryError: names the field that is impossible.
    """

    layers: tuple[LayerGeometry, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.dtype not in ITEMSIZES:
            reason = f"must be one of {sorted(ITEMSIZES)}"
            raise GeometryError(field="dtype", value=self.dtype, reason=reason)
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            reason = f"must be within [1, {MAX_LAYERS}]"
            raise GeometryError(field="layers", value=len(self.layers), reason=reason)
        for layer, geometry in enumerate(self.layers):
            self._check(layer, geometry)

    def _check(self, layer: int, geometry: LayerGeometry) -> None:
        where = f"layers[{layer}]"
        if geometry.kind not in configs.ROWLESS and not geometry.has_attention:
            known = ", ".join((SLIDING, FULL, *configs.ROWLESS))
            reason = f"must be one of {known}"
            raise GeometryError(field=f"{where}.kind", value=geometry.kind, reason=reason)
        if not geometry.has_attention:
            if geometry.num_kv_heads or geometry.sliding_window is not None:
                reason = f"must be unset: a {geometry.kind} layer holds no rows"
                raise GeometryError(
                    field=f"{where}.num_kv_heads", value=geometry.num_kv_heads, reason=reason
                )
            return
        if (geometry.kind == SLIDING) != (geometry.sliding_window is not None):
            reason = f"does not go with kind {geometry.kind}"
            raise GeometryError(
                field=f"{where}.sliding_window", value=geometry.sliding_window, reason=reason
            )
        sizes = {
            "num_kv_heads": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "value_head_dim": geometry.value_head_dim,
        }
        if geometry.sliding_window is not None:
            sizes["sliding_window"] = geometry.sliding_window
        for name, size in sizes.items():
            if type(size) is not int or not 1 <= size < MAX_SIZE:
                reason = f"must be a whole number within [1, {MAX_SIZE})"
                raise GeometryError(field=f"{where}.{name}", value=size, reason=reason)
        owner = geometry.shares_kv_with
        if owner is not None:
            self._check_owner(where, layer, owner)

    def _check_owner(self, where: str, layer: int, owner: int) -> None:
        field = f"{where}.shares_kv_with"
        if owner not in range(layer) or not self.layers[owner].owns_rows:
            reason = "must be an earlier layer that owns rows"
            raise GeometryError(field=field, value=owner, reason=reason)
        mine, theirs = self.layers[layer], self.layers[owner]
        for name in ("kind", "sliding_window", "num_kv_heads", "head_dim", "value_head_dim"):
            if getattr(mine, name) != getattr(theirs, name):
                reason = f"differs from layer {layer} in {name}"
                raise GeometryError(field=field, value=owner, reason=reason)

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups, in the order of their first layers."""
        members: dict[tuple[Any, ...], list[int]] = {}
        for layer, geometry in enumerate(self.layers):
            if geometry.owns_rows:
                facts = (
                    geometry.kind,
                    geometry.sliding_window,
                    geometry.num_kv_heads,
                    geometry.head_dim,
                    geometry.value_head_dim,
                )
                members.setdefault(facts, []).append(layer)
        return tuple(
            LayerGroup(
                layers=tuple(layers),
                kind=kind,
                sliding_window=window,
                num_kv_heads=heads,
                head_dim=dim,
                value_head_dim=value_dim,
                dtype=self.dtype,
            )
            for (kind, window, heads, dim, value_dim), layers in members.items()
        )

    @cached_property
    def _groups_by_layer(self) -> dict[int, LayerGroup]:
        return {layer: group for group in self.groups for layer in group.layers}

    def owner(self, layer: int) -> int:
        """The layer whose rows `layer` reads: itself, unless it shares.

        Raises:
            GeometryError: there is no such layer, or it reads no rows.
        """
        if type(layer) is not int or layer not in range(len(self.layers)):
            reason = f"must be within [0, {len(self.layers)})"
            raise GeometryError(field="layer", value=layer, reason=reason)
        geometry = self.layers[layer]
        if not geometry.has_attention:
            raise GeometryError(field="layer", value=layer, reason=f"is a {geometry.kind} layer")
        return layer if geometry.shares_kv_with is None else geometry.shares_kv_with

    def group_of(self, layer: int) -> LayerGroup:
        """The group that holds the rows which `layer` reads: GeometryError."""
        group = self._groups_by_layer.get(layer) if type(layer) is int else None
        return self._groups_by_layer[self.owner(layer)] if group is None else group

    @classmethod
    def from_config(cls, config: object, *, dtype: str | None = "bfloat16") -> Self:
        """The layers of a transformers configuration.

        Args:
            config: a configuration object, its dict, or the path of a `config.json` or its folder.
            dtype: of the rows; None takes the configuration's own.

        Raises:
            GeometryError: the field that is missing, unknown, impossible or not supported.
        """
        return cls.from_dict(configs.read(config, dtype=dtype))

    @classmethod
    def preset(cls, name: str) -> Self:
        """A model that ships as data: GeometryError, naming the nearest ones."""
        names = preset_names()
        if name not in names:
            nearest = difflib.get_close_matches(str(name), names) or names
            reason = f"no preset of that name; nearest: {', '.join(nearest)}"
            raise GeometryError(field="preset", value=name, reason=reason)
        file = resources.files("kvplane") / "presets" / f"{name}.json"
        facts = json.loads(file.read_bytes())
        pattern = facts["pattern"]
        layers = [
            {"kind": kind, "shares_kv_with": None, **facts["kinds"][kind]}
            for kind in (pattern * facts["num_hidden_layers"])[: facts["num_hidden_layers"]]
        ]
        return cls.from_dict({"dtype": facts["dtype"], "layers": layers})

    @classmethod
    def uniform(
        cls,
        layer_types: Sequence[str],
        *,
        sliding_window: int | None,
        num_kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        dtype: str = "bfloat16",
    ) -> Self:
        """A model whose layers differ in kind only."""
        return cls(
            layers=tuple(
                LayerGeometry(
                    kind=kind,
                    sliding_window=sliding_window if kind == SLIDING else None,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    value_head_dim=head_dim if value_head_dim is None else value_head_dim,
                )
                for kind in layer_types
            ),
            dtype=dtype,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types; `from_dict` gives an equal geometry."""
        layers = []
        for geometry in self.layers:
            facts = asdict(geometry)
            if geometry.rotary is not None and geometry.rotary.scaling is not None:
                facts["rotary"]["scaling"] = {
                    name: list(value) if isinstance(value, tuple) else value
                    for name, value in geometry.rotary.scaling
                }
            layers.append(facts)
        return {"dtype": self.dtype, "layers": layers}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """The geometry that `to_dict` wrote: GeometryError."""
        try:
            return cls(
                layers=tuple(_layer(layer) for layer in facts["layers"]), dtype=facts["dtype"]
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise GeometryError(field="geometry", value=facts, reason=f"lacks {error}") from error


def preset_names() -> list[str]:
    """The names that `ModelGeometry.preset` takes, sorted."""
    files = (resources.files("kvplane") / "presets").iterdir()
    return sorted(file.name[:-5] for file in files if file.name.endswith(".json"))


def _layer(facts: Mapping[str, Any]) -> LayerGeometry:
    rotary = facts["rotary"]
    if rotary is not None:
        scaling = rotary["scaling"]
        if scaling is not None:
            # tuples all through, so that equal layers are equal and hashable
            scaling = tuple(
                (name, tuple(value) if isinstance(value, list) else value)
                for name, value in sorted(scaling.items())
            )
        rotary = Rotary(**{**rotary, "scaling": scaling})
    return LayerGeometry(**{**facts, "rotary": rotary})
