"""Two layouts by two kinds of layer: the same bits from each, and what each costs here."""

import statistics
import time

import torch

from kvplane import KVStore, Layout, ModelGeometry

KINDS = ["sliding_attention", "full_attention"]
WINDOW, CONTEXT, ROUNDS = 512, 4096, 30
shape = ModelGeometry.uniform(KINDS, sliding_window=WINDOW, num_kv_heads=2, head_dim=64)
draw = torch.Generator().manual_seed(15)
keys = torch.randn(2, 2, CONTEXT + ROUNDS, 2, 64, generator=draw).bfloat16()
queries = torch.randn(2, CONTEXT + ROUNDS, 8, 64, generator=draw).bfloat16()

said, times = {}, {}
for layout in Layout:
    store = KVStore(shape, max_context=8192, layout=dict.fromkeys(KINDS, layout))
    session = store.open()
    while session.position < CONTEXT:
        with session.step(256) as step:
            for layer in range(2):
                step.write(layer, *keys[:, layer, step.first : step.stop])
    times |= {(layout, kind): [] for kind in KINDS}
    outs = []
    for _ in range(ROUNDS):
        with session.step(1) as step:
            now = slice(step.first, step.stop)
            for layer, kind in enumerate(KINDS):
                begin = time.perf_counter()
                outs.append(step.attend(layer, queries[layer, now], *keys[:, layer, now]))
                times[layout, kind].append(time.perf_counter() - begin)
    said[layout] = torch.stack(outs)

print(f"one token, store and attend: microseconds, median of {ROUNDS}; * is the default")
for (layout, kind), seconds in times.items():
    default = KVStore(shape, max_context=1).plan.layouts[kind] is layout
    mark = "*" if default else " "
    print(f"  {kind:18} {layout.value} {mark} {1e6 * statistics.median(seconds):8.0f}")
same = torch.equal(*said.values())
print("both layouts say the same bits:", same)
raise SystemExit(not same)
