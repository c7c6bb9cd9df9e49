"""Layer groups by what a pack says of them, for readers that have no model at hand."""

import re

from kvplane.errors import PackCorrupt
from kvplane.geometry import FULL, SLIDING, LayerGroup
from kvplane.pack.documents import SavedSession
from kvplane.pack.geometries import geometry_of
from kvplane.pack.header import Header
from kvplane.pack.ids import facts_of
from kvplane.pack.limits import LAYERS

_TENSOR = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(?:key|value)", re.ASCII)


def groups_of(saved: SavedSession) -> dict[str, LayerGroup]:
    """The groups of a saved session's model, by id."""
    geometry = geometry_of(saved.geometry, f"session {saved.name}")
    return {group.id: group for group in geometry.groups}


def group_in(header: Header, path: str) -> LayerGroup:
    """The group whose rows a blob says it holds: PackCorrupt when it says none."""
    layers = set()
    for entry in header.entries:
        found = _TENSOR.fullmatch(entry.name)
        if found is None:
            raise PackCorrupt(path=path, what=f"{entry.name[:80]} is no layer's key or value")
        layers.add(int(found[1]))
    named = header.metadata.get("group")
    facts = facts_of(named)
    if facts is None or not layers or max(layers) >= LAYERS:
        what = f"{str(named)[:80]!r} over layers {sorted(layers)[:8]} is no group"
        raise PackCorrupt(path=path, what=what)
    return LayerGroup(
        layers=tuple(sorted(layers)),
        kind=FULL if facts.sliding_window is None else SLIDING,
        **facts._asdict(),
    )
