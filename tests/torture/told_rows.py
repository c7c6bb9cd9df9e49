"""Sessions whose rows say which position, layer and seed they are of: a mixture shows at once."""

import torch

from kvplane.errors import PackMissing, SessionNotFound
from kvplane.pack import PrefixCache, load_session, save_session
from saved_roots import FINGERPRINT, GEOMETRY, _rows, grow, new_store

NUM_LAYERS = len(GEOMETRY.layers)
LIMIT = 600


class Mixture(Exception):
    """Rows that are not those of one session."""


def check(session, seed):
    """Nothing, when every live row is the seed's at its position."""
    for layer in range(NUM_LAYERS):
        live = session.live(layer)
        keys, values = _rows(seed, layer)
        spans = session.spans(layer, live.start, live.stop)
        for which, expected in enumerate((keys, values)):
            wanted = expected[live.start : live.stop]
            got = torch.cat([pair[which].reshape(-1, *wanted.shape[1:]) for pair in spans])
            if not torch.equal(got, wanted):
                raise Mixture(f"layer {layer}, positions {live}, seed {seed}")


def resumed(storage, name, seed):
    """A saved session, checked; None where there is none."""
    try:
        session = load_session(storage, name, new_store(), FINGERPRINT)[1].session
    except SessionNotFound:
        return None
    check(session, seed)
    return session


def go_on(storage, session, name, seed, num_tokens):
    """Some more tokens, a cut and a save."""
    first = session.position
    grow(session, list(range(first, first + num_tokens)), seed=seed)
    PrefixCache(storage, FINGERPRINT).publish(session)
    save_session(storage, name, session, FINGERPRINT)


def matched(storage, seed, length):
    """The position of the deepest cut of a prompt, its rows checked."""
    store = new_store()
    for _ in range(3):
        try:
            match, loaded = PrefixCache(storage, FINGERPRINT).load(list(range(length)), store)
        except PackMissing:
            # a sweeper has it aside for an instant
            continue
        if loaded is None:
            return 0
        check(loaded.session, seed)
        loaded.session.close()
        return match.position
    return 0
