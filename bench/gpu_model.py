"""Muse Glimmer's real 30B shape with random weights on a GPU, and caches that hold any context."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    StaticCache,
)

from kvplane.integrations.transformers import HybridCache

CONTEXT = 131_072
# the vision tower is not used: as small as it can be
VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def big_model(num_layers: int = 52) -> Any:
    """The model in bfloat16: built without memory, then filled on the device."""
    text = MuseGlimmerConfig().text_config.to_dict()
    cut = {name: text[name][:num_layers] for name in ("layer_types", "layer_rope_theta")}
    config = MuseGlimmerConfig(
        text_config={**text, **cut, "num_hidden_layers": num_layers},
        vision_config=VISION,
        out_hidden_size=32,
        projector_hidden_size=32,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = MuseGlimmerForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    model = model.to_empty(device="cuda").eval()
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.zero_()
            else:
                weight.normal_(0, 0.02, generator=generator)
        rotary = model.model.language_model.rotary_emb
        numbers, _ = rotary.compute_default_rope_parameters(rotary.config)
        rotary.inv_freq = nn.Buffer(numbers.to("cuda"), persistent=False)
        rotary.original_inv_freq = nn.Buffer(numbers.to("cuda"), persistent=False)
    return model


def cache_name(model: Any) -> str:
    """What this version of transformers calls a cache."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


@torch.no_grad()
def called(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Logits, or hidden states where there is no head, of the last token of each sequence."""
    facts = {cache_name(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        facts["logits_to_keep"] = 1
    out = model(input_ids=ids, **facts)
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state)[:, -1]


def hybrid(model: Any, position: int, **options: Any) -> HybridCache:
    """Our cache at a position, full of random rows."""
    cache = HybridCache(model, attention="kvplane", max_context=CONTEXT, **options)
    store = cache.made_store(torch.bfloat16, "cuda")
    cursors = {}
    for group in store.geometry.groups:
        capacity = store.plan.capacities[group.id]
        length = min(position, capacity)
        origin = position - length
        cursors[group.id] = (capacity, length, origin, divmod(origin, capacity)[1])
    builder = store.builder(cursors)
    for layer, plane in builder.planes.items():
        del plane
        live = builder.cursors[store.plan.group_ids[layer]].live
        for key, value in builder.rows(layer, live.start, live.stop):
            key.normal_()
            value.normal_()
        builder.filled(layer, live.start, live.stop)
    cache.adopt(builder.finish())
    return cache


def dynamic(model: Any, position: int) -> DynamicCache:
    """The stock growing cache at a position."""
    return _filled(DynamicCache(config=model.config.get_text_config()), position)


def static(model: Any, position: int) -> StaticCache:
    """The stock preallocated cache at a position."""
    text = model.config.get_text_config()
    return _filled(StaticCache(config=text, max_cache_len=CONTEXT), position)


def _filled(cache: Any, position: int) -> Any:
    sizes = (1, 2, position, 128)
    rows = [torch.randn(sizes, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for layer in range(len(cache.layers)):
        cache.update(*rows, layer)
    return cache
