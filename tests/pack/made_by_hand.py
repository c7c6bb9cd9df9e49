"""Sessions whose rows say who made them, in which layer and at which position."""

import torch

from kvplane import KVStore, ModelGeometry
from kvplane.geometry import LayerGeometry
from kvplane.pack import Fingerprint

CHUNK = 256


def geometry_of(*windows, dtype="float32", heads=1, dim=2, value_dim=2):
    """One layer for each window, and a full one for each None."""
    return ModelGeometry(
        layers=tuple(
            LayerGeometry(
                kind="full_attention" if window is None else "sliding_attention",
                sliding_window=window,
                num_kv_heads=heads,
                head_dim=dim,
                value_head_dim=value_dim,
            )
            for window in windows
        ),
        dtype=dtype,
    )


class Made:
    """A model of so many layers, its store and its fingerprint."""

    def __init__(self, *windows, max_context=4096, weights="w", **facts):
        store_facts = {name: facts.pop(name) for name in ("slack", "attention") if name in facts}
        self.geometry = geometry_of(*windows, **facts)
        self.fingerprint = Fingerprint.of(self.geometry, weights=weights)
        self.store = KVStore(self.geometry, max_context=max_context, memory="heap", **store_facts)

    def open(self, ids=(), *, producer=1, chunk=CHUNK, **facts):
        """A session that remembers ids, with these read in chunks."""
        return self.extend(self.store.open([], **facts), ids, producer=producer, chunk=chunk)

    def extend(self, session, ids, *, producer=1, chunk=CHUNK, capture=()):
        """Add ids on the multiples of the chunk; cuts inside a step are captured."""
        ids = list(ids)
        while ids:
            first = session.position
            count = min(len(ids), chunk - first % chunk)
            inside = [cut for cut in capture if first < cut <= first + count]
            with session.step(ids[:count], capture=inside) as step:
                self.write(step, producer)
            ids = ids[count:]
        return session

    def write(self, step, producer):
        """Rows of a step: exact in float32 up to position 4,095, producer 63 and layer 15."""
        for layer, facts in enumerate(self.geometry.layers):
            marks = torch.arange(step.first, step.stop).double() * 1024 + producer * 16 + layer
            key = marks[:, None, None].repeat(1, facts.num_kv_heads, facts.head_dim).float()
            value = marks[:, None, None].repeat(1, facts.num_kv_heads, facts.value_head_dim)
            step.write(layer, key, -value.float())


def producers_of(session):
    """By layer: who made each live row; a row at another position or layer is an error."""
    found = {}
    for layer in session.planes:
        live = session.live(layer)
        spans = session.spans(layer, live.start, live.stop)
        marks = [round(float(key[row, 0, 0])) for key, _ in spans for row in range(len(key))]
        for position, mark in zip(live, marks, strict=True):
            assert (position, layer) == (mark // 1024, mark % 16)
        found[layer] = [mark % 1024 // 16 for mark in marks]
    return found


def bits_of(session):
    """Position, ids, cursors and every live row, to be compared for equality of bits."""
    rows = []
    for layer in sorted(session.planes):
        live = session.live(layer)
        for key, value in session.spans(layer, live.start, live.stop):
            rows += [key.contiguous(), value.contiguous()]
    joined = [row.view(torch.uint8).numpy().tobytes() for row in rows]
    cursors = {name: cursor.as_tuple() for name, cursor in session.cursors.items()}
    return session.position, session.tokens, cursors, b"".join(joined)
