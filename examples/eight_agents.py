"""Eight agents on one prefix: it is read once, its pages are shared, nobody disturbs another."""

import torch

from kvplane import KVStore, ModelGeometry

AGENTS, PREFIX, OWN, CHUNK = 8, 2048, 12, 256
kinds = ["sliding_attention"] * 3 + ["full_attention"]
shape = ModelGeometry.uniform(kinds, sliding_window=256, num_kv_heads=2, head_dim=128)
draw = torch.Generator().manual_seed(15)
prefix = torch.randn(2, 4, PREFIX, 2, 128, generator=draw).bfloat16()
own = torch.randn(AGENTS, 3, 4, OWN, 2, 128, generator=draw).bfloat16()


def read(session, rows):
    """A prompt's keys and values, a chunk at a time."""
    for first in range(0, rows.shape[2], CHUNK):
        part = rows[:, :, first : first + CHUNK]
        with session.step(part.shape[2]) as step:
            for layer in range(4):
                step.write(layer, *part[:, layer])


def say(session, rows, token):
    """One token; what attention says in the last layer."""
    with session.step(1) as step:
        for layer in range(4):
            out = step.attend(layer, *rows[:, layer, token : token + 1])
    return out


store = KVStore(shape, max_context=4096)
first = store.open()
read(first, prefix)
held = store.memory().pages_held
agents = [first, *(first.fork() for _ in range(AGENTS - 1))]
said = [
    [say(agent, own[number], token) for number, agent in enumerate(agents)] for token in range(OWN)
]
now = store.memory()
print(f"one session of {PREFIX:,} tokens: {held:,} bytes of pages")
print(f"{AGENTS} agents, {OWN} tokens further: {now.pages_held:,}, not {AGENTS * held:,}")
print(f"of that, in a fork: {store.describe().memory['fork']}")

alone = store.open()
read(alone, prefix)
same = all(torch.equal(say(alone, own[5], token), said[token][5]) for token in range(OWN))
print("the sixth agent says what it would have said alone:", same)
raise SystemExit(not same)
