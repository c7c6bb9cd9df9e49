"""Sequences that advance in lockstep, taken apart: each becomes an ordinary session.

Left padding holds rows at a batch's first positions. Its keys were numbered as transformers numbers
a padded text, the first real token 0, so without those rows each sequence is a session that began
at position 0.
"""

from collections.abc import Sequence

from kvplane.geometry import LayerGroup
from kvplane.ledger import Ledger
from kvplane.session import Session
from kvplane.snapshot import Cursor


def apart(session: Session, pads: Sequence[int]) -> list[Session]:
    """One ordinary session a sequence, without its padding.

    Args:
        session: of a batch, or an ordinary one.
        pads: rows of padding before each sequence's first token.

    Raises:
        LimitReached, MemoryUnavailable: as in `KVStore.open`. Nothing was made.
    """
    made: list[Session] = []
    try:
        for sequence, pad in enumerate(pads):
            made.append(_one(session, sequence, pad))
    except BaseException:
        for each in made:
            each.close()
        raise
    return made


def _one(session: Session, sequence: int, pad: int) -> Session:
    store = session.store
    count = session.position - session.first_position
    ids = None if session.ids is None else [session.ids[sequence][pad:count]]
    cursors = {group.id: _cursor(session, group, pad) for group in session.groups}
    # rows of a batch's calls are nobody's canonical rows
    runs = [(stop - pad, numerics) for stop, numerics in session.ledger.numerics if stop > pad]
    builder = store.builder(cursors, tokens=ids, ledger=Ledger(numerics=runs))
    try:
        for group in session.groups:
            first = cursors[group.id][2]
            live = session.cursors[group.id].rows_of(first + pad, session.position)
            for layer in group.layers:
                at = first
                for key, value in session.planes[layer].spans(live):
                    row = slice(sequence, sequence + 1)
                    builder.write(layer, at, key[row], value[row])
                    at += key.shape[1]
    except BaseException:
        builder.abandon()
        raise
    return builder.finish()


def _cursor(session: Session, group: LayerGroup, pad: int) -> Cursor:
    """Where a sequence's rows lie once its padding is gone: as in a session born at 0."""
    held = session.cursors[group.id]
    first = max(0, held.origin_logical - pad)
    row = divmod(first, held.capacity)[1]
    return held.capacity, held.next_position - pad - first, first, row
