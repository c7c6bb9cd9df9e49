"""The gates around a window of 2,048: saved, loaded, and gone on past the next wrap."""

import pytest
from made_by_hand import Made, bits_of, producers_of

from kvplane.pack import PrefixCache, load_session, open_root, save_session
from kvplane.storage import MemoryStorage

GATES = (1, 31, 32, 33, 2047, 2048, 2049, 2559, 2560, 2561, 4095, 4096, 4097)


@pytest.mark.parametrize("slack", [0, 16])
@pytest.mark.parametrize("attention", ["blocked", "physical"])
def test_a_session_comes_back_at_every_gate_in_the_rows_it_lay_in(slack, attention):
    made = Made(2048, 128, None, max_context=8192, slack=slack, attention=attention)
    storage = open_root(MemoryStorage(), create=True)
    cache = PrefixCache(storage, made.fingerprint)
    session = made.open()
    for position in GATES:
        made.extend(session, range(session.position, position))
        save_session(storage, "s", session, made.fingerprint)
        cache.publish(session)
        loaded = load_session(storage, "s", made.store, made.fingerprint)[1].session
        match, cut = cache.load([*range(position), 0], made.store)

        assert bits_of(session) == bits_of(loaded)
        assert position == match.position == cut.session.position
        assert {1} == {maker for rows in producers_of(cut.session).values() for maker in rows}
        loaded.close()
        cut.session.close()
    last = load_session(storage, "s", made.store, made.fingerprint)[1].session
    for each in (session, last):
        made.extend(each, range(4097, 6200))

    assert bits_of(session) == bits_of(last)
