"""What the exactness gates share: models, an undisturbed run, and how bits are compared."""

import functools

import torch

from hybrid_model import HybridModel, text
from kvplane import Layout

W = 64
AT = (1, 31, 32, 33, W - 1, W, W + 1, 2 * W - 1, 2 * W, 2 * W + 1)
WRAPPED = (W + 1, 2 * W - 1, 2 * W + 1)
NEXT = 64
MODELS = {
    "8 layers, window 64, f32": (8, (W,), "float32"),
    "13 layers, windows 32 and 64, bf16": (13, (32, W), "bfloat16"),
    "8 layers, windows 64 and 32, f16": (8, (W, 32), "float16"),
}
LAYOUTS = [
    {"sliding_attention": ring, "full_attention": full} for ring in Layout for full in Layout
]


@functools.cache
def model(name):
    layers, windows, dtype = MODELS[name]
    return HybridModel(layers, *windows, dtype=dtype)


@functools.cache
def undisturbed(name, tokens, order="blocked"):
    """Logits of the 64 tokens after `tokens`, of a session to which nothing ever happened."""
    network = model(name)
    session = network.store(attention=order).open([])
    network.prefill(session, text(tokens))
    return network.decode(session, text(tokens + NEXT)[tokens:])


def same_bits(expected, got):
    """Whether two tensors are equal to the last bit, NaN and the sign of zero included."""
    as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in (expected, got)]
    return expected.dtype == got.dtype and torch.equal(*as_bytes)


def goes_on(name, session, tokens, *, count=NEXT):
    """Whether the next tokens' logits, 64 unless said, are those of the undisturbed session."""
    got = model(name).decode(session, text(tokens + count)[tokens:])
    assert torch.isfinite(got).all()
    return same_bits(undisturbed(name, tokens)[:count], got)


def planes(session):
    """Every byte of every row that is live, and where it lies."""
    return {
        (layer, row): (session.planes[layer].key[0, row], session.planes[layer].value[0, row])
        for group in session.groups
        for layer in group.layers
        for run in session.live_runs(group)
        for row in run
    }


def same_planes(expected, got):
    mine, theirs = planes(expected), planes(got)
    return mine.keys() == theirs.keys() and all(
        same_bits(a, b) for at in mine for a, b in zip(mine[at], theirs[at], strict=True)
    )
