"""Layer groups by what a pack says of them, for readers that have no model at hand."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvplane.errors import PackCorrupt
from kvplane.geometry import FULL, SHORT_DTYPES, SLIDING, LayerGroup
from kvplane.pack.blob import Header
from kvplane.pack.limits import LAYERS

_COUNT = r"([1-9][0-9]{0,8})"
_ID = re.compile(rf"(?:f0|s{_COUNT})\.{_COUNT}x{_COUNT}x{_COUNT}\.(bf16|f16|f32)", re.ASCII)
_TENSOR = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(?:key|value)", re.ASCII)
_DTYPES = {short: name for name, short in SHORT_DTYPES.items()}


def group_named(group_id: object, layers: Sequence[int], path: str) -> LayerGroup:
    """The group of that id over these layers: PackCorrupt when it is no group's id."""
    found = _ID.fullmatch(group_id) if isinstance(group_id, str) else None
    if found is None or not layers or max(layers) >= LAYERS:
        raise PackCorrupt(
            path=path, what=f"{group_id!r} over layers {list(layers)[:8]} is no group"
        )
    window, num_kv_heads, head_dim, value_head_dim, dtype = found.groups()
    return LayerGroup(
        layers=tuple(layers),
        kind=FULL if window is None else SLIDING,
        sliding_window=None if window is None else int(window),
        num_kv_heads=int(num_kv_heads),
        head_dim=int(head_dim),
        value_head_dim=int(value_head_dim),
        dtype=_DTYPES[dtype],
    )


def group_in(header: Header, path: str) -> LayerGroup:
    """The group whose rows a blob says it holds: PackCorrupt when it says none."""
    layers = []
    for entry in header.entries:
        found = _TENSOR.fullmatch(entry.name)
        if found is None:
            raise PackCorrupt(path=path, what=f"{entry.name} is no layer's key or value")
        layers.append(int(found[1]))
    return group_named(header.metadata.get("group"), sorted(set(layers)), path)


def layers_of(parts: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The layers of every group that a fingerprint's parts name; none where they name nonsense."""
    groups = parts.get("groups")
    if not isinstance(groups, dict):
        return {}
    return {
        group: tuple(layers)
        for group, layers in groups.items()
        if isinstance(layers, list) and all(type(layer) is int for layer in layers)
    }
