"""`HybridCache`: a transformers cache on one session of a store.

    cache = HybridCache(model)
    model.generate(**inputs, cache=cache)       # past_key_values=cache where that is the name
    twin = cache.fork()

When a step begins and ends is written in `chart.py`.
"""

import weakref
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from kvplane.errors import ArgumentError, PositionError
from kvplane.integrations.transformers import attention, kinds, positions, prompts
from kvplane.integrations.transformers.host import HostCache
from kvplane.integrations.transformers.options import (
    DEFAULT_KERNEL,
    VIEW,
    Options,
    check_one_device,
    context_of,
    numerics_of,
)
from kvplane.integrations.transformers.watch import watch
from kvplane.session import Session
from kvplane.store import KVStore

# no call of the watched model has begun
NO_CALL = object()


class HybridCache(HostCache):
    """A drop-in transformers cache whose rows live in a kvplane store.

    Logits are bitwise those of `DynamicCache`: attention is transformers' own, over the store's
    logical view. For inference: no gradient passes through it.

    Args:
        model: the model, which is then watched (see `watch.py`): token ids are remembered, a
            prompt that does not go on from them and another model's calls are refused. Or its
            config: then only positions are checked.
        attention: "view", or the store's own order in place of transformers' attention: "kvplane"
            (blocked: a row's bits do not depend on how tokens were cut into calls) or "physical"
            (the chapter's). They need the model, and switch its attention implementation to
            "kvplane".
        max_context: positions end below it; None takes the config's, or 131,072.
        memory: the store's memory backend.
        slack: rows of a ring beyond its window: going back that far loses nothing.
        limit: bytes of all sessions forked from this cache together.

    Raises:
        GeometryError: a model or a kind of layer that this cache does not hold.
        ArgumentError: a model spread over several devices; a number or name that means nothing.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - any transformers model or config
        *,
        attention: str = VIEW,
        max_context: int | None = None,
        memory: str = "auto",
        slack: int = 0,
        limit: int | None = None,
    ) -> None:
        watched = model if isinstance(model, nn.Module) else None
        config = kinds.text_config(getattr(model, "config", None) if watched else model)
        self._config = config
        self._model = None if watched is None else weakref.ref(watched)
        self._options = Options(
            attention=attention,
            max_context=context_of(config) if max_context is None else max_context,
            memory=memory,
            slack=slack,
            limit=limit,
        )
        self._kinds = kinds.kinds_of(config)
        self._call: object = NO_CALL
        super().__init__(self._kinds, self._open, remembers=watched is not None)
        if watched is not None:
            check_one_device(watched)
            if self._options.in_store_order:
                _use_store_order(watched)
            watch(watched)

    def made_store(self, dtype: torch.dtype, device: torch.device | str) -> KVStore:
        """A store for this model's rows, of that dtype and on that device."""
        name = str(dtype).removeprefix("torch.")
        store = KVStore(
            kinds.geometry_of(self._config, self._kinds, name),
            max_context=self._options.max_context,
            device=device,
            memory=self._options.memory,
            attention=self._options.order,
            slack=self._options.slack,
            limit=self._options.limit,
        )
        store.numerics = numerics_of(self._options, store.numerics, self._kernel)
        return store

    def _open(self, key: Tensor) -> Session:
        store = self.made_store(key.dtype, key.device)
        batch = None if key.shape[0] == 1 else key.shape[0]
        return store.open(None if self._model is None else (), batch=batch)

    @property
    def _kernel(self) -> str | None:
        """The model's attention implementation, where it is said."""
        return getattr(self._config, "_attn_implementation", None)

    # what one call of the model does

    def expect_call(self, model: nn.Module, ids: Tensor | None) -> None:
        """A watched model's call begins, with these token ids.

        Raises:
            ArgumentError: another model's call.
        """
        owner = None if self._model is None else self._model()
        if self._model is not None and owner is not model:
            raise ArgumentError(
                argument="cache", expected="one made for this model", got="another model's"
            )
        self.settle()
        self._chart.begin_call()
        self._call = ids

    def end_call(self, *, failed: bool) -> None:
        """A watched model's call ended; one that raised is taken back."""
        begun, self._call = self._call is not NO_CALL, NO_CALL
        if begun and failed:
            self._chart.abort()

    def write(
        self, layer: int, key: Tensor, value: Tensor, *, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows in, `[batch, kv_heads, tokens, dim]`; what the queries see out, likewise.

        Raises:
            ArgumentError: not a call of the model that the cache was made for.
            KVPlaneError: as in `Chart.write`. The cache is as it was before the call.
        """
        ids = self._begun() if layer == self._chart.owned[0] else None
        step = self._chart.write(layer, key, value, position_ids=position_ids, ids=ids)
        if self._options.in_store_order:
            rows = attention.Rows(step, layer, batched=self._chart.batched)
            return attention.tag(key, rows), value
        keys, values = step.view(layer).gather()
        if not self._chart.batched:
            return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _begun(self) -> Tensor | None:
        """The ids of the call whose first layer writes now."""
        ids = self._call
        if self._model is not None and ids is NO_CALL:
            raise ArgumentError(
                argument="cache",
                expected="calls of the model it was made for",
                got="a call of another model, or of a part of it",
            )
        kernel = self._kernel
        if self._options.in_store_order and kernel != attention.NAME:
            expected = f'model.set_attn_implementation("{attention.NAME}")'
            raise ArgumentError(argument="attention", expected=expected, got=kernel)
        store = self.store
        if store is not None and not self._options.in_store_order:
            kernel = kernel or DEFAULT_KERNEL
            if kernel != store.numerics["kernel"]:
                store.numerics = store.numerics | {"kernel": kernel}
        return ids if isinstance(ids, Tensor) else None

    def check_prompt(self, ids: Tensor) -> None:
        """Refuse a prompt that does not go on from what the cache holds.

        One that is held whole gives its last token back, to be run again.

        Args:
            ids: the whole prompt, `[batch, tokens]`, padding included.

        Raises:
            PositionError: it differs from the tokens held, or is shorter. Nothing was changed.
        """
        if prompts.checked(self.session, ids) == self.seen > 0:
            self.crop(-1)

    # what people ask

    @property
    def max_context(self) -> int:
        """Positions end below it."""
        return self._options.max_context

    @property
    def store(self) -> KVStore | None:
        """The store; None before the first token."""
        session = self._chart.session
        return None if session is None else session.store

    @property
    def tokens(self) -> list[int] | list[list[int]] | None:
        """The token ids seen, by sequence when there are several; None when they are not known."""
        session = self.session
        return None if session is None else session.tokens

    def rewind(self, position: int) -> None:
        """Forget every token from `position` on, in every layer: as `crop`, by position."""
        self.crop(position - self.seen)

    def adopt(self, session: Session) -> None:
        """Go on from a session that was restored or loaded into a `made_store`.

        Raises:
            ArgumentError: the cache holds tokens already.
        """
        if self.seen:
            raise ArgumentError(argument="session", expected="an empty cache", got=self.seen)
        self.close()
        last = positions.start(session.position, 1) if session.batch is None else None
        self.go_on(session, last)

    def fork(self) -> Self:
        """A second cache of the same model that goes its own way from here.

        Raises:
            PositionError: the model itself keeps a state that a cache cannot copy.
        """
        self.settle()
        chart = self._chart
        chart.running.check_held("fork", self.seen)
        twin = self._like()
        twin.record(on=chart.recording)
        session = None if chart.session is None else chart.session.fork()
        twin.go_on(session, chart.last, chart.running.copies())
        return twin

    def split(self) -> list[Self]:
        """One cache a sequence, each without its left padding.

        Raises:
            ArgumentError: padding cannot be told from text.
            PositionError: there are states beside the store's rows that count padding too.
        """
        self.settle()
        if self._chart.running:
            message = "a batch cannot be split: layers beside the store have states of all of it"
            raise PositionError(message, position=self.seen)
        caches = []
        for session in self._chart.apart():
            caches.append(self._like())
            caches[-1].adopt(session)
        return caches

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.fork()
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ArgumentError(argument="cache", expected="cache.save, or cache.fork", got="pickle")

    def _like(self) -> Self:
        model = None if self._model is None else self._model()
        return type(self)(
            self._config if model is None else model,
            attention=self._options.attention,
            max_context=self._options.max_context,
            memory=self._options.memory,
            slack=self._options.slack,
            limit=self._options.limit,
        )


def _use_store_order(model: Any) -> None:  # noqa: ANN401 - any transformers model
    # a parameter of the constructor has the module's name
    attention.use(model)
