"""The store's own order of attention inside an unmodified transformers model.

Registered under the name "kvplane"; keys that a `HybridCache` returned carry where their rows are,
and the function below attends over those rows in the store's order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvplane.errors import ArgumentError
from kvplane.step import Step

NAME = "kvplane"
_TAG = "kvplane_rows"


class Rows(NamedTuple):
    """Where the rows behind a tensor of keys are."""

    step: Step
    layer: int
    batched: bool


def tag(keys: Tensor, rows: Rows) -> Tensor:
    """The same keys, as a view that says where its rows are."""
    tagged = keys.view(keys.shape)
    setattr(tagged, _TAG, rows)
    return tagged


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **facts: Any,  # noqa: ANN401 - the host's signature
) -> tuple[Tensor, None]:
    """Attention over the rows of a `HybridCache`, [batch, tokens, heads, value_dim].

    Raises:
        ArgumentError: the keys are not a `HybridCache`'s, or a mask hides some of them.
    """
    del module, value, facts
    rows: Rows | None = getattr(key, _TAG, None)
    if rows is None or attention_mask is not None:
        raise ArgumentError(
            argument="attn_implementation",
            expected='"kvplane" with a HybridCache(attention="kvplane") and no padding',
            got="other keys" if rows is None else "a mask",
        )
    queries = query.transpose(1, 2)
    out = rows.step.attend(
        rows.layer,
        queries if rows.batched else queries[0],
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return (out if rows.batched else out[None]), None


def no_mask(
    *args: object,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **facts: object,
) -> None:
    """No mask: the store knows what is causal and the window, and nothing else.

    Raises:
        ArgumentError: padding, or a pattern that lets tokens see others than those.
    """
    del args, facts
    if not allow_is_causal_skip:
        raise ArgumentError(
            argument="attention_mask", expected='a plain window with "kvplane"', got="a pattern"
        )
    if attention_mask is not None and not bool(torch.all(attention_mask)):
        raise ArgumentError(
            argument="attention_mask", expected='no padding with "kvplane"', got="zeros"
        )


def use_store_order(model: Any) -> None:  # noqa: ANN401 - any transformers model
    """Make a model attend in the store's order, until another implementation is set."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)
    model.set_attn_implementation(NAME)
