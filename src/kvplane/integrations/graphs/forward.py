"""A model's `forward` that replays a graph for a token of a cache that asked for graphs.

An attribute of the one model object, as the watched `generate` is; its class is not touched. Every
other call goes to the model itself: prompts, padding, images, outputs beside logits.
"""

import copy
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from kvplane.integrations.transformers.cache import HybridCache
from kvplane.integrations.transformers.watch import cache_in

# what a call may be given beside its ids, and still be a plain step
PLAIN = {"input_ids", "attention_mask", "position_ids", "cache", "past_key_values"}
PLAIN |= {"use_cache", "return_dict", "logits_to_keep"}


class GraphedForward:
    """A model's forward, and the graphs of its steps by shape.

    Args:
        model: whose; a copy of the model gets one for itself, without graphs.
        before: what was in the model object's way to its class's `forward`.
    """

    def __init__(self, model: nn.Module, before: Callable[..., Any] | None) -> None:
        self._model = weakref.ref(model)
        self._before = before
        self._graphs: dict[object, Any] = {}

    @property
    def _forward(self) -> Callable[..., Any]:
        if self._before is not None:
            return self._before
        model: Any = self._model()
        forward: Callable[..., Any] = type(model).forward.__get__(model)
        return forward

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of what is called: transformers reads it."""
        return inspect.signature(self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the host's signature
        """The model's outputs, from a graph where one serves."""
        cache = cache_in(args, kwargs)
        ids = kwargs.get("input_ids")
        if args or not isinstance(cache, HybridCache) or not _is_plain(cache, ids, kwargs):
            return self._forward(*args, **kwargs)
        logits = self._graph(cache).step(ids, cache).clone()[:, None]
        outputs, name = self._shown()
        return outputs(logits=logits, **{name: cache})

    def _graph(self, cache: HybridCache) -> Any:  # noqa: ANN401 - a DecodeGraph
        from kvplane.integrations.graphs.decode import DecodeGraph  # noqa: PLC0415 - Triton
        from kvplane.integrations.graphs.tables import shape_of  # noqa: PLC0415

        key = (cache.graphs, shape_of(cache.session))  # type: ignore[arg-type] # it has read tokens
        if key not in self._graphs:
            self._graphs[key] = DecodeGraph(self._model(), cache, layers=cache.graphs or "")
        return self._graphs[key]

    def _shown(self) -> tuple[Callable[..., Any], str]:
        """The class of a causal model's outputs, and its name for a cache."""
        from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: PLC0415

        fields = CausalLMOutputWithPast.__dataclass_fields__
        return CausalLMOutputWithPast, "cache" if "cache" in fields else "past_key_values"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(self._model(), memo), self._before)  # type: ignore[arg-type]


def _is_plain(cache: HybridCache, ids: object, kwargs: dict[str, Any]) -> bool:
    """Whether a call is one token a sequence, after others, and asks for logits alone."""
    if not cache.graphs or not cache.is_plain:
        return False
    if not isinstance(ids, Tensor):
        return False
    if ids.shape != (cache.batch_size, 1) or not cache.seen:
        return False
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    if not given <= PLAIN or kwargs.get("return_dict") is False:
        return False
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and not bool(mask.all()):
        return False
    return positions is None or cache.numbers_follow(positions)


def graph_forward(model: Any) -> None:  # noqa: ANN401 - any transformers model
    """Have a model replay graphs for caches that ask for them, from now on. Idempotent."""
    before = model.__dict__.get("forward")
    if not isinstance(before, GraphedForward):
        model.__dict__["forward"] = GraphedForward(model, before)
