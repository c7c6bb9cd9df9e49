"""Your own model in plain PyTorch: every layer hands its rows to a step and gets attention back."""

import torch
from torch import nn
from torch.nn.functional import gelu, rms_norm

from kvplane import KVStore, ModelGeometry

KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
WORDS, WIDTH, HEADS, KV_HEADS, DIM = 97, 64, 4, 2, 16


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.into = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden, step):
        heads = self.into(rms_norm(hidden, (WIDTH,))).unflatten(-1, (-1, DIM))
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        if KINDS[self.layer] == "sliding_attention":
            positions = torch.arange(step.first, step.stop)
            query, key = rotated(query, positions), rotated(key, positions)
        hidden = hidden + self.out(step.attend(self.layer, query, key, value).flatten(1))
        return hidden + self.down(gelu(self.up(rms_norm(hidden, (WIDTH,)))))


def rotated(heads, positions):
    angles = positions[:, None, None] / 10_000 ** (torch.arange(DIM // 2) / (DIM // 2))
    left, right = heads.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


torch.manual_seed(15)
embedding, layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(map(Layer, range(len(KINDS))))


@torch.no_grad()
def read(session, ids):
    with session.step(ids) as step:
        hidden = embedding(torch.tensor(ids))
        for layer in layers:
            hidden = layer(hidden, step)
    return hidden @ embedding.weight.T


shape = ModelGeometry.uniform(KINDS, sliding_window=32, num_kv_heads=KV_HEADS, head_dim=DIM)
store = KVStore(shape, max_context=1024, dtype="float32")
one, all_at_once = store.open(), store.open()
ids = torch.randint(WORDS, (200,)).tolist()
by_token = torch.cat([read(one, [token]) for token in ids])
error = float((by_token - read(all_at_once, ids)).abs().max())
print(f"{len(ids)} tokens one by one, or all in one step: logits differ by at most {error:.1e}")
raise SystemExit(error > 1e-4)
