"""What a configuration is read to say, against what the model class then does."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

import zoo
from kvplane.geometry import ModelGeometry

torch.set_num_threads(1)

TOKEN = 7
NUM_TOKENS = 6
LATER = 3
# its share of rotated elements is made for a head of 192, and is odd for one of 16
ODD_SHARE = {"mimo_v2_flash"}


def caches_of(name):
    """The stock cache of a model whose layers each get the same hidden state at every position.

    A row of keys then depends on its position through rotation alone.
    """
    model = zoo.build(name)
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            module.register_forward_pre_hook(only_the_first_state, with_kwargs=True)
    cache = DynamicCache(config=zoo.configuration(name))
    with torch.no_grad():
        model(torch.full((1, NUM_TOKENS), TOKEN), past_key_values=cache)
    return cache.layers


def only_the_first_state(module, arguments, named):
    del module
    if "hidden_states" in named:
        named["hidden_states"] = repeated(named["hidden_states"])
    elif arguments:
        arguments = (repeated(arguments[0]), *arguments[1:])
    return arguments, named


def repeated(states):
    return states[..., :1, :].expand_as(states)


def rotated(key, position, rotary):
    """A key row at position 0 as it is at `position`, in float64."""
    key = key.double().clone()
    half = rotary.dim // 2
    angles = position * rotary.base ** -(torch.arange(half, dtype=torch.float64) / half)
    if rotary.convention == "half":
        first, second = slice(0, half), slice(half, rotary.dim)
    else:
        first, second = slice(0, rotary.dim, 2), slice(1, rotary.dim, 2)
    left, right = key[..., first].clone(), key[..., second].clone()
    key[..., first] = left * angles.cos() - right * angles.sin()
    key[..., second] = right * angles.cos() + left * angles.sin()
    return key


def rows_of(layer):
    keys = getattr(layer, "keys", None)
    return None if keys is None or keys.numel() == 0 else (keys, layer.values)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", zoo.names())
def test_a_configuration_says_what_its_model_keeps(name):
    geometry = ModelGeometry.from_config(zoo.configuration(name), dtype="float32")
    # the lower end of the supported range makes no layers for those that share rows
    layers = [*caches_of(name), *[None] * len(geometry.layers)]
    for layer, its in enumerate(geometry.layers):
        rows = rows_of(layers[layer])

        assert its.owns_rows == (rows is not None), layer
        if rows is None:
            continue
        keys, values = rows

        assert (its.num_kv_heads, its.head_dim) == (keys.shape[1], keys.shape[3])
        assert (its.num_kv_heads, its.value_head_dim) == (values.shape[1], values.shape[3])
        assert its.sliding_window == getattr(layers[layer], "sliding_window", None)
        check_rotation(name, its.rotary, keys)


def check_rotation(name, rotary, keys):
    tolerance = 1e-4 * float(keys.abs().max())
    first, later = keys[0, :, 0], keys[0, :, LATER].double()
    if rotary is None:
        assert float((first - later).abs().max()) < tolerance
        return
    assert float((first - later).abs().max()) > tolerance
    if rotary.scaling is None and name not in ODD_SHARE:
        assert float((rotated(first, LATER, rotary) - later).abs().max()) < tolerance


@pytest.mark.parametrize("name", zoo.names())
def test_a_configuration_its_dict_and_its_file_say_the_same(name, tmp_path):
    config = zoo.configuration(name)
    whole = ModelGeometry.from_config(config)
    config.save_pretrained(tmp_path)

    assert whole == ModelGeometry.from_config(config.to_dict())
    assert whole == ModelGeometry.from_config(tmp_path)
    assert whole == ModelGeometry.from_config(str(tmp_path / "config.json"))
