"""Small roots of packs, for tests: two sliding groups and a full one, f16 rows from a seed."""

from functools import cache

import torch

from kvplane import KVStore, ModelGeometry
from kvplane.geometry import LayerGeometry
from kvplane.pack import Fingerprint, PrefixCache, save_session
from kvplane.pack.inventory import Kind, documents
from kvplane.storage import open_storage


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
        with session.step(tokens[first : first + chunk]) as step:
            for layer in range(len(GEOMETRY.layers)):
                rows = _rows(seed, layer)[:, step.first : step.stop]
                step.write(layer, *rows)
    return session


@cache
def _rows(seed, layer):
    """Keys and values of a layer at every position."""
    generator = torch.Generator().manual_seed(seed * 100 + layer)
    return torch.randn(2, 2048, 2, 4, generator=generator).half()


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


def cut_at(root, position):
    for one in documents(open_storage(root)):
        if one.kind is Kind.CUT and one.content.state.position == position:
            return one
    raise AssertionError(position)


def broken(report):
    return {problem.file for problem in report.problems}


def unusable(report):
    return {entry.name for entry in report.entries if not entry.usable}
