"""Wrap a ring, snapshot it, restore it, and compare the bits of what attention says next."""

import torch

from kvplane import KVStore, ModelGeometry

kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
geometry = ModelGeometry.uniform(kinds, sliding_window=64, num_kv_heads=2, head_dim=32)
store = KVStore(geometry, max_context=4096)
generator = torch.Generator().manual_seed(15)


def attend(session, tokens):
    """One step: for each layer, keys and values in, attention out."""
    with session.step(tokens.shape[2]) as step:
        outs = [step.attend(layer, *tokens[:, layer]) for layer in range(len(kinds))]
    return torch.stack(outs)


def draw(num_tokens):
    return torch.randn(3, 4, num_tokens, 2, 32, generator=generator).bfloat16()


session = store.open()
for _ in range(3):
    attend(session, draw(100))

twin = store.restore(session.snapshot())
ring = session.cursors["s64.2x32x32.bf16"]
print(f"position {session.position}, live {ring.live}, oldest row {ring.origin_physical} of 64")

same = True
for _ in range(200):
    token = draw(1)
    same &= torch.equal(attend(session, token), attend(twin, token))
print("next 200 tokens bitwise equal after restore:", same)
raise SystemExit(not same)
