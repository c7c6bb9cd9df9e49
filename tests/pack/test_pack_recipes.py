"""Public defects of such stores as recipes, by number: those about what is saved and found again.

Where a recipe expects a hit at a position at which no cut was taken, packs owe the miss and its
reason: a session that lives matches to the token.
"""

import json

import pytest
from made_by_hand import Made, bits_of, producers_of

from kvplane.errors import CacheDiscontinuity, PackCorrupt, PackError
from kvplane.pack import Aux, PrefixCache, load_session, open_root, read_session, save_session
from kvplane.pack import chain as chains
from kvplane.pack.blob import blob_name
from kvplane.pack.encoding import digest, sealed
from kvplane.pack.sessions import session_file
from kvplane.storage import LocalStorage, MemoryStorage
from kvplane.testing.faults import FaultySystem, Kind, attempt, each_fault

LIMIT = 1 << 26


def prefix_hit(made, session, tokens):
    """What a prompt of these tokens reuses of cuts at a session's end, and why no more."""
    cache = PrefixCache(MemoryStorage(), made.fingerprint)
    cache.publish(session)
    found = cache.match(tokens, made.store)
    return found.position, found.reason


def test_b35_a_load_that_failed_leaves_the_store_and_every_session_as_they_were():
    made = Made(8, None, max_context=64)
    root = open_root(MemoryStorage(), create=True)
    session, other = made.open(range(10)), made.open(range(30), producer=2)
    save_session(root, "s", session, made.fingerprint)
    before, theirs, held = bits_of(session), bits_of(other), made.store.memory()
    for blob in sorted(read_session(root, "s").state.blobs):
        name = blob_name(blob)
        whole = root.read(name, limit=LIMIT)
        root.replace(name, whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(PackCorrupt):
            load_session(root, "s", made.store, made.fingerprint)
        root.replace(name, whole)

    assert (before, theirs) == (bits_of(session), bits_of(other))
    assert held == made.store.memory()
    made.extend(session, [10])
    session.reset()
    made.extend(session, [0])
    assert 1 == session.position


def test_b43_every_flip_and_every_cut_of_a_blob_is_refused_and_so_are_two_blobs_swapped():
    made = Made(8, None, max_context=1024)
    root = open_root(MemoryStorage(), create=True)
    session = made.open(range(512))
    save_session(root, "s", session, made.fingerprint)
    full = [span.blob for span in read_session(root, "s").state.groups["f0.1x2x2.f32"].spans]
    name = blob_name(full[0])
    whole = root.read(name, limit=LIMIT)
    data_first = 8 + int.from_bytes(whole[:8], "little")
    damaged = {
        "a header byte": (20, None),
        "a length field": (0, None),
        "one byte of a key": (data_first, None),
        "one byte of a value": (data_first + (len(whole) - data_first) // 2, None),
        "the last byte": (len(whole) - 1, None),
        "a byte less": (None, whole[:-1]),
        "half": (None, whole[: len(whole) // 2]),
        "nothing": (None, b""),
        "a byte more": (None, whole + b"\0"),
        "another block's": (None, root.read(blob_name(full[1]), limit=LIMIT)),
    }
    for what, (place, data) in damaged.items():
        flipped = bytearray(whole)
        if place is not None:
            flipped[place] ^= 4
        root.replace(name, bytes(flipped) if data is None else data)
        with pytest.raises(PackError):
            load_session(root, "s", made.store, made.fingerprint)

        assert [session] == made.store.sessions, what


def test_b45_killed_while_it_saves_again_the_old_session_or_the_new_is_there(tmp_path):
    made = Made(4, None, max_context=64)

    def fresh():
        fresh.number += 1
        root = LocalStorage(tmp_path / str(fresh.number), create=True, system=FaultySystem())
        save_session(open_root(root, create=True), "s", made.open(range(12)), made.fingerprint)
        return root.location

    fresh.number = 0

    def save_again(location, system):
        storage = open_root(LocalStorage(location, system=system))
        save_session(storage, "s", made.open(range(8), producer=2), made.fingerprint)

    seen = []
    for fault in each_fault(lambda system: save_again(fresh(), system), kinds=[Kind.KILL]):
        location = fresh()
        outcome = attempt(lambda system, at=location: save_again(at, system), fault)
        loaded = load_session(LocalStorage(location), "s", made.store, made.fingerprint)[1]
        found = {p for made_by in producers_of(loaded.session).values() for p in made_by}
        seen.append((loaded.session.position, found))
        made.store.close()
        made.store.closed = False

        assert outcome.killed
        assert seen[-1] in ((12, {1}), (8, {2}))
    assert (12, {1}) == seen[0]
    assert (8, {2}) == seen[-1]


PROMPT = list(range(20))


def test_b51_the_same_prompt_again_misses_with_a_reason_unless_its_own_cut_was_taken():
    made = Made(8, None, max_context=256)
    generated = [*PROMPT, 100, 101, 102, 103, 104]
    session = made.open(generated)

    assert 0 == prefix_hit(made, session, PROMPT)[0]
    assert "agrees" in prefix_hit(made, session, PROMPT)[1]
    for slack, held in ((0, False), (5, True)):
        made = Made(8, None, max_context=256, slack=slack)
        cache = PrefixCache(MemoryStorage(), made.fingerprint)
        session = made.open(PROMPT)
        checkpointed = PrefixCache(MemoryStorage(), made.fingerprint)
        checkpointed.publish(session, position=19) if held else None
        made.extend(session, generated[20:], chunk=1)
        # a ring with slack still holds what a cut at the prompt's last token but one needs
        if held:
            cache.publish(session, position=19)
            assert 19 == cache.match(PROMPT, made.store).position
            assert "" == cache.match(PROMPT, made.store).reason
        else:
            with pytest.raises(ValueError, match="positions from 12"):
                cache.publish(session, position=19)


def test_b51_a_cut_at_the_prompts_end_serves_every_prompt_that_goes_on():
    made = Made(8, None, max_context=256)
    cache = PrefixCache(MemoryStorage(), made.fingerprint)
    session = made.open(PROMPT)
    cache.publish(session)

    assert 20 == cache.match([*PROMPT, 7], made.store).position
    # the prompt itself needs its last token read again, and nothing holds the window before it
    assert 0 == cache.match(PROMPT, made.store).position


def test_b52_layers_that_evict_nothing_are_still_cut_only_where_a_cut_was_taken():
    made = Made(8, max_context=128, slack=100)
    session = made.open(range(100))
    cache = PrefixCache(MemoryStorage(), made.fingerprint)
    cache.publish(session, position=10)

    # nothing was evicted: a cut can be taken anywhere, and is then a hit
    assert 10 == cache.match(list(range(11)), made.store).position
    assert 10 == cache.match(list(range(60)), made.store).position
    session.rewind(10)
    assert 10 == session.position


def test_b54_the_smallest_window_decides_what_can_be_cut():
    made = Made(4, 16, None, max_context=64)
    session = made.open(range(10))
    cache = PrefixCache(MemoryStorage(), made.fingerprint)

    # the window of 16 still has all; the one of 4 needs 2 to 4 and holds 6 to 9
    with pytest.raises(ValueError, match="positions from 2 of s4"):
        cache.publish(session, position=5)
    assert () == cache.storage.list("cuts")
    position, reason = prefix_hit(made, session, list(range(6)))
    assert (0, True) == (position, "beyond 0" in reason)


def test_b55_a_cut_is_whole_in_every_group_or_is_none():
    made = Made(8, 16, None, max_context=512)
    cache = PrefixCache(MemoryStorage(), made.fingerprint)
    session = made.open(range(64))
    at_64 = cache.publish(session)[0]
    made.extend(session, range(64, 96))
    at_96 = cache.publish(session)[0]
    prompt = list(range(100))
    assert 96 == cache.match(prompt, made.store).position

    # of one group the rows at 96 are gone, of another those at 64: the answer is no minimum
    gone = at_96.state.groups["s8.1x2x2.f32"].spans[-1].blob
    cache.storage.delete(blob_name(gone))
    assert (64, True) == (
        cache.match(prompt, made.store).position,
        "evicted" in cache.match(prompt, made.store).reason,
    )
    gone = at_64.state.groups["s16.1x2x2.f32"].spans[0].blob
    cache.storage.delete(blob_name(gone))
    assert 0 == cache.match(prompt, made.store).position


@pytest.fixture
def weak(monkeypatch):
    """Chains hashed to 8 bits."""
    monkeypatch.setattr(
        chains, "digest", lambda *parts: bytes(31) + digest(*parts)[:1], raising=True
    )


def colliding(made, ids):
    """Other ids of the same length with the same weak chain and tail."""
    mine = chains.Chain(made.fingerprint.hex, ids)
    wanted = mine.at(len(ids) // 256), mine.tail(len(ids))
    for start in range(1000, 100_000):
        other = [start, *ids[1:]]
        theirs = chains.Chain(made.fingerprint.hex, other)
        if (theirs.at(len(ids) // 256), theirs.tail(len(ids))) == wanted:
            return other
    return pytest.fail("no collision")


@pytest.mark.parametrize("length", [20, 256])
@pytest.mark.usefixtures("weak")
def test_b62_a_collision_of_chains_is_a_miss_and_hides_nobodys_cut(length):
    made = Made(8, None, max_context=1024)
    cache = PrefixCache(MemoryStorage(), made.fingerprint)
    ids = list(range(length))
    other = colliding(made, ids)
    cache.publish(made.open(ids))

    assert 0 == cache.match([*other, 1], made.store).position
    assert "other tokens" in cache.match([*other, 1], made.store).reason
    # it does not keep the other from being published either
    assert cache.publish(made.open(other, producer=2))[0] is not None
    for text, producer in ((ids, 1), (other, 2)):
        loaded = cache.load([*text, 1], made.store)[1].session
        assert {producer} == {p for made_by in producers_of(loaded).values() for p in made_by}


def test_b62_another_salt_or_another_image_is_a_miss():
    made = Made(8, None, max_context=64)
    storage = MemoryStorage()
    image, other = Aux(2, 6, "image", "a" * 64), Aux(2, 6, "image", "b" * 64)
    cache = PrefixCache(storage, made.fingerprint, salt=b"tenant")
    cache.publish(made.open(PROMPT), aux=[image])
    prompt = [*PROMPT, 7]

    assert 20 == cache.match(prompt, made.store, aux=[image]).position
    # an image behind the cut is no reason to read what comes before it again
    behind = Aux(20, 21, "image", "c" * 64)
    assert 20 == cache.match(prompt, made.store, aux=[image, behind]).position
    for aux in ([], [other], [image, other], [image._replace(stop=7)], [image._replace(type="x")]):
        assert 0 == cache.match(prompt, made.store, aux=aux).position
    elsewhere = PrefixCache(storage, made.fingerprint, salt=b"other")
    assert 0 == elsewhere.match(prompt, made.store, aux=[image]).position


def test_b62_a_forged_cut_that_says_other_tokens_than_its_folder_is_passed_over():
    made = Made(8, None, max_context=64)
    cache = PrefixCache(MemoryStorage(), made.fingerprint)
    cache.publish(made.open(PROMPT))
    cache.publish(made.open([9, *PROMPT[1:]], producer=2))
    mine, theirs = (
        (name, json.loads(cache.storage.read(name, limit=LIMIT)))
        for name in cache.storage.list("cuts")
    )
    # its rows under the other's ids, sealed again, at the place where such a prompt looks
    forged = {**mine[1], "groups": theirs[1]["groups"]}
    data = sealed("cut", forged)
    cache.storage.replace(mine[0], data)
    found = cache.match(
        [*chains.np.frombuffer(__import__("base64").b64decode(mine[1]["tokens"]), "<u4"), 1],
        made.store,
    )

    assert (0, True) == (found.position, "name is another's" in found.reason)


@pytest.mark.parametrize("ids", [[1, 2, 3], [1, 2], [2, 1, 3]], ids=str)
def test_b64_ids_are_hashed_with_their_boundaries(ids):
    made = Made(8, None, max_context=64)
    whole = chains.Chain(made.fingerprint.hex, [*ids, 4]).tail(len(ids) + 1)
    other = chains.Chain(made.fingerprint.hex, [*ids, 0, 4]).tail(len(ids) + 2)

    assert whole != other
    assert chains.Chain(made.fingerprint.hex, [*ids, 4]).tail(len(ids)) != whole


def test_a_loaded_session_goes_on_at_the_next_position_and_no_other():
    made = Made(8, None, max_context=64)
    root = open_root(MemoryStorage(), create=True)
    save_session(root, "s", made.open(range(20)), made.fingerprint)
    session = load_session(root, "s", made.store, made.fingerprint)[1].session
    cursor = session.cursors["s8.1x2x2.f32"]

    assert 20 == session.position
    assert session_file("s") in root.list()
    with pytest.raises(CacheDiscontinuity):
        cursor.copy().append(0)
