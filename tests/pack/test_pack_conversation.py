"""What a conversation stores: each row that any of its cuts and saves names, once."""

import json

import pytest
from made_by_hand import Made, bits_of, producers_of

from kvplane.pack import Policy, PrefixCache, load_session, open_root, save_session
from kvplane.pack.blob import header_of
from kvplane.pack.documents import Cut, SavedSession
from kvplane.pack.ids import facts_of
from kvplane.storage import MemoryStorage

LIMIT = 1 << 26
POLICY = Policy(every=512)


def stored_and_named(storage):
    """Bytes of rows in blobs, and bytes of the distinct rows that documents name.

    Two rows are one when they are the same row of the same conversation: same group and position
    in a blob of equal bytes, or of the branch that a document shares with another.
    """
    stored = 0
    for name in storage.list("blobs"):
        data = storage.read(name, limit=LIMIT)
        stored += len(data) - header_of(data, name).data_first
    named = set()
    for name in storage.list():
        kind = {"cuts": Cut, "sessions": SavedSession}.get(name.partition("/")[0])
        if kind is None:
            continue
        state = kind.decoded(storage.read(name, limit=LIMIT), name).state
        for group, rows in state.groups.items():
            for span in rows.spans:
                named |= {(group, span.blob, p) for p in range(span.first, span.stop)}
    return stored, named


def distinct_nbytes(named, made):
    layers = {group.id: len(group.layers) for group in made.geometry.groups}
    return sum(facts_of(group).row_nbytes * layers[group] for group, _, _ in named)


def talk(made, storage, *, turns, resumed, save):
    """A conversation; each turn is a prompt read in chunks and an answer said token by token."""
    cache = PrefixCache(storage, made.fingerprint)
    groups = made.geometry.groups
    session, ids = made.store.open([]), []
    for turn in range(turns):
        if resumed and turn:
            session.close()
            if save and turn % 2:
                session = load_session(storage, "chat", made.store, made.fingerprint)[1].session
            else:
                session = cache.load([*ids, 0], made.store, remember=True)[1].session
            assert len(ids) == session.position
        prompt = [turn] * (37 + 211 * turn)
        wished = POLICY.prompt_cuts(len(ids), len(ids) + len(prompt), groups, chunk=256)
        for cut in wished:
            made.extend(session, prompt[session.position - len(ids) : cut - len(ids)])
            cache.publish(session)
        ids = ids + prompt
        made.extend(session, [99] * 53, chunk=1)
        ids = ids + [99] * 53
        cache.publish(session)
        if save:
            save_session(storage, "chat", session, made.fingerprint)
    return session, ids


@pytest.mark.parametrize("save", [True, False], ids=["saved", "cuts only"])
@pytest.mark.parametrize("resumed", [True, False], ids=["resumed", "in one process"])
@pytest.mark.parametrize("windows", [(32, None), (128, 64, None), (513, None, None)], ids=str)
def test_ten_turns_store_the_distinct_rows_of_their_cuts_and_saves_once(windows, resumed, save):
    made = Made(*windows, max_context=16_384)
    storage = MemoryStorage()
    session, ids = talk(made, storage, turns=10, resumed=resumed, save=save)
    stored, named = stored_and_named(storage)
    positions = {(group, position) for group, _, position in named}

    assert len(ids) == session.position > 10_000
    # no row of one conversation stands in two blobs that documents name
    assert len(positions) == len(named)
    assert stored <= 1.05 * distinct_nbytes(named, made)


def test_a_conversation_resumed_every_turn_stores_the_bytes_of_one_that_never_stopped():
    made = Made(128, 64, None, max_context=16_384)
    through, straight = MemoryStorage(), MemoryStorage()
    one, _ = talk(made, through, turns=6, resumed=True, save=True)
    two, _ = talk(made, straight, turns=6, resumed=False, save=True)

    assert bits_of(one) == bits_of(two)
    assert straight.list() == through.list()
    for name in straight.list():
        assert straight.read(name, limit=LIMIT) == through.read(name, limit=LIMIT)


def test_256_tokens_more_put_the_rows_of_256_tokens():
    made = Made(64, None)
    root = open_root(MemoryStorage(), create=True)
    session = made.open(range(1024))
    save_session(root, "s", session, made.fingerprint)
    made.extend(session, range(256))
    written = save_session(root, "s", session, made.fingerprint)
    row_nbytes = sum(len(group.layers) * group.row_nbytes for group in made.geometry.groups)

    # all rows of the full layer, of the sliding one those that are left
    assert 2 == written.blobs_written
    assert written.nbytes_written < (256 + 64) * row_nbytes + 2 * 1024


def test_an_edited_turn_shares_what_came_before_it_and_nothing_after():
    made = Made(32, None)
    storage = MemoryStorage()
    cache = PrefixCache(storage, made.fingerprint)
    first = made.open(range(600))
    cache.publish(first)
    made.extend(first, range(200))
    cache.publish(first)
    session = cache.load([*range(600), 7, 7], made.store, remember=True)[1].session
    made.extend(session, [7] * 200, producer=2)
    cache.publish(session)
    _, named = stored_and_named(storage)
    by_place = {}
    for group, blob, position in named:
        by_place.setdefault((group, position), set()).add(blob)

    assert {1} == {len(by_place[place]) for place in by_place if place[1] < 600}
    assert {2} == {len(by_place[place]) for place in by_place if place[1] >= 769}
    one = cache.load([*range(600), *range(200), 7], made.store)[1].session
    two = cache.load([*range(600), *[7] * 200, 7], made.store)[1].session
    assert {1} == {p for made_by in producers_of(one).values() for p in made_by}
    assert [1] * 600 + [2] * 200 == producers_of(two)[1]


def test_a_block_that_grew_by_many_saves_is_whole_in_every_document():
    made = Made(16, None)
    root = open_root(MemoryStorage(), create=True)
    session = made.open(range(250))
    for number in range(20):
        save_session(root, f"s{number}", session, made.fingerprint)
        made.extend(session, [number], chunk=1)
    for number in range(20):
        loaded = load_session(root, f"s{number}", made.store, made.fingerprint)[1].session

        assert 250 + number == loaded.position == len(producers_of(loaded)[1])
        loaded.close()
    stored, named = stored_and_named(root)
    assert stored <= 1.05 * distinct_nbytes(named, made)


def test_the_documents_of_a_conversation_hold_no_floats_and_no_paths():
    made = Made(16, None)
    root = open_root(MemoryStorage(), create=True)
    save_session(root, "s", made.open(range(20)), made.fingerprint)
    text = root.read("sessions/s.json", limit=LIMIT).decode()

    json.loads(text, parse_float=lambda number: pytest.fail(f"a float: {number}"))
    assert "/" not in text.replace(json.loads(text)["tokens"], "")
