"""What transformers asks of a layer and of a cache, beside the stock one; what is refused."""

import contextlib
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import zoo
from kvplane.errors import ArgumentError, GeometryError
from kvplane.geometry import ModelGeometry
from kvplane.integrations.transformers import HybridCache, kinds
from kvplane.integrations.transformers.layer import StoreLayer
from kvplane.integrations.transformers.options import context_of
from zoo import modes
from zoo.models import MODELS

torch.set_num_threads(1)


@pytest.mark.parametrize("name", zoo.names())
def test_each_layer_is_the_stores_or_transformers_own_as_transformers_says(name):
    config = zoo.configuration(name)
    cache = HybridCache(config)
    stock = DynamicCache(config=config)

    assert [kind in "SF" for kind in MODELS[name].layers[: len(cache)]] == [
        isinstance(layer, StoreLayer) for layer in cache.layers
    ]
    assert len(stock) == len(cache)
    assert list(stock.is_sliding) == list(cache.is_sliding)
    assert list(stock.is_linear) == list(cache.is_linear)
    assert [type(layer) for layer in stock.layers if not isinstance(layer, DynamicLayer)] == [
        type(layer) for layer in cache.layers if not isinstance(layer, StoreLayer)
    ]


@pytest.mark.parametrize("name", zoo.among("muse_glimmer", "lfm2", "lfm3", "mistral"))
def test_masks_are_sized_as_the_stock_cache_sizes_them(name):
    model = zoo.build(name)
    stock, cache = modes.stock(model), HybridCache(model)
    ids = zoo.text(60)
    layers = [layer for layer in range(8) if not cache.is_linear[layer]]
    for size in (1, 5, 1, 1, 9, 20, 1):
        for query_length in (1, 2, 8, 30):
            for layer in layers:
                expected = stock.get_mask_sizes(query_length, layer)

                assert expected == cache.get_mask_sizes(query_length, layer)
        assert stock.get_seq_length() == cache.get_seq_length()
        for each in (stock, cache):
            modes.call(model, each, ids[:, :size])


def test_rows_are_readable_as_transformers_layers_show_them():
    model = zoo.build("muse_glimmer")
    stock, cache = modes.stock(model), HybridCache(model)
    for each in (stock, cache):
        modes.calls(model, each, zoo.text(60), [21, 1, 1])
    for layer in range(8):
        theirs, ours = stock.layers[layer], cache.layers[layer]
        # a ring keeps the row that the next token overwrites
        count = theirs.keys.shape[2]

        assert torch.equal(theirs.keys, ours.keys[:, :, -count:])
        assert torch.equal(theirs.values, ours.values[:, :, -count:])
        assert (8 if ours.is_sliding else 23) == ours.keys.shape[2]


def test_a_layer_is_what_generate_checks_for():
    cache = HybridCache(zoo.configuration("muse_glimmer"))
    layer = cache.layers[0]

    assert isinstance(layer, CacheLayerMixin)
    assert (False, True, False) == (
        cache.is_compileable,
        cache.is_croppable,
        layer.supports_early_init,
    )
    assert (8, -1) == (cache.get_max_length(0), cache.get_max_length(3))
    assert not layer.is_initialized
    assert not cache.offloading


def test_a_cache_is_taken_by_its_older_name_too():
    model = zoo.build("muse_glimmer")
    expected = modes.generate(model, modes.stock(model), zoo.text(9), max_new_tokens=20)[0]
    cache = HybridCache(model)
    older = modes.keyword(model) == "past_key_values"
    with contextlib.nullcontext() if older else pytest.warns(FutureWarning, match="deprecated"):
        out = model.generate(zoo.text(9), past_key_values=cache, max_new_tokens=20, do_sample=False)

    assert torch.equal(expected, out)
    assert out[0, :-1].tolist() == cache.tokens


def test_a_layer_alone_cannot_be_changed():
    cache = HybridCache(zoo.configuration("muse_glimmer"))
    layer = cache.layers[3]
    doors = {
        "crop": lambda: layer.crop(0),
        "reset": layer.reset,
        "reorder_cache": lambda: layer.reorder_cache(torch.tensor([0])),
        "batch_repeat_interleave": lambda: layer.batch_repeat_interleave(2),
        "batch_select_indices": lambda: layer.batch_select_indices(torch.tensor([0])),
        "offload": layer.offload,
        "prefetch": layer.prefetch,
    }
    for what, door in doors.items():
        with pytest.raises(ArgumentError, match=f"the cache's {what}: layers change together"):
            door()


REFUSED = {
    "llama4_text": ("layer_types\\[0\\]", "attention in chunks"),
    "dory": ("model_type", "runs its layers several times"),
    "dots3_note": ("layer_types\\[0\\]", "indexer keys"),
    "deepseek_v4": ("layer_types\\[0\\]", "neither the store nor"),
    "inkling_text": ("layer_types", "nothing for a store to keep"),
    "falcon_h1": ("layer_types", "nothing for a store to keep"),
    "mamba": ("layer_types", "nothing for a store to keep"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_the_store_would_hold_wrongly_is_refused_by_name(model_type):
    if not zoo.available(model_type):
        return
    field, reason = REFUSED[model_type]
    with pytest.raises(GeometryError, match=reason) as refusal:
        HybridCache(CONFIG_MAPPING[model_type]())

    assert refusal.value.field == field.replace("\\", "")


def test_a_geometry_that_disagrees_with_transformers_is_refused(monkeypatch):
    config = zoo.configuration("muse_glimmer")
    other = ModelGeometry.from_config(zoo.configuration("cwm"), dtype="float32")
    monkeypatch.setattr(
        kinds, "ModelGeometry", SimpleNamespace(from_config=Mock(return_value=other))
    )
    with pytest.raises(GeometryError, match="transformers says sliding_attention with window 8"):
        kinds.geometry_of(config, kinds.kinds_of(kinds.text_config(config)), "float32")


def test_a_window_is_a_number():
    config = zoo.configuration("olmo3")
    config.sliding_window = None
    with pytest.raises(GeometryError, match="needs a window"):
        HybridCache(config)


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "sdpa"},
        {"max_context": 0},
        {"max_context": "long"},
        {"slack": -1},
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        HybridCache(zoo.configuration("cohere2"), **options)


def test_a_dtype_that_is_named_is_not_asked_for_by_its_older_name(monkeypatch):
    config = zoo.configuration("cohere2")
    config.dtype = torch.float16

    def warned(_):
        raise AssertionError("transformers warns about this name")

    monkeypatch.setattr(type(config), "torch_dtype", property(warned), raising=False)

    assert "float16" == ModelGeometry.from_config(config, dtype=None).dtype


def test_the_context_is_the_models_unless_one_is_asked_for():
    config = zoo.configuration("cohere2")

    assert (512, 7) == (
        HybridCache(config).max_context,
        HybridCache(config, max_context=7).max_context,
    )
    assert 131_072 == context_of(SimpleNamespace())


def test_memory_and_limit_reach_the_store():
    model = zoo.build("cohere2")
    cache = HybridCache(model, memory="heap", slack=3, limit=10**6)
    modes.call(model, cache, zoo.text(5))
    described = cache.store.describe()

    assert ("heap", 3, 10**6) == (
        described.memory["backend"],
        described.slack,
        cache.store.account.limit,
    )
    twin = cache.fork()
    assert cache.store is twin.store


def test_what_the_bits_depend_on_is_described():
    model = zoo.build("cohere2")
    cache = HybridCache(model)
    ids = zoo.text(9)
    modes.call(model, cache, ids[:, :5])
    view = cache.store.describe().numerics
    model.set_attn_implementation("eager")
    modes.calls(model, cache, ids[:, 5:], [1, 1])

    assert ("view", "sdpa") == (view["attention"], view["kernel"])
    assert "eager" == cache.store.describe().numerics["kernel"]
    runs = [(stop, made["kernel"]) for stop, made in cache.session.ledger.numerics]
    assert [(5, "sdpa"), (7, "eager")] == runs


def test_closing_gives_the_memory_back_and_is_idempotent():
    model = zoo.build("cohere2")
    cache = HybridCache(model)
    modes.call(model, cache, zoo.text(5))
    store = cache.store
    cache.close()
    cache.close()

    assert [] == store.sessions
    assert 0 == store.account.held
