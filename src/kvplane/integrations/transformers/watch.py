"""What a model tells the caches made for it, and what it is asked before it generates.

A cache layer sees keys and values only. To know which tokens they are, and that they are the right
model's, a model for which a cache was made is watched:

    before a forward    its cache learns the call's token ids, or refuses a foreign model's
    after a forward     a call that raised is taken back
    before generate     the cached part of the prompt must be the tokens that the cache holds; a
                        prompt that is cached whole runs its last token again

Two of torch's own forward hooks and an attribute of the one model object; its class is not touched.
A cache made for a config watches nothing and checks positions only.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WATCHED = "_kvplane_watched"


class Call(NamedTuple):
    """What a model was called with.

    Args:
        ids: token ids, `[batch, tokens]`; None for embeddings.
        position_ids: where they were given.
        attention_mask: where it was given.
    """

    ids: Tensor | None
    position_ids: Tensor | None
    attention_mask: Tensor | None

    def numbered(self, seen: int, num_tokens: int) -> Tensor:
        """The position ids, for models that do not hand them on to their layers."""
        if self.position_ids is not None:
            return self.position_ids
        # none were given: then models go on from what the cache has seen
        return torch.arange(seen, seen + num_tokens)[None]


def watch(model: nn.Module) -> None:
    """Watch a model, from now on. Idempotent."""
    if WATCHED in model.__dict__:
        return
    model.register_forward_pre_hook(_before, with_kwargs=True)
    model.register_forward_hook(_after, with_kwargs=True, always_call=True)
    if hasattr(model, "generate"):
        model.__dict__["generate"] = CheckedGenerate(model, model.__dict__.get("generate"))
    model.__dict__[WATCHED] = True


class CheckedGenerate:
    """A model's `generate` that first asks the cache about the prompt.

    Args:
        model: whose; a copy of the model gets a copy of this for itself.
        before: what was in the model object's way to its class's `generate` before.
    """

    def __init__(self, model: Any, before: Callable[..., Any] | None) -> None:  # noqa: ANN401 - any transformers model
        self._model = model
        self._before = before

    @property
    def _generate(self) -> Callable[..., Any]:
        if self._before is not None:
            return self._before
        generate: Callable[..., Any] = type(self._model).generate.__get__(self._model)
        return generate

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of what is called: transformers reads it."""
        return inspect.signature(self._generate)

    def __call__(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the host's signature
        """Generate, once the prompt is known to go on from the cache."""
        cache = cache_in(args, kwargs)
        ids = kwargs.get("input_ids", inputs)
        if cache is not None and isinstance(ids, Tensor) and kwargs.get("inputs_embeds") is None:
            mask = kwargs.get("attention_mask")
            full = ids.shape[1] if mask is None else mask.shape[1]
            if full == ids.shape[1]:
                cache.check_prompt(ids)
        return self._generate(inputs, *args, **kwargs)


def cache_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a cache of ours or None
    """The cache of ours among a call's arguments, under either of its names, or None."""
    for given in (kwargs.get("cache"), kwargs.get("past_key_values"), *args):
        if hasattr(given, "expect_call"):
            return given
    return None


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = cache_in(args, kwargs)
    if cache is not None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        call = Call(
            ids if isinstance(ids, Tensor) else None,
            kwargs.get("position_ids"),
            kwargs.get("attention_mask"),
        )
        cache.expect_call(model, call)


def _after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
    del model
    cache = cache_in(args, kwargs)
    if cache is not None:
        # torch calls this with no output when the forward raised
        cache.end_call(failed=output is None)
