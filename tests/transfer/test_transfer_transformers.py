"""A transformers cache that is filled on one machine and goes on on another."""

import pytest
import torch
from handoffs import QUICK, both

from kvplane.errors import ArgumentError
from kvplane.integrations.transformers import HybridCache
from kvplane.integrations.transformers.calls import call, prefill
from kvplane.integrations.transformers.handoff import StreamingPrefill, receive_into
from kvplane.models import nano
from kvplane.transfer import TransferRefused, memory_links

IDS = [nano.BOS, *nano.encode(nano.heldout_text()[:700])]


@pytest.fixture(name="model")
def model_of_its_own():
    return nano.load_nano()


def handed(model, ids, *, other=None, **options):
    near, far = memory_links()
    mine, theirs = HybridCache(model, **options), HybridCache(other or model, **options)
    ends = both(
        lambda: StreamingPrefill(model, mine, near, chunk=256, **QUICK).read(ids),
        lambda: receive_into(theirs, far, **QUICK),
    )
    return mine, theirs, ends


@pytest.mark.parametrize("attention", ["view", "kvplane"])
def test_the_receiver_says_what_the_sender_would_have_said(model, attention):
    mine, theirs, ends = handed(model, IDS, attention=attention)

    assert len(IDS) - 1 == ends.sent.tokens == ends.received.tokens == theirs.seen
    assert IDS[:-1] == theirs.tokens
    token = IDS[-1]
    for _ in range(8):
        expected, got = (call(model, cache, [token]) for cache in (mine, theirs))
        assert torch.equal(expected, got)
        token = int(got.argmax())


def test_rows_are_those_of_a_prefill_that_sends_nothing(model):
    mine, _, _ = handed(model, IDS)
    quiet = HybridCache(model)
    prefill(model, quiet, IDS[:-1])

    assert torch.equal(call(model, quiet, IDS[-1:]), call(model, mine, IDS[-1:]))


def test_another_models_cache_is_refused(model):
    near, _ = memory_links()
    with pytest.raises(ArgumentError, match="made for this model"):
        StreamingPrefill(nano.load_nano(), HybridCache(model), near)


def test_another_models_rows_are_refused(model):
    other = nano.load_nano(dtype=torch.bfloat16)
    _, theirs, ends = handed(model, IDS[:20], other=other)

    assert isinstance(ends.received, TransferRefused)
    assert "dtype" == ends.received.field == ends.sent.field
    assert 0 == theirs.seen


def test_a_cache_that_holds_tokens_receives_none(model):
    cache = HybridCache(model)
    prefill(model, cache, IDS[:4])
    near, far = memory_links()
    del near
    with pytest.raises(ArgumentError, match="an empty one"):
        receive_into(cache, far)


def test_hooks_are_gone_afterwards(model):
    HybridCache(model)
    before = sum(len(module._forward_hooks) for module in model.modules())
    handed(model, IDS[:20])

    assert before == sum(len(module._forward_hooks) for module in model.modules())
