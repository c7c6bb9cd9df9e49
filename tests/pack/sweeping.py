"""What a saved session holds, to be compared before and after a sweep."""

from kvplane.pack import load_session
from saved_roots import FINGERPRINT, new_store


def load(storage, name):
    store = new_store()
    saved, loaded = load_session(storage, name, store, FINGERPRINT)
    rows = [
        (key.clone(), value.clone())
        for layer in range(6)
        for key, value in loaded.session.spans(
            layer, loaded.session.live(layer).start, loaded.session.position
        )
    ]
    loaded.session.close()
    return saved.state.position, rows


def same(one, other):
    return one[0] == other[0] and all(
        (k1 == k2).all() and (v1 == v2).all()
        for (k1, v1), (k2, v2) in zip(one[1], other[1], strict=True)
    )
