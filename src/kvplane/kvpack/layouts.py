"""Registered layouts: which layers of a model have which planes, as the prefill side states them.

A layout is part of every identity, so a class's numbers, label, state names and rotary parameters
are hashed exactly as written here.
"""

import struct
from dataclasses import dataclass

from kvplane.errors import ArgumentError
from kvplane.kvpack.wire import u32

STATE_NAMES = ("attn.k", "attn.v")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerClass:
    """Layers `range(first, stop, step)` without `exceptions`; `window` 0 keeps every token."""

    label: str
    first: int
    stop: int
    step: int
    num_kv_heads: int
    head_dim: int
    window: int
    rotary_base: float
    rotary_dims: int
    convention: str
    exceptions: tuple[int, ...] = ()
    scaling: str = "none"

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, ascending."""
        left_out = set(self.exceptions)
        return tuple(
            layer for layer in range(self.first, self.stop, self.step) if layer not in left_out
        )

    def numbers(self) -> bytes:
        """What every identity has of it."""
        values = (
            self.first,
            self.stop,
            self.step,
            self.num_kv_heads,
            self.head_dim,
            self.window,
            *self.exceptions,
        )
        return b"".join(map(u32, values))

    def labelled(self) -> bytes:
        """The same with what the numbers mean."""
        return b"".join(
            (
                self.numbers(),
                _text(self.label),
                u32(len(STATE_NAMES)),
                *map(_text, STATE_NAMES),
                struct.pack("<d", self.rotary_base),
                u32(self.rotary_dims),
                _text(self.scaling),
                _text(self.convention),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model's classes, in the table's order."""

    name: str
    num_layers: int
    classes: tuple[LayerClass, ...]

    def class_of(self, layer: int) -> LayerClass:
        """The class of a layer: ArgumentError when it has none."""
        for one in self.classes:
            if layer in one.layers:
                return one
        raise ArgumentError(argument="layer", expected=f"a layer of {self.name}", got=layer)

    def geometry(self, max_context: int) -> bytes:
        """The numbers alone."""
        return b"".join(one.numbers() for one in self.classes) + u32(max_context)

    def labelled_geometry(self, max_context: int) -> bytes:
        """The numbers with their meaning."""
        return b"".join(one.labelled() for one in self.classes) + u32(max_context)


MUSE_GLIMMER_30B = Layout(
    name="muse-glimmer-30b",
    num_layers=52,
    classes=(
        LayerClass(
            label="gqa-windowed",
            first=0,
            stop=52,
            step=1,
            exceptions=tuple(range(3, 52, 4)),
            num_kv_heads=2,
            head_dim=128,
            window=2048,
            rotary_base=500_000.0,
            rotary_dims=128,
            convention="interleaved",
        ),
        LayerClass(
            label="gqa-full",
            first=3,
            stop=52,
            step=4,
            num_kv_heads=2,
            head_dim=128,
            window=0,
            rotary_base=0.0,
            rotary_dims=0,
            convention="none",
        ),
    ),
)
LAYOUTS = {layout.name: layout for layout in (MUSE_GLIMMER_30B,)}


def _text(value: str) -> bytes:
    raw = value.encode("ascii")
    return u32(len(raw)) + raw
