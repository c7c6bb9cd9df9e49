"""HybridCache in mapped memory: a decode call is shown the rows where they lie."""

import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.cache_utils import DynamicCache

from kvplane.integrations.transformers import HybridCache

WINDOW = 64
CONFIG = Gemma3TextConfig(
    num_hidden_layers=4,
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    sliding_window=WINDOW,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
)


def lies_in(rows, plane):
    """Whether a tensor is a view of a plane's memory."""
    return rows.untyped_storage().data_ptr() == plane.key.untyped_storage().data_ptr()


@pytest.mark.parametrize("memory", ["mapped", "heap"])
def test_a_decode_call_gets_views_wherever_rings_are_unrolled(memory):
    cache = HybridCache(CONFIG, memory=memory)
    stock = DynamicCache(config=CONFIG)
    copied = set()
    for position in range(2 * WINDOW + 5):
        shown = {}
        for layer in range(4):
            key, value = torch.randn(2, 1, 2, 1, 32)
            expected = stock.update(key, value, layer)
            shown[layer] = cache.update(key, value, layer)

            assert torch.equal(expected[0], shown[layer][0])
            assert torch.equal(expected[1], shown[layer][1])
        planes = cache.session.planes
        for layer, rows in shown.items():
            if not all(lies_in(part, planes[layer]) for part in rows):
                copied.add((layer, position))

    # on the heap a window that wraps is copied into one piece
    sliding = {layer for layer, _ in copied}

    assert sliding == (set() if memory == "mapped" else {0, 1, 2})
    assert all(position >= WINDOW for _, position in copied)
