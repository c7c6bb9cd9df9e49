"""Calls of a model, made the same way every time: one, and a prompt's on the schedule."""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, ContextFull
from kvplane.schedule import CHUNK, canonical

if TYPE_CHECKING:
    from kvplane.integrations.transformers.cache import HybridCache

Model = Any


def cache_keyword(model: Model) -> str:
    """What this version of transformers calls a cache: "cache", or "past_key_values" before."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _check_fits(cache: "HybridCache", num_tokens: int) -> None:
    if cache.seen + num_tokens > cache.max_context:
        raise ContextFull(position=cache.seen, num_tokens=num_tokens, max_context=cache.max_context)


def keeps_logits(model: Model) -> bool:
    """Whether a model's forward can leave out the logits of earlier tokens."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@torch.no_grad()
def call(model: Model, cache: "HybridCache", ids: Sequence[int]) -> Tensor:
    """One forward of consecutive tokens; the logits of the last, `[vocabulary]`.

    Raises:
        ContextFull: they would pass the cache's max_context. Nothing was changed.
    """
    _check_fits(cache, len(ids))
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    facts: dict[str, Any] = {cache_keyword(model): cache, "use_cache": True}
    if keeps_logits(model):
        facts["logits_to_keep"] = 1
    logits: Tensor = model(input_ids=tokens, **facts).logits
    return logits[0, -1]


def prefill(
    model: Model,
    cache: "HybridCache",
    ids: Sequence[int],
    *,
    chunk: int = CHUNK,
    after: Callable[[int], None] | None = None,
) -> Tensor:
    """Read the part of a prompt that the cache does not hold yet, on the canonical schedule.

    Args:
        model: a causal language model of transformers.
        cache: holds `ids[: cache.seen]`; the caller vouches for it.
        ids: the whole prompt. When all of it is held, only its last token is read again.
        chunk: of the schedule.
        after: called with the position after each call, once the step is committed.

    Returns:
        The logits of the last token, `[vocabulary]`.

    Raises:
        ArgumentError: an empty prompt, or one shorter than what the cache holds.
        ContextFull: the prompt does not fit. Nothing was read.
        WindowLost: the whole prompt is held, and the ring cannot go back by a token.
    """
    if not ids or len(ids) < cache.seen:
        raise ArgumentError(
            argument="ids", expected=f"at least {max(1, cache.seen)} tokens", got=len(ids)
        )
    _check_fits(cache, len(ids) - cache.seen)
    if len(ids) == cache.seen:
        cache.rewind(len(ids) - 1)
    logits = None
    for part in canonical(cache.seen, len(ids), chunk=chunk):
        logits = call(model, cache, ids[part.start : part.stop])
        cache.settle()
        if after is not None:
            after(part.stop)
    return logits  # type: ignore[return-value] # the range is not empty


def chosen(
    logits: Tensor, *, temperature: float = 0.0, generator: torch.Generator | None = None
) -> int:
    """The next token: the likeliest, or drawn at a temperature."""
    if temperature <= 0:
        return int(logits.argmax())
    shares = torch.softmax(logits.float() / temperature, dim=-1).cpu()
    return int(torch.multinomial(shares, 1, generator=generator))
