"""The store's own order of attention inside an unmodified model."""

import pytest
import torch

import zoo
from kvplane.errors import ArgumentError
from kvplane.integrations.transformers import HybridCache
from kvplane.integrations.transformers.attention import no_mask
from zoo import modes

torch.set_num_threads(1)

# soft-caps, sinks, shared rows, two dims, states beside rows, and plain ones
NAMES = [
    name
    for name in zoo.names()
    if name
    in {
        "muse_glimmer",
        "gemma2",
        "gemma3n_text",
        "gemma4_text_shared",
        "gpt_oss",
        "granite_swa",
        "flint",
        "mimo_v2_flash",
        "modernbert-decoder",
        "lfm3",
        "lara_mini",
        "olmo3",
        "phi3",
        "qwen3",
        "vaultgemma",
    }
]
# float32 in two orders of summation, through eight layers
TOLERANCE = 2e-4


def ordered(model, **options):
    return HybridCache(model, attention="kvplane", **options)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_stock_cache_but_for_the_order_of_sums(name):
    # sdpa knows neither soft-caps nor sinks
    model = zoo.build(name, attention="eager")
    ids = zoo.text(60)
    sizes = [21, *[1] * 10, 7, *[1] * 22]
    expected = modes.calls(model, modes.stock(model), ids, sizes)
    found = modes.calls(model, ordered(model), ids, sizes)
    scale = max(float(one.abs().max()) for one in expected)
    worst = max(
        float((one - other).abs().max()) for one, other in zip(expected, found, strict=True)
    )

    assert worst <= TOLERANCE * scale


@pytest.mark.parametrize("mode", ["greedy", "beams", "prompt_lookup", "two_turns", "fork"])
def test_every_way_of_generating_agrees_with_itself(mode):
    model = zoo.build("muse_glimmer")
    first, second = (modes.MODES[mode](model, lambda: ordered(model)) for _ in range(2))

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_bits_do_not_depend_on_rotation_in_the_blocked_order_and_do_in_the_physical():
    model = zoo.build("muse_glimmer")
    ids = zoo.text(80)
    for attention, same in (("kvplane", True), ("physical", False)):
        cache = HybridCache(model, attention=attention)
        modes.calls(model, cache, ids, [27, 1])
        turned = HybridCache(model, attention=attention)
        snapshot = cache.session.snapshot()
        store = turned.made_store(torch.float32, "cpu")
        cursors = {
            name: (capacity, length, origin, 0 if capacity == zoo.WINDOW else row)
            for name, (capacity, length, origin, row) in snapshot.cursors.items()
        }
        assert cursors != snapshot.cursors
        builder = store.builder(cursors, tokens=snapshot.tokens)
        for layer, (key, value) in snapshot.rows.items():
            first = builder.cursors[store.plan.group_ids[layer]].origin_logical
            builder.write(layer, first, key, value)
        turned.adopt(builder.finish())
        sizes = [1] * 40
        one, other = (modes.calls(model, each, ids[:, 28:], sizes) for each in (cache, turned))

        assert same == all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_order_is_in_the_numerics():
    model = zoo.build("muse_glimmer")
    for attention, order in (("kvplane", "blocked"), ("physical", "physical")):
        cache = HybridCache(model, attention=attention)
        modes.call(model, cache, zoo.text(5))

        assert order == cache.store.describe().numerics["attention"]


def test_a_model_that_was_switched_back_is_refused_before_anything_is_written():
    model = zoo.build("muse_glimmer")
    cache = ordered(model)
    modes.call(model, cache, zoo.text(5))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ArgumentError, match=r'set_attn_implementation\("kvplane"\)'):
        modes.call(model, cache, zoo.text(1))

    assert 5 == cache.seen


def test_another_cache_in_a_model_that_attends_in_the_stores_order_is_refused():
    model = zoo.build("muse_glimmer")
    ordered(model)
    for cache in (modes.stock(model), HybridCache(model)):
        with pytest.raises(ArgumentError, match="other keys"):
            modes.call(model, cache, zoo.text(5))


def test_padding_and_pictured_masks_are_refused():
    model = zoo.build("muse_glimmer")
    cache = ordered(model)
    ids, mask = modes.padded(9, 5)
    with pytest.raises(ArgumentError, match="no padding"):
        modes.call(model, cache, ids, attention_mask=mask)
    with pytest.raises(ArgumentError, match="a mask"):
        modes.call(model, cache, ids, attention_mask=torch.zeros(2, 1, 9, 9))

    assert 0 == cache.seen
    with pytest.raises(ArgumentError, match="a plain window"):
        no_mask(attention_mask=None, allow_is_causal_skip=False)
