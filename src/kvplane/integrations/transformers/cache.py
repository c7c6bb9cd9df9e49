"""`HybridCache`: a transformers cache on one session of a store.

    cache = HybridCache(model)
    model.generate(**inputs, cache=cache)       # past_key_values=cache where that is the name
    twin = cache.fork()

When a step begins and ends is written in `chart.py`.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from kvplane.errors import ArgumentError, PositionError
from kvplane.geometry import LayerGroup
from kvplane.integrations.transformers import kinds, positions, prompts, saving
from kvplane.integrations.transformers.attention import NAME, Rows, tag, use_store_order
from kvplane.integrations.transformers.host import HostCache
from kvplane.integrations.transformers.identity import fingerprint_of
from kvplane.integrations.transformers.making import Making
from kvplane.integrations.transformers.options import VIEW, check_one_device, replay_graphs
from kvplane.integrations.transformers.running import RunningStates
from kvplane.integrations.transformers.watch import Call, watch
from kvplane.pack import PrefixCache, Written
from kvplane.session import Session
from kvplane.store import KVStore


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
        graphs: replay one CUDA graph a token (see `kvplane.integrations.graphs`): "captured" or
            True keeps the bits, "compiled" is faster and has others. Attention "kvplane".

    Raises:
        GeometryError: a model or a kind of layer that this cache does not hold.
        ArgumentError: a model spread over several devices; a number or name that means nothing.
        ExtraMissing: graphs without Triton.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - any transformers model or config
        *,
        attention: str | None = None,
        max_context: int | None = None,
        memory: str = "auto",
        slack: int = 0,
        limit: int | None = None,
        graphs: bool | str | None = None,
    ) -> None:
        watched = model if isinstance(model, nn.Module) else None
        self._making = Making.of(
            kinds.text_config(getattr(model, "config", model)),
            attention=attention or (NAME if graphs else VIEW),
            max_context=max_context,
            memory=memory,
            slack=slack,
            limit=limit,
            graphs="captured" if graphs is True else graphs or None,
        )
        self._model = None if watched is None else weakref.ref(watched)
        self._call: Call | None = None
        self._mask: Tensor | None = None
        self._prefixes: PrefixCache | None = None
        # where its first tokens came from, when they were not read
        self.origin: saving.Origin | None = None
        super().__init__(self._making.kinds, self._open, remembers=watched is not None)
        if watched is not None:
            check_one_device(watched)
            if self._making.options.in_store_order:
                use_store_order(watched)
            watch(watched)
        if self.graphs:
            replay_graphs(watched)

    def made_store(self, dtype: torch.dtype, device: torch.device | str) -> KVStore:
        """A store for this model's rows, of that dtype and on that device."""
        return self._making.store(dtype, device)

    def _open(self, key: Tensor) -> Session:
        store = self.made_store(key.dtype, key.device)
        batch = None if key.shape[0] == 1 else key.shape[0]
        return store.open(None if self._model is None else (), batch=batch)

    # what one call of the model does

    def expect_call(self, model: nn.Module, call: Call) -> None:
        """A watched model's call begins.

        Raises:
            ArgumentError: another model's call.
        """
        if self._model is not None and self.model is not model:
            raise ArgumentError(
                argument="cache", expected="one made for this model", got="another model's"
            )
        self.settle()
        self._chart.begin_call()
        self._call = call

    def end_call(self, *, failed: bool) -> None:
        """A watched model's call ended; one that raised is taken back."""
        call, self._call = self._call, None
        if call is not None and failed:
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
            call = self._begun()
            if call is not None:
                ids = call.ids
                if position_ids is None:
                    position_ids = call.numbered(self.seen, key.shape[2])
        step = self._chart.write(layer, key, value, position_ids=position_ids, ids=ids)
        if self._making.options.in_store_order:
            return tag(key, Rows(step, layer, batched=self._chart.batched)), value
        keys, values = step.view(layer).gather()
        if not self._chart.batched:
            return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _begun(self) -> Call | None:
        """The call whose first layer writes now."""
        call = self._call
        if self._model is not None and call is None:
            raise ArgumentError(
                argument="cache",
                expected="calls of the model it was made for",
                got="a call of another model, or of a part of it",
            )
        self._making.follow_kernel(self.store)
        self._mask = None if call is None else call.attention_mask
        return call

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
        return self._making.options.max_context

    @property
    def graphs(self) -> str | None:
        """How a token's call is replayed: "captured", "compiled"; None: it is not."""
        return self._making.options.graphs

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The model's layer groups."""
        return self._making.groups

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

    def adopt(self, session: Session, states: Mapping[str, Tensor] | None = None) -> None:
        """Go on from a session that was restored or loaded into a `made_store`.

        Args:
            session: with no step open.
            states: of the layers beside the store, as `states()` gave them.

        Raises:
            ArgumentError: the cache holds tokens already.
            PackMismatch: states are missing, or are not those of this model's layers.
        """
        if self.seen:
            raise ArgumentError(argument="session", expected="an empty cache", got=self.seen)
        others = {
            layer: self._making.kinds[layer].own_layer() for layer in self._chart.running.layers
        }
        running = RunningStates(others)
        if session.position > session.first_position:
            running.put(states or {})
        self.close()
        last = positions.start(session.position, 1) if session.batch is None else None
        self.go_on(session, last, others)

    def states(self) -> dict[str, Tensor]:
        """States of the layers beside the store's, by "layers.<i>.<name>"; none for most models.

        Raises:
            PositionError: a layer keeps something that packs do not hold.
        """
        self.settle()
        self._chart.running.check_held("saving", self.seen)
        return self._chart.running.named()

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
        for session in self._chart.apart(self._mask):
            caches.append(self._like())
            caches[-1].adopt(session)
        return caches

    # on disk

    def save(
        self,
        path: saving.Root,
        model: Any = None,  # noqa: ANN401 - any transformers model
        tokens: saving.Ids | None = None,
        *,
        name: str = "session",
        weights: str | None = None,
    ) -> Written:
        """Save what was read under a name; rows that the root holds already are not written again.

        Args:
            path: a folder of packs (a root); made where there is none.
            model: whose fingerprint to save with; None: the one that is watched.
            tokens: ids of what was read, where they are not known; `generate`'s answer will do,
                whose last token was chosen and not read.
            name: of the session in the root.
            weights: what identifies the model's weights; None: its revision, files or parameters.

        Raises:
            ArgumentError: a batch (see `split`), nothing read, or ids that are not what was read.
            PositionError: there are states that cannot be saved.
            SessionLocked, StorageError: the older session of that name is still there.
        """
        fingerprint = fingerprint_of(self._given(model), weights=weights)
        return saving.save(self, path, fingerprint, tokens, name=name)

    @classmethod
    def load(
        cls,
        path: saving.Root,
        model: Any,  # noqa: ANN401 - any transformers model
        *,
        name: str = "session",
        weights: str | None = None,
        **options: Any,  # noqa: ANN401 - those of the constructor
    ) -> Self:
        """A cache that goes on where a saved one stopped; `origin` says what it holds.

        Raises:
            PackMismatch: another model's session; names the part that differs.
            SessionNotFound, PackMissing, PackCorrupt, PackVersion: nothing was made.
        """
        cache = cls(model, **options)
        saving.load(cache, path, fingerprint_of(model, weights=weights), name)
        return cache

    @classmethod
    def for_prompt(
        cls,
        model: Any,  # noqa: ANN401 - any transformers model
        tokens: saving.Ids,
        root: saving.Root,
        *,
        strict: bool = False,
        weights: str | None = None,
        salt: bytes = b"",
        **options: Any,  # noqa: ANN401 - those of the constructor
    ) -> Self:
        """A cache that holds as much of a prompt as a root's cuts have, and reads the rest ahead.

        Whole chunks are read here, on the canonical schedule, and cuts taken; the rest is left to
        `model.generate(tokens, cache=cache)`, which needs its logits. `publish()` at the turn's end
        lets the next prompt of the conversation go on from there. `origin` says what was reused.

        Args:
            model: to be watched.
            tokens: ids of the whole prompt, one text.
            root: a folder of packs; made where there is none.
            strict: only rows that a cold run on the canonical schedule would have, bit for bit.
            weights: as in `save`.
            salt: of the tenant: others with another salt find nothing.
            options: as in the constructor.

        Raises:
            ArgumentError: no tokens. PackError: two cuts in a row were damaged.
        """
        ids = saving.ids_of(tokens)
        if not ids:
            raise ArgumentError(argument="tokens", expected="at least one", got=tokens)
        cache = cls(model, **options)
        prefixes = PrefixCache(root, fingerprint_of(model, weights=weights), salt=salt)
        saving.begin(cache, prefixes, ids, strict=strict)
        saving.read_ahead(cache, prefixes, ids)
        cache._prefixes = prefixes
        return cache

    def publish(self) -> list[int]:
        """Take a cut here, and those met on the way; the positions of the new ones.

        Raises:
            ArgumentError: not made by `for_prompt`, or token ids that are not known.
            StorageError: something could not be written; no cut names what was.
        """
        if self._prefixes is None:
            raise ArgumentError(argument="cache", expected="one of for_prompt", got="another")
        return saving.publish(self, self._prefixes)

    @property
    def model(self) -> Any:  # noqa: ANN401 - any transformers model
        """The model that is watched; None for a cache made for a config."""
        return None if self._model is None else self._model()

    def _given(self, model: Any) -> Any:  # noqa: ANN401 - any transformers model
        model = self.model if model is None else model
        if model is None:
            raise ArgumentError(argument="model", expected="the one that made the rows", got=None)
        return model

    def wish(self, cuts: Sequence[int]) -> None:
        """Keep the sliding rows at these positions as they are crossed, for `publish`."""
        self._chart.wished |= set(cuts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.fork()
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ArgumentError(argument="cache", expected="cache.save, or cache.fork", got="pickle")

    def _like(self) -> Self:
        return type(self)(self.model or self._making.config, **self._making.asked)
