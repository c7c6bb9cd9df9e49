"""Small hybrid models with a tokenizer and a chat template, as folders that commands load."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

import zoo


def sliding(folder):
    """Five sliding layers of window 32, and a full one."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=32,
        initializer_range=0.08,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        max_position_embeddings=2048,
    )
    return saved(Gemma3ForCausalLM(config), folder)


def stateful(folder):
    """Sliding, full and convolution layers."""
    return saved(zoo.build("lfm3"), folder)


def saved(model, folder):
    """The folder; letters are tokens."""
    model.save_pretrained(folder)
    vocabulary = {chr(code): code - 28 for code in range(32, 127)}
    vocabulary |= {"<pad>": 0, "<bos>": 1, "<u>": 2, "<a>": 3}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 - no password
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",  # noqa: S106 - no password
        pad_token="<pad>",  # noqa: S106 - no password
        additional_special_tokens=["<u>", "<a>"],
        chat_template="<bos>{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
    ).save_pretrained(folder)
    return folder
