"""`HybridCache`: a transformers cache on one session of a store.

    model.generate(**inputs, cache=HybridCache(model.config))

transformers announces no end of a step, so a step stays open until something follows it:

    state       event                                    next
    idle        the first layer's update                 open: a step is reserved
    open        another layer's update                   open, or written when it was the last
    written     an update of any layer                   committed; open again
    written     crop(-k)                                 the last k tokens are taken back; idle
    written     save, fork, reset, session, deepcopy     committed; idle
    open        an update of a layer written already     aborted (the call before died); open again
    open        save, fork, crop, session, deepcopy      aborted; idle

A call that dies between two layers, by an exception or Ctrl-C, thus leaves the cache as it was
before the call.
"""

import copy
from typing import TYPE_CHECKING, Any, Self

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DummyLayer,
    get_layer_types_and_kwargs,
)

from kvplane.errors import ArgumentError, CacheDiscontinuity, GeometryError
from kvplane.geometry import FULL, SLIDING, ModelGeometry
from kvplane.integrations.transformers.attention import NAME, Rows, register, tag
from kvplane.integrations.transformers.layer import StoreLayer
from kvplane.session import Session
from kvplane.store import KVStore

if TYPE_CHECKING:
    from kvplane.step import Step

DEFAULT_CONTEXT = 131_072
ATTENTIONS = ("view", "kvplane", "physical")


class HybridCache(Cache):
    """A drop-in transformers cache whose rows live in a kvplane store.

    Logits are bitwise those of `DynamicCache`: attention is transformers' own, over the store's
    logical view (numerics "view").

    Args:
        config: the model's, or a model.
        attention: "view", or the store's own order in place of transformers' attention:
            "kvplane" (blocked: a row's bits do not depend on how tokens were cut into calls) or
            "physical" (the chapter's). They need the model, and switch its attention
            implementation to "kvplane".
        max_context: positions end below it; None takes the config's, or 131,072.
        memory: the store's memory backend.
        slack: rows of a ring beyond its window.
        limit: bytes of all sessions forked from this cache together.

    Raises:
        GeometryError: a kind of layer that neither the store nor transformers holds.
    """

    def __init__(
        self,
        config: Any,  # noqa: ANN401 - any transformers config or model
        *,
        attention: str = "view",
        max_context: int | None = None,
        memory: str = "auto",
        slack: int = 0,
        limit: int | None = None,
    ) -> None:
        if attention not in ATTENTIONS:
            raise ArgumentError(argument="attention", expected=str(ATTENTIONS), got=attention)
        if attention != "view":
            register()
            if hasattr(config, "set_attn_implementation"):
                config.set_attn_implementation(NAME)
        config = getattr(config, "config", config)
        self._attention = attention
        text = config.get_text_config(decoder=True)
        self._config = text
        self._memory = memory
        self._slack = slack
        self._limit = limit
        context = getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT
        self._max_context = int(context if max_context is None else max_context)
        self._session: Session | None = None
        self._step: Step | None = None
        self._recording = False
        super().__init__(layers=self._made_layers())

    def _made_layers(self) -> list[Any]:
        kinds, facts = get_layer_types_and_kwargs(self._config)
        layers: list[Any] = []
        for layer, (kind, extra) in enumerate(zip(kinds, facts, strict=True)):
            if kind == FULL:
                layers.append(StoreLayer(self, layer, None))
            elif kind == SLIDING:
                layers.append(StoreLayer(self, layer, extra["sliding_window"]))
            elif kind in DYNAMIC_LAYER_TYPE_MAPPING and kind != "chunked_attention":
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**extra))
            else:
                reason = "the store holds sliding_attention and full_attention layers"
                raise GeometryError(field=f"layer_types[{layer}]", value=kind, reason=reason)
        self._owned = [layer for layer, made in enumerate(layers) if isinstance(made, StoreLayer)]
        if not self._owned:
            reason = "has no attention layer for a store to hold"
            raise GeometryError(field="layer_types", value=kinds, reason=reason)
        self._others = [made for made in layers if not isinstance(made, (StoreLayer, DummyLayer))]
        return layers

    # what layers ask

    @property
    def has_session(self) -> bool:
        """Whether anything was ever written."""
        return self._session is not None

    @property
    def is_recording(self) -> bool:
        """Whether overwritten rows are kept for `crop`."""
        return self._recording

    @property
    def seen(self) -> int:
        """Tokens seen, those of a written step included."""
        if self._session is None:
            return 0
        if self._step is not None and self._is_written():
            return self._step.stop
        return self._session.position

    @property
    def max_context(self) -> int:
        """Positions end below it."""
        return self._max_context

    def write(
        self, layer: int, key: Tensor, value: Tensor, facts: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Rows in, `[batch, kv_heads, tokens, dim]`; what the queries see out, likewise."""
        if self._step is not None and (self._is_written() or layer in self._step.written):
            self.settle()
        session = self._session or self._open(key)
        step = self._step or self._begin(session, key.shape[2], facts.get("position_ids"))
        batched = session.batch is not None
        if self._attention != "view":
            rows = (key, value) if batched else (key[0], value[0])
            step.write(layer, *(part.transpose(-3, -2) for part in rows))
            return tag(key, Rows(step, layer, batched)), value
        if not batched:
            step.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
            keys, values = step.view(layer).gather()
            return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        step.write(layer, key.transpose(1, 2), value.transpose(1, 2))
        keys, values = step.view(layer).gather()
        return keys.transpose(1, 2), values.transpose(1, 2)

    def rows(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """A layer's committed live rows in logical order, `[batch, kv_heads, rows, dim]`."""
        session = self.session
        if session is None:
            return None, None
        live = session.live(layer)
        spans = session.spans(layer, live.start, live.stop)
        if not spans:
            return None, None
        axis = 0 if session.batch is None else 1
        keys = torch.cat([key for key, _ in spans], dim=axis).transpose(axis, axis + 1)
        values = torch.cat([value for _, value in spans], dim=axis).transpose(axis, axis + 1)
        return (keys[None], values[None]) if session.batch is None else (keys, values)

    def _is_written(self) -> bool:
        return self._step is not None and len(self._step.written) == len(self._owned)

    def made_store(self, dtype: torch.dtype, device: torch.device) -> KVStore:
        """A store for this model's rows, of that dtype and on that device."""
        store = KVStore(
            ModelGeometry.from_config(self._config, dtype=str(dtype).removeprefix("torch.")),
            max_context=self._max_context,
            device=device,
            memory=self._memory,
            attention="physical" if self._attention == "physical" else "blocked",
            slack=self._slack,
            limit=self._limit,
        )
        store.numerics["transformers"] = transformers.__version__
        if self._attention == "view":
            store.numerics.update({"attention": "view", "table": 0})
        return store

    def adopt(self, session: Session) -> None:
        """Go on from a session that was restored or loaded into a `made_store`.

        Raises:
            ArgumentError: the cache holds tokens already.
        """
        if self.seen:
            raise ArgumentError(argument="session", expected="an empty cache", got=self.seen)
        self.close()
        self._session = session
        session.record(on=self._recording)

    def _open(self, key: Tensor) -> Session:
        store = self.made_store(key.dtype, key.device)
        session = self._session = store.open(batch=None if key.shape[0] == 1 else key.shape[0])
        session.record(on=self._recording)
        return session

    def _begin(self, session: Session, num_tokens: int, position_ids: Tensor | None) -> "Step":
        # with a batch, left padding shifts positions; with three axes they are M-RoPE's
        if position_ids is not None and position_ids.shape[:-1] == (1,) and session.batch is None:
            first = int(position_ids[0, 0])
            if first != session.position and position_ids.shape[1] == num_tokens:
                raise CacheDiscontinuity(expected=session.position, got=first)
        step = session.step(num_tokens, speculative=self._recording)
        self._step = step.__enter__()
        return step

    def settle(self) -> None:
        """Commit a step whose layers are all written; take back one that died between layers."""
        step, self._step = self._step, None
        if step is None or not step.is_open:
            return
        if len(step.written) == len(self._owned):
            step.commit()
        else:
            step.abort()

    # what people and transformers ask of the whole cache

    @property
    def session(self) -> Session | None:
        """The store's session, with the last step committed; None before the first token."""
        self.settle()
        return self._session

    @property
    def store(self) -> KVStore | None:
        """The store; None before the first token."""
        return None if self._session is None else self._session.store

    def set_recording(self, *, on: bool) -> None:
        """Keep overwritten rows, so that `crop` can take back several steps."""
        self.settle()
        if on != self._recording:
            self._recording = on
            if self._session is not None:
                self._session.record(on=on)

    def activate_past_recording(self) -> None:
        """Keep overwritten rows until the next `crop`, in every layer."""
        self.set_recording(on=True)
        for layer in self._others:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, in all layers or in none.

        Args:
            tokens_to_remove: at most 0: the number of tokens, negated. 0 only settles.

        Raises:
            ArgumentError: above 0, or more tokens than there are. Nothing was changed.
            WindowLost: a ring no longer holds what the position before needs. Nothing was changed.
        """
        count = -int(tokens_to_remove)
        if count < 0 or count > self.seen:
            raise ArgumentError(
                argument="tokens_to_remove", expected=f"within [-{self.seen}, 0]", got=-count
            )
        step = self._step
        if step is not None and step.is_open and self._is_written():
            num_tokens = step.stop - step.first
            if count and count <= num_tokens and (self._recording or count == num_tokens):
                self._check_others(count)
                self._step = None
                if count == num_tokens:
                    step.abort()
                else:
                    step.commit(num_tokens - count)
                count = 0
        self.settle()
        if count and self._session is not None:
            self._check_others(count)
            self._session.rewind(self._session.position - count)
        if self._session is not None:
            self._session.forget_recorded()
        for layer in self._others:
            layer.crop(tokens_to_remove)

    def _check_others(self, count: int) -> None:
        """Refuse before anything changes when another kind of layer cannot go back."""
        for layer in self._others:
            if count and not layer.is_croppable:
                raise ArgumentError(
                    argument="tokens_to_remove",
                    expected=f"0: a {type(layer).__name__} cannot go back",
                    got=-count,
                )

    def rewind(self, position: int) -> None:
        """Forget every token from `position` on: `Session.rewind`, for every kind of layer."""
        self.crop(position - self.seen)

    def reset(self) -> None:
        """Empty."""
        self.settle()
        if self._session is not None:
            self._session.reset()
        for layer in self._others:
            layer.reset()

    def fork(self) -> "HybridCache":
        """A second cache that goes its own way from here."""
        self.settle()
        twin = self._like()
        twin._session = None if self._session is None else self._session.fork()  # noqa: SLF001
        twin._adopt_others(copy.deepcopy(self._others))  # noqa: SLF001
        twin.set_recording(on=self._recording)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> "HybridCache":
        twin = self.fork()
        memo[id(self)] = twin
        return twin

    def _like(self) -> Self:
        return type(self)(
            self._config,
            attention=self._attention,
            max_context=self._max_context,
            memory=self._memory,
            slack=self._slack,
            limit=self._limit,
        )

    def _adopt_others(self, others: list[Any]) -> None:
        replaced = {id(old): new for old, new in zip(self._others, others, strict=True)}
        self.layers = [replaced.get(id(layer), layer) for layer in self.layers]
        self._others = others

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each beam the rows of the one it goes on from."""
        self.settle()
        if self._session is not None and self._session.batch is not None:
            self._session.reorder(beam_idx.tolist())
        for layer in self._others:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        self._select([place for place in range(self._num_sequences()) for _ in range(repeats)])
        for layer in self._others:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these sequences."""
        places = torch.arange(self._num_sequences())[indices.cpu()]
        self._select(places.tolist())
        for layer in self._others:
            layer.batch_select_indices(indices)

    def _num_sequences(self) -> int:
        return 0 if self._session is None else self._session.num_sequences

    def _select(self, places: list[int]) -> None:
        self.settle()
        if self._session is not None:
            session, self._session = self._session, None
            self._session = session.store.select(session, places)
            self._session.record(on=self._recording)
            session.close()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen."""
        del layer_idx
        return self.seen

    def close(self) -> None:
        """Give the memory back."""
        self._step = None
        if self._session is not None:
            self._session.close()
