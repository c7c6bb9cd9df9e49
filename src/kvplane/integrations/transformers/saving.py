"""A cache's sessions on disk: saved and loaded by name, found by prefix.

`HybridCache.save`, `load`, `for_prompt` and `publish` are the public doors, and `Conversation` the
commands' own; all of them come through here.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvplane.errors import ArgumentError, ContextFull, PackMismatch
from kvplane.integrations.transformers.calls import prefill
from kvplane.pack import (
    Fingerprint,
    PrefixCache,
    Written,
    load_session,
    open_root,
    save_session,
    wished_cuts,
)
from kvplane.pack.reader import Loaded
from kvplane.schedule import CHUNK
from kvplane.storage import Storage
from kvplane.store import KVStore

if TYPE_CHECKING:
    from kvplane.integrations.transformers.cache import HybridCache

Root = str | os.PathLike[str]
Ids = Sequence[int] | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a cache's first tokens came from.

    Args:
        tokens: how many need not be read again.
        source: in words.
        reason: why not more; "" where there is nothing to explain.
        same_numerics: whether all their rows were made by what this store's bits depend on, so
            that going on is, bit for bit, not having stopped.
        seconds: finding and loading them took.
    """

    tokens: int
    source: str
    reason: str = ""
    same_numerics: bool = True
    seconds: float = 0.0


def ids_of(tokens: Ids) -> list[int]:
    """One text's ids, from `[tokens]` or `[1, tokens]`: ArgumentError."""
    rows = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    if len(rows) == 1 and isinstance(rows[0], (list, tuple)):
        rows = list(rows[0])
    if any(type(each) is not int for each in rows):
        raise ArgumentError(argument="tokens", expected="the ids of one text", got=type(tokens))
    return rows


def held_ids(cache: "HybridCache", tokens: Ids | None) -> list[int] | None:
    """The ids of what a cache holds: its own, or those that the caller says.

    Args:
        cache: with one sequence.
        tokens: may end with one more, chosen and not read, as `generate` leaves it.

    Raises:
        ArgumentError: a batch; other ids than the cache knows; too few or too many.
    """
    session = cache.session
    if session is not None and session.batch is not None:
        raise ArgumentError(
            argument="cache", expected="one sequence: save each of cache.split()", got="a batch"
        )
    known = None if session is None else session.tokens
    if tokens is None:
        return known  # type: ignore[return-value] # one sequence
    given = ids_of(tokens)
    if not cache.seen <= len(given) <= cache.seen + 1:
        expected = f"the {cache.seen} ids held, and at most one more"
        raise ArgumentError(argument="tokens", expected=expected, got=len(given))
    given = given[: cache.seen]
    if known is not None and known != given:
        raise ArgumentError(argument="tokens", expected="the ids that were read", got="others")
    return given


def save(
    cache: "HybridCache",
    path: Root,
    fingerprint: Fingerprint,
    tokens: Ids | None,
    *,
    name: str,
) -> Written:
    """Save a cache under a name in a root, against other writers: `HybridCache.save`."""
    ids = held_ids(cache, tokens)
    if cache.session is None:
        raise ArgumentError(argument="cache", expected="at least one token", got="none")
    storage = open_root(path, create=True)
    with storage.lock(name):
        return save_held(cache, storage, fingerprint, ids, name=name)


def save_held(
    cache: "HybridCache",
    storage: Storage,
    fingerprint: Fingerprint,
    ids: Sequence[int] | None,
    *,
    name: str,
    tokenizer: str | None = None,
) -> Written:
    """Save a cache under a name whose lock the caller holds.

    Args:
        cache: with one sequence, and tokens in it.
        storage: an opened root.
        fingerprint: of the model that made the rows.
        ids: of what was read; None where they are not known.
        name: of the session.
        tokenizer: recorded.

    Raises:
        ArgumentError, PackError, PositionError: as `HybridCache.save`.
    """
    if cache.session is None:
        raise ArgumentError(argument="cache", expected="at least one token", got="none")
    return save_session(
        storage,
        name,
        cache.session,
        fingerprint,
        tokens=ids,
        states=cache.states() or None,
        tokenizer=tokenizer,
    )


def load(cache: "HybridCache", root: Root | Storage, fingerprint: Fingerprint, name: str) -> None:
    """Fill an empty cache from a saved session; its `origin` says what it then holds.

    Raises:
        PackError: as `HybridCache.load`. The cache is empty.
    """
    begun = time.perf_counter()
    _, loaded = load_session(open_root(root), name, _store_for(cache), fingerprint)
    _adopt(cache, loaded, f"session {name}", "", begun)


def begin(
    cache: "HybridCache", prefixes: PrefixCache, ids: Sequence[int], *, strict: bool = False
) -> None:
    """Fill an empty cache from the deepest cut that a prompt starts with; `origin` says which.

    Raises:
        PackError: two cuts in a row were damaged. The cache is empty.
    """
    begun = time.perf_counter()
    match, loaded = prefixes.load(ids, _store_for(cache), strict=strict, remember=True)
    if loaded is None:
        seconds = time.perf_counter() - begun
        cache.origin = Origin(tokens=0, source="nothing", reason=match.reason, seconds=seconds)
    else:
        _adopt(cache, loaded, "the prompt cache", match.reason, begun)


def read(
    cache: "HybridCache",
    ids: Sequence[int],
    stop: int,
    *,
    prefixes: PrefixCache | None = None,
    after: Callable[[int], None] | None = None,
) -> Tensor | None:
    """Read a prompt up to `stop` on the canonical schedule, and take cuts on the way.

    Args:
        cache: holds a beginning of `ids`.
        ids: the whole prompt: which cuts are wished depends on where it ends.
        stop: position.
        prefixes: where cuts go; None takes none.
        after: called with the position after each call.

    Returns:
        The logits of the last token that was read; None when nothing was.

    Raises:
        ContextFull: the whole prompt does not fit. Nothing was read.
    """
    if len(ids) > cache.max_context:
        num_tokens = len(ids) - cache.seen
        raise ContextFull(position=cache.seen, num_tokens=num_tokens, max_context=cache.max_context)
    cuts: set[int] = set()
    if prefixes is not None:
        cuts |= set(wished_cuts(cache.seen, len(ids), cache.groups, chunk=CHUNK))
        # its last token is always read again: the same prompt goes on from the edge before that
        cuts.add(_edge_before_last(ids))

    def noted(position: int) -> None:
        if prefixes is not None and position in cuts:
            publish(cache, prefixes)
        if after is not None:
            after(position)

    logits = None
    if stop > cache.seen or stop == len(ids):
        logits = prefill(cache.model, cache, ids[:stop], after=noted)
    # taken as the rest is read, published with the turn's end
    cache.wish([cut for cut in cuts if cut > cache.seen])
    return logits


def read_ahead(cache: "HybridCache", prefixes: PrefixCache, ids: Sequence[int]) -> None:
    """Read a prompt's whole chunks, and take cuts; `generate` then reads the rest at once.

    What follows the last whole chunk, or the last token, is left: its call gives the logits.
    """
    read(cache, ids, _edge_before_last(ids), prefixes=prefixes)


def _edge_before_last(ids: Sequence[int]) -> int:
    return (len(ids) - 1) // CHUNK * CHUNK


def publish(cache: "HybridCache", prefixes: PrefixCache) -> list[int]:
    """Take every cut that was wished and met, and one here; the positions of those written."""
    ids = held_ids(cache, None)
    session = cache.session
    if session is None or ids is None:
        raise ArgumentError(
            argument="cache", expected="tokens that are known", got="none, or embeddings"
        )
    taken = []
    for position in sorted({*session.captures, session.position}):
        here = position == session.position
        states = cache.states()
        if states and not here:
            # nobody kept the states there
            continue
        cut, _ = prefixes.publish(
            session, ids, position=None if here else position, states=states or None
        )
        if cut is not None:
            taken.append(position)
    return taken


def _store_for(cache: "HybridCache") -> KVStore:
    return cache.made_store(cache.model.dtype, cache.model.device)


def _adopt(cache: "HybridCache", loaded: Loaded, source: str, reason: str, begun: float) -> None:
    session = loaded.session
    try:
        cache.adopt(session, loaded.states)
    except PackMismatch:
        session.close()
        raise
    numerics = session.store.numerics
    cache.origin = Origin(
        tokens=session.position,
        source=source,
        reason=reason,
        same_numerics=all(made == numerics for _, made in session.ledger.numerics),
        seconds=time.perf_counter() - begun,
    )
