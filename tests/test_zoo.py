"""The zoo is what the matrix says it is."""

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import zoo
from zoo.models import COMPOSITES, EXCLUDED, MODELS

torch.set_num_threads(1)

# what the lower end of the range does not have yet
NEW_SINCE_THE_LOWER_END = {
    "beam",
    "flint",
    "kolibri1",
    "lara_mini",
    "lfm3",
    "muse_spark",
    "recurrent_gemma",
}


def kinds(config):
    return get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]


@pytest.mark.parametrize("name", zoo.names())
def test_an_entry_is_built_with_the_layers_it_names(name):
    found = "".join(kind[0].upper() for kind in kinds(zoo.configuration(name)))
    # the lower end of the range leaves out layers that read another's rows
    found = found.ljust(len(MODELS[name].layers), "D")

    assert MODELS[name].layers == found


def test_at_least_31_model_classes_are_covered():
    assert len({MODELS[name].model_type for name in MODELS}) >= 31


def test_only_classes_that_this_version_lacks_are_left_out():
    missing = set(MODELS) - set(zoo.names())

    assert missing in (set(), NEW_SINCE_THE_LOWER_END)


def test_every_causal_class_with_sliding_layers_is_covered_or_excluded_with_a_reason():
    hybrid = set()
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[model_type]()
            found = kinds(config)
        except (AttributeError, ValueError, TypeError, StrictDataclassError):
            # no decoder of its own, or no default
            continue
        if any("sliding" in kind or "chunked" in kind for kind in found):
            hybrid.add(model_type)
    covered = {MODELS[name].model_type for name in MODELS} | set(EXCLUDED)

    assert set() == hybrid - covered


@pytest.mark.parametrize("name", zoo.names())
def test_a_model_generates_varied_text_with_the_stock_cache(name):
    model = zoo.build(name)
    prompts = zoo.text(21, batch=4)
    with torch.no_grad():
        out = model.generate(prompts, max_new_tokens=24, do_sample=False)

    assert (4, 45) == tuple(out.shape)
    assert len(set(out[:, 21:].flatten().tolist())) >= 8


def test_the_same_entry_has_the_same_weights_every_time():
    first, second = (zoo.build("muse_glimmer").state_dict() for _ in range(2))

    assert all(torch.equal(first[key], second[key]) for key in first)


def test_composite_models_are_named_by_classes_that_exist():
    assert all(
        hasattr(transformers, name)
        for model_type, name in COMPOSITES.items()
        if zoo.available(model_type)
    )


def test_a_stock_cache_is_what_results_are_compared_with():
    cache = DynamicCache(config=zoo.configuration("gemma2"))

    assert [True, False] * 4 == list(cache.is_sliding)
