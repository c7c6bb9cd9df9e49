"""A conversation that can stop and go on: prompts in, tokens out, the session on disk between.

begin      a saved session, or a cut that the prompt starts with, or nothing
read       what is not held yet, on the canonical schedule; cuts are taken on the way
say        new tokens one by one, every one of them in the cache before the next
save       what was read and said, under the session's name
publish    a cut at the turn's end: the next prompt goes on from it
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, PackMismatch
from kvplane.integrations.transformers import saving
from kvplane.integrations.transformers.cache import HybridCache
from kvplane.integrations.transformers.calls import call, chosen
from kvplane.integrations.transformers.loading import NamedModel
from kvplane.pack import PrefixCache, Written, read_session
from kvplane.session import Session
from kvplane.storage import Storage

SLACK = 1


@dataclass(slots=True)
class Conversation:
    """One cache, the ids in it, and where both are kept.

    Args:
        named: the model.
        cache: its rows.
        prefixes: cuts of this model; None takes none.
        logits: of the last token read.
        saved_words: the tokenizer that a resumed session was written with.
    """

    named: NamedModel
    cache: HybridCache
    prefixes: PrefixCache | None = None
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

    @property
    def origin(self) -> saving.Origin:
        """What did not have to be read."""
        return self.cache.origin or saving.Origin(tokens=0, source="nothing")

    def resume(self, storage: Storage, name: str) -> None:
        """Go on from a saved session.

        Raises:
            PackMismatch: another model's session; names the part that differs.
            PackError: it is not there, or not what it says. Nothing was changed.
        """
        saved = read_session(storage, name)
        if saved.tokens is None:
            raise PackMismatch(field="tokens", expected="ids of every position", got=None)
        saving.load(self.cache, storage, self.named.fingerprint, name)
        self.saved_words = saved.tokenizer

    def begin(self, ids: Sequence[int], *, strict: bool = False) -> None:
        """Take the deepest cut that a prompt starts with, where prefixes are kept."""
        if self.prefixes is not None:
            saving.begin(self.cache, self.prefixes, ids, strict=strict)

    def read(self, ids: Sequence[int], *, progress: Callable[[int], None] | None = None) -> None:
        """Read the part of `ids` that is not held yet; `ids` begins with what is.

        Raises:
            ArgumentError: it does not.
            ContextFull: it does not fit. Nothing was read.
        """
        held = self.ids
        if list(ids[: len(held)]) != held:
            raise ArgumentError(
                argument="ids", expected=f"the {len(held)} held tokens first", got="others"
            )
        self.logits = saving.read(self.cache, ids, len(ids), prefixes=self.prefixes, after=progress)

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
        """Write the session under its name, whose lock is held; only what is new is written."""
        return saving.save_held(
            self.cache,
            storage,
            self.named.fingerprint,
            self.ids,
            name=name,
            tokenizer=self.named.words.name,
        )

    def publish(self) -> None:
        """Take a cut here, where prefixes are kept."""
        if self.prefixes is not None:
            saving.publish(self.cache, self.prefixes)


def converse(
    named: NamedModel,
    *,
    prefixes: PrefixCache | None = None,
    attention: str | None = None,
    max_context: int | None = None,
) -> Conversation:
    """An empty conversation with a model; on a GPU its tokens are replayed graphs.

    Its rings have a row to spare: an interrupted call may cost one, and the last token of what was
    saved must still be able to run again.

    Args:
        named: the model.
        prefixes: cuts of this model; None takes none.
        attention: as in `HybridCache`, and then without graphs.
        max_context: positions end below it.
    """
    cache = HybridCache(
        named.model,
        attention=attention,
        max_context=max_context,
        slack=SLACK,
        graphs=attention is None and named.model.device.type == "cuda",
    )
    return Conversation(named=named, cache=cache, prefixes=prefixes)
