"""`HybridCache`: a transformers cache on one session of a store.

    cache = HybridCache(model)
    model.generate(**inputs, cache=cache)          # past_key_values=cache before 5.20
    twin = cache.fork()

When a step begins and ends is written in `chart.py`.
"""

import weakref
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvplane.errors import ArgumentError
from kvplane.integrations.transformers import attention, kinds, options, positions, prompts
from kvplane.integrations.transformers.chart import Chart
from kvplane.integrations.transformers.layer import StoreLayer
from kvplane.integrations.transformers.running import RunningStates
from kvplane.integrations.transformers.watch import watch
from kvplane.session import Session
from kvplane.store import KVStore

# a call of the watched model that has begun, with token ids or without
NO_CALL = object()


class HybridCache(Cache):
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
        attention: str = options.VIEW,
        max_context: int | None = None,
        memory: str = "auto",
        slack: int = 0,
        limit: int | None = None,
    ) -> None:
        watched = model if isinstance(model, nn.Module) else None
        config = kinds.text_config(model.config if watched is not None else model)
        self._config = config
        self._model = None if watched is None else weakref.ref(watched)
        self._options = options.Options(
            attention=attention,
            max_context=options.context_of(config) if max_context is None else max_context,
            memory=memory,
            slack=slack,
            limit=limit,
        )
        self._kinds = kinds.kinds_of(config)
        self._call: object = NO_CALL
        super().__init__(layers=[self._made_layer(layer) for layer in range(len(self._kinds))])
        self._chart = self._made_chart()
        if watched is not None:
            options.one_device(watched)
            self._watch(watched)

    def _watch(self, model: nn.Module) -> None:
        if self._options.in_store_order:
            attention.use(model)
        watch(model)

    def _made_layer(self, layer: int) -> Any:  # noqa: ANN401 - ours or transformers' own
        kind = self._kinds[layer]
        if kind.in_store:
            return StoreLayer(self, layer, kind.sliding_window)
        return kind.own_layer()

    def _made_chart(self) -> Chart:
        owned = [layer for layer, kind in enumerate(self._kinds) if kind.in_store]
        others = {
            layer: held for layer, held in enumerate(self.layers) if not self._kinds[layer].in_store
        }
        return Chart(owned, RunningStates(others), self._opened, remembers=self._model is not None)

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
        store.numerics = options.numerics_of(self._options, store.numerics, self._kernel)
        return store

    def adopt(self, session: Session) -> None:
        """Go on from a session that was restored or loaded into a `made_store`.

        Raises:
            ArgumentError: the cache holds tokens already.
        """
        if self.seen:
            raise ArgumentError(argument="session", expected="an empty cache", got=self.seen)
        self.close()
        last = positions.start(session.position, 1) if session.batch is None else None
        self._chart.adopt(session, last)

    def _opened(self, key: Tensor) -> Session:
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
                argument="cache", expected="one made for this model", got=f"one of {type(owner)}"
            )
        self._chart.settle()
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
        ids = None
        if layer == self._chart.owned[0]:
            ids = self._begun()
        step = self._chart.write(layer, key, value, position_ids=position_ids, ids=ids)
        if self._options.in_store_order:
            batched = key.shape[0] > 1
            return attention.tag(key, attention.Rows(step, layer, batched)), value
        keys, values = step.view(layer).gather()
        if keys.ndim == 3:  # noqa: PLR2004 - tokens, heads, dim: an ordinary session
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
            kernel = kernel or options.DEFAULT_KERNEL
            if kernel != store.numerics["kernel"]:
                store.numerics = store.numerics | {"kernel": kernel}
        return ids if isinstance(ids, Tensor) else None

    # what transformers asks while a call begins, and of layers beside the store

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, not rows held."""
        del layer_idx
        self._chart.begin_call()
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Rows that a layer's update will return, and the position of the first."""
        self._chart.begin_call()
        return super().get_mask_sizes(query_length, layer_idx)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether a layer beside the store has a state."""
        if layer_idx is not None:
            self._chart.begin_layer(layer_idx)
        return super().has_previous_state(layer_idx, state_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ANN401 - the host's signature
        **kwargs: Any,  # noqa: ANN401
    ) -> Tensor:
        """The convolution state of a layer beside the store."""
        self._chart.begin_layer(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        **kwargs: Any,  # noqa: ANN401 - the host's signature
    ) -> Tensor:
        """The recurrent state of a layer beside the store."""
        self._chart.begin_layer(layer_idx)
        self._chart.running.before_recurrent(layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    # what people ask

    @property
    def seen(self) -> int:
        """Tokens seen, those of the last call included."""
        return self._chart.seen

    @property
    def max_context(self) -> int:
        """Positions end below it."""
        return self._options.max_context

    @property
    def session(self) -> Session | None:
        """The store's session, with the last call committed; None before the first token."""
        self.settle()
        return self._chart.session

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

    def settle(self) -> None:
        """Commit the last call, or take it back when it died between two layers."""
        self._chart.settle()

    def rows(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """A layer's live rows in logical order, `[batch, kv_heads, rows, dim]`."""
        session = self.session
        if session is None or not len(session.live(layer)):
            return None, None
        live = session.live(layer)
        spans = session.spans(layer, live.start, live.stop)
        axis = 0 if session.batch is None else 1
        keys = torch.cat([key for key, _ in spans], dim=axis).transpose(axis, axis + 1)
        values = torch.cat([value for _, value in spans], dim=axis).transpose(axis, axis + 1)
        return (keys[None], values[None]) if session.batch is None else (keys, values)

    def check_prompt(self, ids: Tensor) -> None:
        """Refuse a prompt that does not go on from what the cache holds.

        One that is held whole gives its last token back, to be run again.

        Args:
            ids: the whole prompt, `[batch, tokens]`, padding included.

        Raises:
            PositionError: it differs from the tokens held, or is shorter. Nothing was changed.
        """
        self.settle()
        if prompts.checked(self._chart.session, ids) == self.seen > 0:
            self._chart.take_back(1)

    # going back, and going two ways

    @property
    def is_recording(self) -> bool:
        """Whether overwritten rows are kept for `crop`."""
        return self._chart.recording

    def record(self, *, on: bool) -> None:
        """Keep overwritten rows (at most a window a layer) so that `crop` can go back further."""
        self._chart.record(on=on)

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs, in every layer."""
        self.record(on=True)
        self._chart.running.each("activate_past_recording")

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, in all layers or in none.

        Args:
            tokens_to_remove: at most 0: the number of tokens, negated. 0 only settles.

        Raises:
            ArgumentError: above 0, or more tokens than there are. Nothing was changed.
            WindowLost: a ring no longer holds what the position before needs. Nothing was changed.
            PositionError: a layer beside the store cannot go back. Nothing was changed.
        """
        self._chart.take_back(-int(tokens_to_remove))
        session = self.session
        if session is not None:
            session.forget_recorded()

    def rewind(self, position: int) -> None:
        """Forget every token from `position` on: `Session.rewind`, for every kind of layer."""
        self.crop(position - self.seen)

    def reset(self) -> None:
        """Empty, in every layer."""
        self._chart.reset()

    def fork(self) -> Self:
        """A second cache of the same model that goes its own way from here.

        Raises:
            PositionError: the model itself keeps a state that a cache cannot copy.
        """
        self.settle()
        chart = self._chart
        chart.running.check_held("fork", self.seen)
        twin = self._like()
        twin._adopt(  # noqa: SLF001 - its own class
            None if chart.session is None else chart.session.fork(),
            chart.last,
            chart.running.copies(),
        )
        twin._chart.record(on=chart.recording)  # noqa: SLF001
        return twin

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

    def _adopt(
        self, session: Session | None, last: list[positions.Last] | None, others: dict[int, Any]
    ) -> None:
        """Go on from a session and states made elsewhere."""
        for layer, held in others.items():
            self.layers[layer] = held
        self._chart = self._made_chart()
        if session is not None:
            self._chart.adopt(session, last)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each beam the rows of the one it goes on from."""
        self._chart.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        places = [place for place in range(self.batch_size) for _ in range(repeats)]
        self._chart.select(places, "batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these sequences."""
        places = torch.arange(max(0, self.batch_size))[indices.cpu()].tolist()
        self._chart.select(places, "batch_select_indices", indices)

    @property
    def batch_size(self) -> int:
        """Sequences held; -1 before the first token."""
        session = self._chart.session
        return -1 if session is None else session.num_sequences

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._chart.close()
