"""Exact, portable KV storage for hybrid-attention language models.

    geometry = ModelGeometry.from_config("config.json")
    store = KVStore(geometry, max_context=131072)
    session = store.open()
    with session.step(ids) as step:
        out = step.attend(layer, query, key, value)

The first touch of a name imports what it needs: planning memory imports no torch.
"""

import importlib
from typing import TYPE_CHECKING

from kvplane._version import __version__

# a function with its module's name: bound here, before whoever imports the module binds that
from kvplane.footprint import Footprint, footprint

if TYPE_CHECKING:
    from kvplane.batch import BatchStep
    from kvplane.checkpoints import Checkpoint
    from kvplane.describe import Description, MemoryReport
    from kvplane.geometry import LayerGeometry, LayerGroup, ModelGeometry, Rotary
    from kvplane.plane import Layout
    from kvplane.ring import RingCursor
    from kvplane.session import Session
    from kvplane.snapshot import Snapshot
    from kvplane.step import Step
    from kvplane.store import KVStore
    from kvplane.transfer import receive, send
    from kvplane.view import View

_HOMES = {
    "BatchStep": "batch",
    "Checkpoint": "checkpoints",
    "Description": "describe",
    "KVStore": "store",
    "LayerGeometry": "geometry",
    "LayerGroup": "geometry",
    "Layout": "plane",
    "MemoryReport": "describe",
    "ModelGeometry": "geometry",
    "RingCursor": "ring",
    "Rotary": "geometry",
    "Session": "session",
    "Snapshot": "snapshot",
    "Step": "step",
    "View": "view",
    "receive": "transfer",
    "send": "transfer",
}

__all__ = [
    "BatchStep",
    "Checkpoint",
    "Description",
    "Footprint",
    "KVStore",
    "LayerGeometry",
    "LayerGroup",
    "Layout",
    "MemoryReport",
    "ModelGeometry",
    "RingCursor",
    "Rotary",
    "Session",
    "Snapshot",
    "Step",
    "View",
    "__version__",
    "footprint",
    "receive",
    "send",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
