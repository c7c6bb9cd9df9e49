"""A cache's sessions on disk: saved and loaded by name, found by prefix.

`HybridCache.save`, `load`, `for_prompt` and `publish` are the public doors.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvplane.errors import ArgumentError, PackMismatch
from kvplane.integrations.transformers.identity import fingerprint_of
from kvplane.pack import (
    PrefixCache,
    Written,
    load_session,
    open_root,
    save_session,
    wished_cuts,
)
from kvplane.pack.reader import Loaded
from kvplane.schedule import CHUNK, canonical

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
    """

    tokens: int
    source: str
    reason: str = ""
    same_numerics: bool = True


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
    model: Any,  # noqa: ANN401 - any transformers model
    tokens: Ids | None,
    *,
    name: str,
    weights: str | None,
) -> Written:
    """Save a cache under a name in a root: `HybridCache.save`."""
    ids = held_ids(cache, tokens)
    session = cache.session
    if session is None:
        raise ArgumentError(argument="cache", expected="at least one token", got="none")
    storage = open_root(path, create=True)
    with storage.lock(name):
        return save_session(
            storage,
            name,
            session,
            fingerprint_of(model, weights=weights),
            tokens=ids,
            states=cache.states(),
        )


def load(
    cache: "HybridCache",
    path: Root,
    model: Any,  # noqa: ANN401 - any transformers model
    *,
    name: str,
    weights: str | None,
) -> Origin:
    """Fill an empty cache from a saved session: `HybridCache.load`."""
    storage = open_root(path)
    store = cache.made_store(model.dtype, model.device)
    fingerprint = fingerprint_of(model, weights=weights)
    _, loaded = load_session(storage, name, store, fingerprint)
    return _adopted(cache, loaded, f"session {name}", "")


def prefixes_of(
    root: Root,
    model: Any,  # noqa: ANN401 - any transformers model
    *,
    weights: str | None,
    salt: bytes,
) -> PrefixCache:
    """The cuts of a model in a root."""
    return PrefixCache(root, fingerprint_of(model, weights=weights), salt=salt)


def begin(
    cache: "HybridCache", prefixes: PrefixCache, ids: Sequence[int], *, strict: bool
) -> Origin:
    """Fill an empty cache from the deepest cut that a prompt starts with."""
    model = cache.model
    store = cache.made_store(model.dtype, model.device)
    match, loaded = prefixes.load(ids, store, strict=strict, remember=True)
    if loaded is None:
        return Origin(tokens=0, source="nothing", reason=match.reason)
    return _adopted(cache, loaded, "a cut", match.reason)


def read_ahead(cache: "HybridCache", prefixes: PrefixCache, ids: Sequence[int]) -> None:
    """Read a prompt's whole chunks, and take cuts; `generate` then reads the rest at once.

    What follows the last whole chunk, or the last token, is left: its call gives the logits.
    """
    from kvplane.integrations.transformers.calls import call  # noqa: PLC0415 - it imports the cache

    cuts = wished_cuts(cache.seen, len(ids), cache.groups, chunk=CHUNK)
    stop = (len(ids) - 1) - (len(ids) - 1) % CHUNK
    for part in canonical(cache.seen, max(cache.seen, stop)):
        call(cache.model, cache, ids[part.start : part.stop])
        if part.stop in cuts:
            publish(cache, prefixes)
    # taken as the rest is read, published with the turn's end
    cache.wish([cut for cut in cuts if cut > cache.seen])


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


def _adopted(cache: "HybridCache", loaded: Loaded, source: str, reason: str) -> Origin:
    session = loaded.session
    try:
        cache.adopt(session, loaded.states)
    except PackMismatch:
        session.close()
        raise
    numerics = session.store.numerics
    return Origin(
        tokens=session.position,
        source=source,
        reason=reason,
        same_numerics=all(made == numerics for _, made in session.ledger.numerics),
    )
