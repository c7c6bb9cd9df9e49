"""Attention inside a graph: one opaque operator stores a token's row and attends.

While a step is captured each attention module carries a `LayerCall`, which says where its rows are;
the function below, registered with transformers under the name "kvplane-graph", hands it to the
operator. Rows are reached by addresses in a device table, so a graph serves every session whose
address is put there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvplane.attention.triton_launch import Call, Rule, run
from kvplane.errors import ArgumentError
from kvplane.integrations.transformers.attention import no_mask

NAME = "kvplane-graph"
_CALL = "kvplane_call"


class LayerCall(NamedTuple):
    """Where the rows of a layer are, for one token a sequence.

    Args:
        key: a plane's keys: strides and dtype are read, and nothing else.
        value: likewise.
        cursors: int64 [sequences, 4] on the device, before the token.
        bases: addresses of the sequences' planes, int64 [sequences, 2] on the device.
        window: keys a query sees, its own included; 0 for all.
        stores: whether the layer's rows are its own.
        unrolled: whether planes show every row a second time, a capacity further.
    """

    key: Tensor
    value: Tensor
    cursors: Tensor
    bases: Tensor
    window: int
    stores: bool
    unrolled: bool


@dataclass(slots=True)
class _Planes:
    key: Tensor
    value: Tensor


@torch.library.custom_op("kvplane::decode", mutates_args=())
def decode_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plane_key: Tensor,
    plane_value: Tensor,
    cursors: Tensor,
    bases: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    stores: bool,  # noqa: FBT001 - operators take what schemas know
    unrolled: bool,  # noqa: FBT001
) -> Tensor:
    """Attention of one token a sequence, `[sequences, 1, heads, value_dim]`; its row is stored.

    Args:
        query: [sequences, 1, heads, head_dim].
        key: [sequences, 1, kv_heads, head_dim] in the planes' dtype.
        value: likewise.
        plane_key: as in `LayerCall`.
        plane_value: as in `LayerCall`.
        cursors: as in `LayerCall`.
        bases: as in `LayerCall`.
        sinks: a logit a head.
        window: as in `LayerCall`.
        scale: factor on the scores.
        softcap: 0 for none.
        stores: as in `LayerCall`.
        unrolled: as in `LayerCall`.
    """
    rule = Rule(window=window or None, scale=scale, softcap=softcap or None, sinks=sinks)
    call = Call(rule=rule, stores=stores, bases=bases, unrolled=unrolled)
    return run(_Planes(plane_key, plane_value), cursors, query, key, value, call=call)


@decode_rows.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, plane_key: Tensor, plane_value: Tensor, *_: object
) -> Tensor:
    del key, value, plane_key
    return query.new_empty((*query.shape[:3], plane_value.shape[-1]))


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
    """What transformers calls: `[sequences, 1, heads, value_dim]` of a module's `LayerCall`.

    Raises:
        ArgumentError: a mask.
    """
    del facts
    if attention_mask is not None:
        raise ArgumentError(argument="attention_mask", expected="none in a graph", got="a mask")
    call: Any = module.kvplane_call
    out = torch.ops.kvplane.decode(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        call.key,
        call.value,
        call.cursors,
        call.bases,
        s_aux,
        call.window,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap or 0.0,
        call.stores,
        call.unrolled,
    )
    return out, None


@contextmanager
def attending(decoder: nn.Module, calls: Mapping[int, LayerCall]) -> Iterator[None]:
    """The decoder attends by these calls, by layer, until the block ends."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)
    parts: list[Any] = list(decoder.modules())
    modules = [each for each in parts if type(getattr(each, "layer_idx", None)) is int]
    configs = {id(each.config): each.config for each in parts if hasattr(each, "config")}
    before = {name: config._attn_implementation for name, config in configs.items()}  # noqa: SLF001
    try:
        for config in configs.values():
            config._attn_implementation = NAME  # noqa: SLF001 - transformers has no other door
        for module in modules:
            call = calls.get(module.layer_idx)
            if call is not None:
                module.__dict__[_CALL] = call
        yield
    finally:
        for module in modules:
            module.__dict__.pop(_CALL, None)
        for name, config in configs.items():
            config._attn_implementation = before[name]  # noqa: SLF001
