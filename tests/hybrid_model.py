"""A small hybrid transformer of plain PyTorch whose keys and values live in a kvplane session.

Sliding layers rotate queries and keys (RoPE), full layers carry no position (NoPE); grouped query
heads; random weights from a seed. It knows the store by `step.attend` alone.
"""

import torch
from torch import nn
from torch.nn import functional

from kvplane import KVStore, LayerGeometry, ModelGeometry, Rotary
from kvplane.schedule import canonical

VOCABULARY = 61
HIDDEN = 32
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
BASE = 10_000.0


class Layer(nn.Module):
    def __init__(self, number, window):
        super().__init__()
        self.number = number
        self.window = window
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.query = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.key = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.value = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.mlp_norm = nn.RMSNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def qkv(self, hidden, positions):
        """Query, key and value `[T, heads, dim]` of hidden states at positions."""
        normed = self.attention_norm(hidden)
        query = self.query(normed).view(-1, HEADS, HEAD_DIM)
        key = self.key(normed).view(-1, KV_HEADS, HEAD_DIM)
        value = self.value(normed).view(-1, KV_HEADS, HEAD_DIM)
        if self.window is not None:
            query, key = rotated(query, positions), rotated(key, positions)
        return query, key, value

    def forward(self, hidden, positions, step):
        query, key, value = self.qkv(hidden, positions)
        attended = step.attend(self.number, query, key, value)
        hidden = hidden + self.out(attended.reshape(len(hidden), -1))
        return hidden + self.down(functional.gelu(self.up(self.mlp_norm(hidden))))


class HybridModel(nn.Module):
    """Every fourth layer is full; the others slide over the given windows in turn.

    Args:
        num_layers: layers.
        windows: of the sliding layers, in turn.
        dtype: of weights, activations and rows.
        seed: of the weights.
    """

    def __init__(self, num_layers, *windows, dtype="float32", seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.dtype_name = dtype
        kinds = [
            None if layer % 4 == 3 else windows[layer % len(windows)] for layer in range(num_layers)
        ]
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(number, window) for number, window in enumerate(kinds))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.to(getattr(torch, dtype))
        self.geometry = ModelGeometry(
            layers=tuple(
                LayerGeometry(
                    kind="full_attention" if window is None else "sliding_attention",
                    sliding_window=window,
                    num_kv_heads=KV_HEADS,
                    head_dim=HEAD_DIM,
                    value_head_dim=HEAD_DIM,
                    rotary=None if window is None else Rotary(base=BASE, dim=HEAD_DIM),
                )
                for window in kinds
            ),
            dtype=dtype,
        )

    def store(self, *, max_context=1024, **options):
        """A store for this model."""
        return KVStore(self.geometry, max_context=max_context, **options)

    @torch.no_grad()
    def forward(self, step, ids):
        """Logits `[T, vocabulary]` of ids, whose rows an open step takes."""
        hidden = self.embedding(torch.tensor(ids))
        positions = torch.arange(step.first, step.stop)
        for layer in self.layers:
            hidden = layer(hidden, positions, step)
        return self.head(self.norm(hidden))

    def call(self, session, ids, **options):
        """Logits of ids taken in one step."""
        with session.step(ids, **options) as step:
            return self(step, ids)

    def prefill(self, session, ids, *, chunk=256):
        """Logits of ids on the canonical schedule, from the session's position on."""
        first = session.position
        calls = canonical(first, first + len(ids), chunk=chunk)
        return torch.cat(
            [self.call(session, ids[call.start - first : call.stop - first]) for call in calls]
        )

    def decode(self, session, ids):
        """Logits of ids taken one by one."""
        return torch.cat([self.call(session, [token]) for token in ids])


def rotated(rows, positions):
    """Rows `[T, heads, dim]` turned by their positions, first half with second."""
    half = rows.shape[-1] // 2
    rates = BASE ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = positions[:, None].float() * rates
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = rows[..., :half].float(), rows[..., half:].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(rows.dtype)


def text(length, seed=7):
    """Ids of a text; a longer one begins with the shorter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (4096,), generator=generator)[:length].tolist()
