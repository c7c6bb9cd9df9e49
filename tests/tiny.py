"""Stores of a few scalars: rows whose content says which token they are.

A token is an int; its row in layer l is `key[h, d] = 100 * token + 10 * h + d + SHIFT * l` and
`value = -key`, exact in float32. By default a token equals its position, so a row in the wrong
place, of the wrong layer or of another branch shows at once.
"""

import functools

import torch

from kvplane import KVStore, LayerGeometry, ModelGeometry

SHIFT = 1 << 20
# of stores that are made without a name; the fixture `memory` tries each
MEMORY = "heap"


def geometry(*windows, heads=1, head_dim=2, value_head_dim=None, shares=None, dtype="float32"):
    """A model with a layer for each window; None is a full layer; `shares` maps layer to owner."""
    shares = shares or {}
    return ModelGeometry(
        layers=tuple(
            LayerGeometry(
                kind="full_attention" if window is None else "sliding_attention",
                sliding_window=window,
                num_kv_heads=heads,
                head_dim=head_dim,
                value_head_dim=head_dim if value_head_dim is None else value_head_dim,
                shares_kv_with=shares.get(layer),
            )
            for layer, window in enumerate(windows)
        ),
        dtype=dtype,
    )


def store(*windows, max_context=64, memory=None, **options):
    """A store of such a model; options of `geometry` or of `KVStore`."""
    names = ("heads", "head_dim", "value_head_dim", "shares", "dtype")
    shape = {name: options.pop(name) for name in names if name in options}
    memory = MEMORY if memory is None else memory
    return KVStore(geometry(*windows, **shape), max_context=max_context, memory=memory, **options)


@functools.cache
def _places(heads, dim):
    return torch.arange(heads)[:, None] * 10 + torch.arange(dim)


def rows(group, layer, tokens):
    """Key and value of tokens, `[T, kv_head, dim]`."""
    first = torch.tensor([100 * token + SHIFT * layer for token in tokens])[:, None, None]
    dtype = getattr(torch, group.dtype)
    key = (first + _places(group.num_kv_heads, group.head_dim)).to(dtype)
    return key, -(first + _places(group.num_kv_heads, group.value_head_dim)).to(dtype)


def token_of(group, layer, key, value):
    """The token whose row this is; anything else fails."""
    token = round((float(key[0, 0]) - SHIFT * layer) / 100)
    wanted, negative = rows(group, layer, [token])
    assert torch.equal(wanted[0], key)
    assert torch.equal(negative[0], value)
    return token


def tokens_of(session, layer, spans):
    """The tokens in spans of views, in their order."""
    group = session.geometry.group_of(layer)
    owner = session.geometry.owner(layer)
    return [
        token_of(group, owner, key[row], value[row])
        for key, value in spans
        for row in range(key.shape[0])
    ]


def owners(session):
    """The layers that own rows."""
    return [layer for group in session.groups for layer in group.layers]


def write(step, session, tokens, layers=None):
    """Write tokens in some layers of an open step, all by default."""
    for layer in owners(session) if layers is None else layers:
        step.write(layer, *rows(session.geometry.group_of(layer), layer, tokens))


def put(session, tokens, *, accepted=None, speculative=False):
    """Add tokens in one step."""
    tokens = list(tokens)
    with session.step(tokens, speculative=speculative) as step:
        write(step, session, tokens)
        if accepted is not None:
            step.commit(accepted)


def put_each(session, tokens):
    """Add tokens one by one."""
    for token in tokens:
        put(session, [token])


def filled(session, stop):
    """The session, with tokens that equal their positions up to `stop`, one by one."""
    put_each(session, range(session.position, stop))
    return session


def held(session, layer):
    """The tokens a layer holds, oldest first."""
    live = session.live(layer)
    return tokens_of(session, layer, session.spans(layer, live.start, live.stop))


def meta(session, layer):
    """(origin_logical, origin_physical, length) of the layer's group."""
    cursor = session.cursors[session.geometry.group_of(layer).id]
    return cursor.origin_logical, cursor.origin_physical, cursor.length


def in_rows(session, layer):
    """The token in each row of a layer's plane, by row; None where the row was never written."""
    group = session.geometry.group_of(layer)
    plane = session.planes[layer]
    found = []
    for row in range(plane.shape.capacity):
        key, value = plane.key[0, row], plane.value[0, row]
        written = bool(torch.isfinite(key).all()) and bool((key != 0).any())
        found.append(token_of(group, layer, key, value) if written else None)
    return found


def state(session):
    """Everything that a refusal must leave as it was."""
    return (
        session.position,
        session.tokens,
        {name: cursor.as_tuple() for name, cursor in session.cursors.items()},
        {layer: held(session, layer) for layer in owners(session)},
        {layer: plane.key.clone() for layer, plane in session.planes.items()},
        session.store.account.held,
        sorted(session.captures),
        session.ledger.copy(),
        session.open_step,
    )


def same(before, after):
    """Whether two such states are equal, NaN included."""
    return (
        before[:4] == after[:4]
        and before[5:] == after[5:]
        and all(
            torch.equal(before[4][layer].view(torch.uint8), after[4][layer].view(torch.uint8))
            for layer in before[4]
        )
    )


def live_bytes(session):
    """Key and value of every live row by layer, oldest first."""
    return {
        layer: [part.contiguous() for part in session.planes[layer].copy_of(runs)]
        for group in session.groups
        for runs in [session.live_runs(group)]
        for layer in group.layers
    }


def equal(mine, theirs):
    """Whether two such are the same."""
    return mine.keys() == theirs.keys() and all(
        torch.equal(a, b) for at in mine for a, b in zip(mine[at], theirs[at], strict=True)
    )
