"""Small roots of packs, for tests: two sliding groups and a full one, f16 rows from a seed."""

import torch

from kvplane import KVStore, ModelGeometry
from kvplane.geometry import LayerGeometry
from kvplane.pack import Fingerprint, PrefixCache, save_session


def small_geometry(dtype="float16"):
    kinds = (("sliding_attention", 32), ("full_attention", None), ("sliding_attention", 64)) * 2
    return ModelGeometry(
        layers=tuple(
            LayerGeometry(
                kind=kind, sliding_window=window, num_kv_heads=2, head_dim=4, value_head_dim=4
            )
            for kind, window in kinds
        ),
        dtype=dtype,
    )


GEOMETRY = small_geometry()
FINGERPRINT = Fingerprint.of(GEOMETRY, weights="tests")


def new_store():
    return KVStore(GEOMETRY, max_context=2048)


def grow(session, tokens, *, seed=0, chunk=256):
    """Add tokens whose rows are a function of the seed, the layer and the position alone."""
    for first in range(0, len(tokens), chunk):
        ids = tokens[first : first + chunk]
        with session.step(ids) as step:
            for layer in range(len(GEOMETRY.layers)):
                key, value = (
                    torch.stack([_row(seed, layer, what, p) for p in range(step.first, step.stop)])
                    for what in (0, 1)
                )
                step.write(layer, key, value)
    return session


def _row(seed, layer, what, position):
    mark = ((seed * 10 + layer) * 2 + what) * 4096 + position
    generator = torch.Generator().manual_seed(mark)
    return torch.randn(2, 4, generator=generator).half()


def make_root(root, *, lengths=(300,), cuts=(256,)):
    """Sessions "a", "b", ... of so many tokens of one text, and cuts of the first."""
    prefixes = PrefixCache(root, FINGERPRINT)
    for name, length in zip("abcdef", lengths, strict=False):
        session = new_store().open(tokens=[])
        done = 0
        for cut in [*(cut for cut in cuts if cut <= length), length]:
            grow(session, list(range(done, cut)))
            done = cut
            if name == "a" and cut in cuts:
                prefixes.publish(session, list(range(cut)))
        save_session(prefixes.storage, name, session, FINGERPRINT)
    return prefixes.storage
