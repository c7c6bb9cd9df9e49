"""Small random models as folders that an engine loads offline.

Muse Glimmer is not among them: vLLM 0.32 imports torchvision for it, whose build for this torch
does not import without CUDA, and wants a tokenizer and a processor beside the weights.
"""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
)

VOCABULARY = 512


def gemma(folder, *, window=100):
    """Five sliding layers and a full one."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=window,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=8192,
    )
    return saved(Gemma3ForCausalLM(config), folder)


def gpt_oss(folder, *, window=100):
    """Sliding and full layers in turn, with sinks."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=window,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
        max_position_embeddings=8192,
    )
    return saved(GptOssForCausalLM(config), folder)


def saved(model, folder):
    """The folder, in bf16."""
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


MODELS = {"gemma": gemma, "gpt_oss": gpt_oss}
