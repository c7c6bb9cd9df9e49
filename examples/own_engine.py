"""An engine on the store, in plain PyTorch: requests share what they begin with, join, and leave.

All go forward in one batch a turn, and each says what it would have said alone.
"""

import torch

from kvplane import KVStore, ModelGeometry

KINDS, CHUNK = ["sliding_attention", "full_attention"], 256
WORDS, WIDTH, HEADS, KV_HEADS, DIM = 89, 64, 4, 2, 16
shape = ModelGeometry.uniform(KINDS, sliding_window=64, num_kv_heads=KV_HEADS, head_dim=DIM)
draw = torch.Generator().manual_seed(15)
embedding, head = (torch.randn(WORDS, WIDTH, generator=draw).bfloat16() for _ in range(2))
into = torch.randn(len(KINDS), WIDTH, (HEADS + 2 * KV_HEADS) * DIM, generator=draw).bfloat16() / 8
out = torch.randn(len(KINDS), HEADS * DIM, WIDTH, generator=draw).bfloat16() / 2


def forward(step, tokens):
    # a row at a time: a product's bits depend on its shape, so on who else is in the batch
    hidden = embedding[torch.tensor(tokens)]
    for layer in range(len(KINDS)):
        heads = torch.cat([row[None] @ into[layer] for row in hidden]).unflatten(-1, (-1, DIM))
        attended = step.attend(layer, *heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)).flatten(1)
        hidden = hidden + torch.cat([row[None] @ out[layer] for row in attended])
    return [int((head @ row).argmax()) for row in hidden]


class Engine:
    def __init__(self):
        self.store = KVStore(shape, max_context=2048)
        self.prefixes, self.running, self.said = {}, {}, {}

    def begin(self, name, prompt, *, shared=0):
        """Read a prompt; its first `shared` tokens only when no other request has."""
        prefix = tuple(prompt[:shared])
        if prefix and prefix not in self.prefixes:
            self.prefixes[prefix] = self.store.open()
            self.read(self.prefixes[prefix], prefix)
        session = self.prefixes[prefix].fork() if prefix else self.store.open()
        self.running[name] = session, self.read(session, prompt[shared:])
        self.said[name] = []

    def read(self, session, prompt):
        while prompt:
            now = prompt[: CHUNK - session.position % CHUNK]
            with session.step(list(now)) as step:
                tokens = forward(step, now)
            prompt = prompt[len(now) :]
        return tokens[-1]

    def turn(self):
        """One more token of every request."""
        sessions, tokens = map(list, zip(*self.running.values(), strict=True))
        with self.store.batch(sessions) as step:
            following = forward(step, tokens)
        for name, token, then in zip(list(self.running), tokens, following, strict=True):
            self.said[name].append(token)
            self.running[name] = self.running[name][0], then

    def end(self, name):
        """What it said; its rows are gone, those that others share are not."""
        self.running.pop(name)[0].close()
        return self.said.pop(name)


text = torch.randint(WORDS, (700,), generator=draw).tolist()
engine, alone = Engine(), Engine()
for number in range(4):
    engine.begin(number, [*text[:600], number], shared=512)
    engine.turn()
engine.end(1)
alone.begin(2, [*text[:600], 2])
for _ in range(40):
    engine.turn()
    alone.turn()
crowd, only = engine.end(2), alone.end(2)
same = crowd[: len(only)] == only
print("a request says in a crowd what it says alone:", same, only[:8])
raise SystemExit(not same)
