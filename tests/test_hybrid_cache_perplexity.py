"""The store loses nothing: held-out text costs through the cache what it costs without one."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from kvplane.integrations.transformers import HybridCache
from kvplane.integrations.transformers.calls import call
from kvplane.models import BOS, encode, heldout_text, load_nano

torch.set_num_threads(1)

WINDOW = 128


def perplexity(logits, ids):
    """Of the tokens that followed, summed in float64."""
    return math.exp(cross_entropy(logits.double(), torch.tensor(ids)).item())


@pytest.mark.parametrize(
    "num_wraps", [8, pytest.param(64, marks=pytest.mark.slow)], ids=lambda count: f"{count}-wraps"
)
def test_perplexity_token_by_token_is_that_of_one_pass_without_a_cache(num_wraps):
    model = load_nano()
    length = WINDOW * (1 + num_wraps)
    ids = [BOS, *encode(heldout_text())][: length + 1]
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    cache = HybridCache(model)
    stepped = torch.stack([call(model, cache, [token]) for token in ids[:-1]])
    cursors = cache.session.cursors
    ring = next(cursors[g.id] for g in cache.session.groups if g.sliding_window == WINDOW)

    assert num_wraps == ring.origin_logical // WINDOW
    assert perplexity(whole, ids[1:]) == pytest.approx(perplexity(stepped, ids[1:]), rel=1e-6)
