"""Small random models of transformers, on the device of the tests."""

import inspect
import os

import torch
from gpu_cases import error_of, same_bits
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
WINDOW = 20
# the interpreter takes a tenth of a second a layer
LAYERS = 4 if DEVICE == "cuda" else 2
STEPS = 2 * WINDOW if DEVICE == "cuda" else 5
TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": LAYERS // 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def muse(dtype: torch.dtype = torch.float32):
    torch.manual_seed(1)
    config = MuseGlimmerConfig(
        text_config={**TEXT, "layer_rope_theta": [10000.0, 0] * (LAYERS // 2)},
        vision_config=VISION,
        out_hidden_size=32,
        projector_hidden_size=32,
        image_token_id=95,
        video_token_id=96,
    )
    return MuseGlimmerForConditionalGeneration(config).eval().to(DEVICE, dtype)


def gemma(dtype: torch.dtype = torch.float32):
    torch.manual_seed(2)
    return Gemma3ForCausalLM(Gemma3TextConfig(**TEXT)).eval().to(DEVICE, dtype)


def ids(count: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(2, 90, (count,), generator=random).tolist()


@torch.no_grad()
def called(model, cache, tokens: list[list[int]]) -> Tensor:
    """Logits of the last token of each sequence, by the model's own call."""
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    rows = torch.tensor(tokens, device=DEVICE)
    return model(input_ids=rows, use_cache=True, **{name: cache}).logits[:, -1].clone()


def agree(first: Tensor, second: Tensor) -> bool:
    """Equal bits on a GPU; under the interpreter the store's own order is another kernel."""
    return same_bits(first, second) if DEVICE == "cuda" else error_of(first, second) < 1e-5


def held(cache) -> list[Tensor]:
    """Every live row of a cache."""
    rows = []
    for layer in range(LAYERS):
        live = cache.session.live(layer)
        for key, value in cache.session.spans(layer, live.start, live.stop):
            rows += [key.clone(), value.clone()]
    return rows
