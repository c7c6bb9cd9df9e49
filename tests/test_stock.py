"""The plan of the stock caches against the stock caches, storage by storage."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING
from transformers.cache_utils import DynamicCache, StaticCache

from kvplane.errors import ArgumentError
from kvplane.geometry import FULL, SLIDING, ModelGeometry
from kvplane.stock import Stock, dynamic_cache, static_cache

torch.set_num_threads(1)

S, F = SLIDING, FULL
PATTERNS = {"SSSF": [S, S, S, F], "FSSF": [F, S, S, F], "FS": [F, S], "S": [S, S], "F": [F]}
# more layers than rows of a window: the prompt itself takes the most
PATTERNS["S12F"] = [*[S] * 12, F]


class Peak(TorchDispatchMode):
    """The most bytes of cache rows alive at once: those there before, and those made inside.

    Args:
        before: tensors of the cache.
        activations: the model's own, which are not counted, nor are views of them.
    """

    def __init__(self, before, activations):
        super().__init__()
        self.peak = 0
        self._made = [weakref.ref(tensor) for tensor in before if tensor is not None]
        self._foreign = {tensor.untyped_storage().data_ptr() for tensor in activations}

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        self._made += [
            weakref.ref(tensor)
            for tensor in (result if isinstance(result, (tuple, list)) else [result])
            # integers and empty tensors are bookkeeping
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        ]
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self):
        self._made = [made for made in self._made if made() is not None]
        storages = storages_of(made() for made in self._made)
        return sum(size for where, size in storages.items() if where not in self._foreign)


def storages_of(tensors):
    """Bytes by address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def rows_of(cache):
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


def model(pattern, *, window=8, head_dim=8, v_head_dim=8):
    kinds = PATTERNS[pattern]
    config = CONFIG_MAPPING["gemma2"](
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        sliding_window=window,
        num_key_value_heads=2,
        head_dim=head_dim,
    )
    geometry = ModelGeometry.uniform(
        kinds,
        sliding_window=window,
        num_kv_heads=2,
        head_dim=head_dim,
        value_head_dim=v_head_dim,
        dtype="float32",
    )
    return config, geometry


def measured(make, geometry, calls):
    """Bytes held after the calls, and the most at any instant beside the activations."""
    cache = make()
    peak = 0
    for num_tokens in calls:
        for layer, its in enumerate(geometry.layers):
            shape = (1, its.num_kv_heads, num_tokens)
            key, value = torch.zeros(*shape, its.head_dim), torch.zeros(*shape, its.value_head_dim)
            with Peak(rows_of(cache), (key, value)) as watch:
                cache.update(key, value, layer)
            peak = max(peak, watch.peak)
    return sum(storages_of(rows_of(cache)).values()), peak


CONTEXTS = (1, 2, 7, 8, 9, 10, 20)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("v_head_dim", [8, 4, 16])
def test_a_dynamic_cache_holds_and_peaks_as_planned(pattern, context, v_head_dim):
    config, geometry = model(pattern, v_head_dim=v_head_dim)
    plan = dynamic_cache(geometry, context=context)
    ways = {
        "one by one": [1] * context,
        "prompt": [context],
        "prompt and one": [n for n in (context - 1, 1) if n],
    }
    held, peaks = {}, {}
    for way, calls in ways.items():
        held[way], peaks[way] = measured(lambda: DynamicCache(config=config), geometry, calls)

    assert plan.held == held["one by one"] == held["prompt and one"]
    assert plan.after_prompt == held["prompt"]
    assert plan.peak == max(peaks.values())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("max_context", [20, 21])
def test_a_static_cache_holds_and_peaks_as_planned(pattern, context, max_context):
    config, geometry = model(pattern, v_head_dim=4)
    plan = static_cache(geometry, context=context, max_context=max_context)
    held, peak = measured(
        lambda: StaticCache(config=config, max_cache_len=max_context), geometry, [1] * context
    )

    assert (plan.held, plan.after_prompt) == (held, held)
    assert plan.peak == peak


def test_a_prompt_in_one_piece_leaves_its_whole_length_in_a_dynamic_cache():
    muse = ModelGeometry.preset("muse-glimmer-30b")
    plan = dynamic_cache(muse, context=131_072)

    assert 6_979_321_856 == plan.after_prompt
    assert 1_826_619_392 == plan.held
    assert 1_826_619_392 == static_cache(muse, context=9, max_context=131_072).held


def test_a_layer_that_shares_rows_counts_nothing():
    layers = ModelGeometry.uniform([S, F], sliding_window=8, num_kv_heads=2, head_dim=8).layers
    shared = ModelGeometry.from_dict(
        {
            "dtype": "bfloat16",
            "layers": [
                *ModelGeometry(layers=layers).to_dict()["layers"],
                {**ModelGeometry(layers=layers).to_dict()["layers"][1], "shares_kv_with": 1},
            ],
        }
    )

    assert dynamic_cache(ModelGeometry(layers=layers), context=9) == dynamic_cache(
        shared, context=9
    )


def test_sessions_add_up():
    assert Stock(held=3, after_prompt=6, peak=9) == Stock(held=1, after_prompt=2, peak=3) * 3


@pytest.mark.parametrize("number", [0, -1, 1.0, True])
def test_a_context_is_a_whole_number_of_at_least_1(number):
    _, geometry = model("SSSF")
    with pytest.raises(ArgumentError, match="context: expected at least 1"):
        dynamic_cache(geometry, context=number)
    with pytest.raises(ArgumentError, match="context: expected at least 1"):
        static_cache(geometry, context=number, max_context=9)


def test_a_static_cache_is_no_shorter_than_its_context():
    _, geometry = model("SSSF")
    with pytest.raises(ArgumentError, match="max_context: expected at least 9, got 8"):
        static_cache(geometry, context=9, max_context=8)
