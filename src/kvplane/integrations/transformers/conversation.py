"""A conversation that can stop and go on: prompts in, tokens out, the session on disk between.

begin      a saved session, or a cut that the prompt starts with, or nothing
read       what is not held yet, on the canonical schedule; cuts are taken on the way
say        new tokens one by one, every one of them in the cache before the next
save       what was read and said, under the session's name
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, PackMismatch
from kvplane.integrations.transformers.cache import HybridCache
from kvplane.integrations.transformers.calls import call, chosen, prefill
from kvplane.integrations.transformers.loading import NamedModel
from kvplane.pack import (
    PrefixCache,
    Written,
    load_session,
    save_session,
    wished_cuts,
)
from kvplane.pack.documents import SavedSession
from kvplane.schedule import CHUNK
from kvplane.session import Session
from kvplane.storage import Storage


@dataclass(slots=True)
class Reuse:
    """What did not have to be read.

    Args:
        tokens: how many.
        source: where they came from, in words.
        seconds: loading took.
        reason: why not more; "" when there is nothing to explain.
    """

    tokens: int = 0
    source: str = ""
    seconds: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class Conversation:
    """One cache, the ids in it, and where both are kept.

    Args:
        named: the model.
        cache: its rows.
        prefixes: cuts of this model; None takes none.
        attention: as in `HybridCache`.
    """

    named: NamedModel
    cache: HybridCache
    prefixes: PrefixCache | None = None
    reuse: Reuse = field(default_factory=Reuse)
    logits: Tensor | None = None
    saved_words: str | None = None

    @property
    def ids(self) -> list[int]:
        """Every token that was read or said, in order."""
        tokens = self.cache.tokens
        return [] if not tokens else list(tokens)  # type: ignore[arg-type] # one sequence

    @property
    def session(self) -> Session:
        """The store's session: ArgumentError before the first token."""
        session = self.cache.session
        if session is None:
            raise ArgumentError(argument="session", expected="at least one token", got="none")
        return session

    def resume(self, storage: Storage, name: str) -> SavedSession:
        """Go on from a saved session.

        Raises:
            PackMismatch: another model's session; names the part that differs.
            PackError: it is not there, or not what it says. Nothing was changed.
        """
        begin = time.perf_counter()
        store = self._made_store()
        saved, loaded = load_session(storage, name, store, self.named.fingerprint)
        if saved.tokens is None:
            loaded.session.close()
            raise PackMismatch(field="tokens", expected="ids of every position", got=None)
        self.cache.adopt(loaded.session, loaded.states)
        self.saved_words = saved.tokenizer
        seconds = time.perf_counter() - begin
        self.reuse = Reuse(saved.state.position, f"session {name}", seconds)
        return saved

    def begin(self, ids: Sequence[int], *, strict: bool = False) -> None:
        """Take the deepest cut that a prompt starts with, where prefixes are kept."""
        if self.prefixes is None:
            return
        begin = time.perf_counter()
        match, loaded = self.prefixes.load(ids, self._made_store(), strict=strict, remember=True)
        if loaded is not None:
            self.cache.adopt(loaded.session, loaded.states)
        seconds = time.perf_counter() - begin
        self.reuse = Reuse(match.position, "the prompt cache", seconds, match.reason)

    def read(self, ids: Sequence[int], *, progress: Callable[[int], None] | None = None) -> None:
        """Read the part of `ids` that is not held yet; `ids` begins with what is.

        Raises:
            ArgumentError: it does not.
            ContextFull: it does not fit; what was read until then stays.
        """
        held = self.ids
        if list(ids[: len(held)]) != held:
            raise ArgumentError(
                argument="ids", expected=f"the {len(held)} held tokens first", got="others"
            )
        groups = self.named.geometry.groups
        cuts = set(wished_cuts(len(held), len(ids), groups, chunk=CHUNK))

        def after(position: int) -> None:
            if self.prefixes is not None and position in cuts:
                self.prefixes.publish(
                    self.session, ids[:position], states=self.cache.states() or None
                )
            if progress is not None:
                progress(position)

        self.logits = prefill(self.named.model, self.cache, ids, after=after)

    def say(
        self,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Iterator[int]:
        """New tokens; each is in the cache when it is yielded, the last one too."""
        for _ in range(max_new_tokens):
            if self.logits is None:
                raise ArgumentError(argument="logits", expected="tokens read before", got=None)
            token = chosen(self.logits, temperature=temperature, generator=generator)
            if token in self.named.words.stop_ids:
                return
            self.logits = call(self.named.model, self.cache, [token])
            self.cache.settle()
            yield token

    def save(self, storage: Storage, name: str) -> Written:
        """Write the session under its name; only what is new is written."""
        written = save_session(
            storage,
            name,
            self.session,
            self.named.fingerprint,
            states=self.cache.states() or None,
            tokenizer=self.named.words.name,
        )
        if self.prefixes is not None:
            # a turn's end: the next prompt of this conversation goes on from here
            self.prefixes.publish(self.session, self.ids, states=self.cache.states() or None)
        return written

    def _made_store(self) -> Any:  # noqa: ANN401 - a KVStore
        model = self.named.model
        return self.cache.made_store(model.dtype, model.device)


def converse(
    named: NamedModel,
    *,
    prefixes: PrefixCache | None = None,
    attention: str = "view",
    max_context: int | None = None,
    memory: str = "auto",
) -> Conversation:
    """An empty conversation with a model."""
    cache = HybridCache(named.model, attention=attention, max_context=max_context, memory=memory)
    return Conversation(named=named, cache=cache, prefixes=prefixes)
