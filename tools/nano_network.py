"""glimmer-nano's network: transformers' own Muse Glimmer class at a small size, and how it trains.

The vision tower that the class drags along has no layers and 1,088 parameters, all zero: the model
is used with `input_ids` alone. Training reads the sliding layers' windows in blocks, which gives
what transformers' masks give at an eighth of their cost on 2,048 bytes; everything else is the
class's own code.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

BOS, EOS, PAD, IMAGE, VIDEO, VOCABULARY = 256, 257, 258, 259, 260, 264
BLOCKED = "nano_blocked"


def configuration(*, size: str = "nano") -> MuseGlimmerConfig:
    """The shipped model's configuration, or with size "tiny" one that only proves the script."""
    hidden, ffn, window = {"nano": (256, 640, 128), "tiny": (64, 96, 32)}[size]
    heads = hidden // 32
    special: dict[str, Any] = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return MuseGlimmerConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": 8,
            "num_attention_heads": heads,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "sliding_window": window,
            "max_position_embeddings": 131_072,
            "output_multiplier": 1.0,
            **special,
        },
        vision_config={
            "patch_size": 1,
            "pos_emb_height": 1,
            "pos_emb_width": 1,
            "num_attention_heads": 1,
            "num_hidden_layers": 0,
            "hidden_size": 4,
            "intermediate_size": 4,
            "patch_temporal": 1,
            "merge_size": 1,
            "max_position_embeddings": 1,
        },
        out_hidden_size=4,
        projector_hidden_size=4,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **special,
    )


def build(config: MuseGlimmerConfig, *, dropout: float) -> MuseGlimmerForConditionalGeneration:
    """A fresh network in f32 for training, its vision weights zero.

    Args:
        config: From `configuration`.
        dropout: The share of each sub-layer's output that training sets to zero. The class has
            dropout on attention weights only, so it is added from outside and is not saved.
    """
    model = MuseGlimmerForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision" in name:
                parameter.zero_()
                parameter.requires_grad = False

    def drop(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return functional.dropout(output, dropout, training=module.training)

    if dropout:
        for layer in model.model.language_model.layers:
            layer.post_attention_layernorm.register_forward_hook(drop)
            layer.post_feedforward_layernorm.register_forward_hook(drop)
    return model


def use_blocked_attention(model: MuseGlimmerForConditionalGeneration) -> None:
    """Let `model` attend block by block; lengths must then be multiples of its window."""
    # no mask builder has this name, so transformers builds no mask
    AttentionInterface.register(BLOCKED, blocked_attention)
    model.set_attn_implementation(BLOCKED)


def blocked_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: None,
    scaling: float,
    sliding_window: int | None = None,
    **_ignored: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Causal attention of whole sequences, [batch, heads, tokens, head_dim] in.

    A block of `sliding_window` queries sees its own block of keys and the one before it:

        keys      j - window ......... j ......... j + window
        query j             (j - window, j]

    Returns:
        The output as [batch, tokens, heads, head_dim], and no weights.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    batch, heads, tokens, head_dim = query.shape
    groups = heads // key.shape[1]
    if sliding_window is None:
        key, value = (rows.repeat_interleave(groups, dim=1) for rows in (key, value))
        full = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
        return full.transpose(1, 2), None
    window, blocks = sliding_window, tokens // sliding_window
    key, value = (_with_previous_block(rows, window) for rows in (key, value))
    # [batch * blocks, kv_heads, groups * window, head_dim]: the heads that share keys are rows
    rows = query.view(batch, -1, groups, blocks, window, head_dim).permute(0, 3, 1, 2, 4, 5)
    rows = rows.reshape(batch * blocks, -1, groups * window, head_dim)
    mask = _band(window, blocks, query.device).repeat(batch, 1, groups, 1)
    out = functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    out = out.view(batch, blocks, -1, groups, window, head_dim).permute(0, 1, 4, 2, 3, 5)
    return out.reshape(batch, tokens, heads, head_dim), None


def _with_previous_block(rows: Tensor, window: int) -> Tensor:
    batch, heads, _, head_dim = rows.shape
    blocks = rows.view(batch, heads, -1, window, head_dim)
    before = functional.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :, :-1]
    pairs = torch.cat((before, blocks), dim=3).transpose(1, 2)
    return pairs.reshape(-1, heads, 2 * window, head_dim)


def _band(window: int, blocks: int, device: torch.device) -> Tensor:
    """Which of two key blocks' rows each query row sees, [blocks, 1, window, 2 * window]."""
    row = torch.arange(window, device=device)[:, None]
    column = torch.arange(2 * window, device=device)[None, :]
    band = (column > row) & (column <= row + window)
    # the first block has none before it
    has_before = torch.arange(blocks, device=device) > 0
    return (band & (has_before[:, None, None] | (column >= window)))[:, None]


def byte_losses(model: MuseGlimmerForConditionalGeneration, ids: Tensor) -> Tensor:
    """Nats each token of `ids` but the first cost, f32, [batch, tokens - 1].

    The head runs in f32 under autocast too: a soft-capped logit near 20 has few bits in bf16.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    text: Any = model.config.text_config
    return _head_losses(
        hidden,
        model.lm_head.weight,
        ids[:, 1:],
        text.output_multiplier,
        text.final_logit_softcapping,
    )


def _head_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, multiplier: float, cap: float
) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = functional.linear(hidden.float(), weight.float()) * (multiplier / cap)
        logits = cap * torch.tanh(logits)
        return functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
