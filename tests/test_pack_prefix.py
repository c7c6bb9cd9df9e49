"""Prefixes: always the deepest usable cut, never one too deep, with whose rows they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane import KVStore, ModelGeometry
from kvplane.errors import ArgumentError, PackError
from kvplane.geometry import LayerGeometry
from kvplane.pack import Fingerprint, PrefixCache, wished_cuts
from kvplane.pack.blob import blob_name
from kvplane.storage import MemoryStorage
from saved_roots import FINGERPRINT, GEOMETRY, grow, new_store


def tiny_geometry(windows):
    kinds = [("sliding_attention", window) for window in windows] + [("full_attention", None)]
    return ModelGeometry(
        layers=tuple(
            LayerGeometry(
                kind=kind, sliding_window=window, num_kv_heads=1, head_dim=2, value_head_dim=2
            )
            for kind, window in kinds
        ),
        dtype="float32",
    )


def extend(session, ids, producer, *, capture=()):
    """Rows whose bits say who made them, in which layer, at which position."""
    with session.step(list(ids), capture=capture) as step:
        for layer in range(len(session.geometry.layers)):
            marks = producer * 1e5 + torch.arange(step.first, step.stop).float() + layer / 16
            rows = marks[:, None, None].expand(-1, 1, 2).contiguous()
            step.write(layer, rows, -rows)


def producers_of(session):
    """For every live row of every layer: who made it; each row is checked to be its position's."""
    found = {}
    for layer in session.planes:
        live = session.live(layer)
        marks = torch.cat([key[:, 0, 0] for key, _ in session.spans(layer, live.start, live.stop)])
        places = marks.double() - torch.arange(live.start, live.stop) - layer / 16
        found[layer] = [round(float(place) / 1e5) for place in places]
    return found


def test_a_prompt_that_was_read_before_is_loaded_up_to_its_last_token_but_one():
    cache = PrefixCache(MemoryStorage(), FINGERPRINT)
    session = grow(new_store().open([]), list(range(300)))
    cache.publish(session, list(range(300)))

    for prompt, expected in (
        (list(range(301)), 300),
        (list(range(300)), 0),
        (list(range(299)), 0),
        ([*range(300), 999, 998], 300),
        ([*range(299), 999, 998], 0),
        ([], 0),
    ):
        assert expected == cache.match(prompt, new_store()).position


def test_the_reason_of_a_miss_says_what_was_seen():
    cache = PrefixCache(MemoryStorage(), FINGERPRINT)
    cache.publish(grow(new_store().open([]), list(range(600))), list(range(600)))
    match = cache.match([*range(520), 7, 7, 7], new_store())

    assert (0, 512) == (match.position, match.seen)
    assert "512 tokens were seen before, no cut was taken after 0" == match.reason


def test_a_loaded_cut_goes_on_as_the_one_that_published_it():
    cache = PrefixCache(MemoryStorage(), FINGERPRINT)
    store = new_store()
    session = grow(store.open([]), list(range(512)))
    cache.publish(session, list(range(512)))
    match, loaded = cache.load(list(range(600)), store, remember=True)
    twin = loaded.session

    assert 512 == match.position == twin.position
    assert list(range(512)) == twin.tokens
    for layer in twin.planes:
        live = twin.live(layer)
        for (k1, v1), (k2, v2) in zip(
            session.spans(layer, live.start, live.stop),
            twin.spans(layer, live.start, live.stop),
            strict=True,
        ):
            assert torch.equal(k1, k2)
            assert torch.equal(v1, v2)


def test_a_cut_crossed_inside_a_step_longer_than_the_ring_is_whole():
    geometry = tiny_geometry((8, 16))
    fingerprint = Fingerprint.of(geometry, weights="w")
    store = KVStore(geometry, max_context=512)
    cache = PrefixCache(MemoryStorage(), fingerprint)
    session = store.open([])
    extend(session, range(5), 1)
    extend(session, range(5, 100), 1, capture=[40])
    cut, _ = cache.publish(session, list(range(100)), position=40)
    _, loaded = cache.load([*range(40), 7], store)

    assert {"s8.1x2x2.f32": 33, "s16.1x2x2.f32": 25, "f0.1x2x2.f32": 0} == {
        name: rows.first for name, rows in cut.state.groups.items()
    }
    assert {1} == {p for made in producers_of(loaded.session).values() for p in made}
    assert {} == session.captures


def test_a_cut_whose_rows_are_gone_is_refused():
    geometry = tiny_geometry((8,))
    cache = PrefixCache(MemoryStorage(), Fingerprint.of(geometry, weights="w"))
    session = KVStore(geometry, max_context=512).open([])
    extend(session, range(100), 1)

    with pytest.raises(ArgumentError, match="positions from 33"):
        cache.publish(session, list(range(100)), position=40)
    assert () == cache.storage.list("cuts")


def test_a_session_that_began_elsewhere_is_never_published():
    geometry = tiny_geometry((8,))
    cache = PrefixCache(MemoryStorage(), Fingerprint.of(geometry, weights="w"))
    session = KVStore(geometry, max_context=512).open([], first_position=10)
    extend(session, range(20), 1)

    with pytest.raises(ArgumentError, match="position 0"):
        cache.publish(session, list(range(30)))


def test_each_resumes_with_its_own_rows_and_a_reader_gets_one_producers_cut():
    geometry = tiny_geometry((8,))
    fingerprint = Fingerprint.of(geometry, weights="w")
    cache = PrefixCache(MemoryStorage(), fingerprint)
    store = KVStore(geometry, max_context=1024)
    ids = list(range(300))
    for producer in (1, 2):
        session = store.open([])
        extend(session, ids[:256], producer)
        if producer == 1:
            cache.publish(session, ids[:256])
        extend(session, ids[256:], producer)
        if producer == 2:
            cache.publish(session, ids)
    deep = cache.load([*ids, 1], store)[1].session
    shallow = cache.load([*ids[:256], 1], store)[1].session

    assert {2} == {p for made in producers_of(deep).values() for p in made}
    assert {1} == {p for made in producers_of(shallow).values() for p in made}


def test_strict_takes_only_rows_that_a_cold_run_would_have():
    cache = PrefixCache(MemoryStorage(), FINGERPRINT)
    store = new_store()
    session = grow(store.open([]), list(range(256)))
    cache.publish(session, list(range(256)))
    grow(session, list(range(256, 300)))
    cache.publish(session, list(range(300)))
    prompt = [*range(300), 5]
    strict = cache.match(prompt, store, strict=True)

    assert 300 == cache.match(prompt, store).position
    assert 256 == strict.position
    assert "not canonical" in strict.reason


def test_rows_of_other_numerics_are_no_use_to_a_strict_reader():
    cache = PrefixCache(MemoryStorage(), FINGERPRINT)
    cache.publish(grow(new_store().open([]), list(range(256))), list(range(256)))
    other = KVStore(GEOMETRY, max_context=2048, attention="physical")
    prompt = list(range(300))
    strict = cache.match(prompt, other, strict=True)

    assert 256 == cache.match(prompt, other).position
    assert (0, True) == (strict.position, "other numerics" in strict.reason)


def test_an_evicted_cut_is_passed_over_and_named():
    cache = PrefixCache(MemoryStorage(), FINGERPRINT)
    session = grow(new_store().open([]), list(range(256)))
    cache.publish(session, list(range(256)))
    grow(session, list(range(256, 300)))
    cut, _ = cache.publish(session, list(range(300)))
    first = set(cache.match(list(range(257)), new_store()).cut.state.blobs)
    cache.storage.delete(blob_name(min(cut.state.blobs - first)))
    match = cache.match(list(range(301)), new_store())

    assert (256, True) == (match.position, "evicted" in match.reason)


def test_a_cut_whose_blob_turns_out_damaged_is_passed_over_once():
    storage = MemoryStorage()
    cache = PrefixCache(storage, FINGERPRINT)
    session = grow(new_store().open([]), list(range(256)))
    cache.publish(session, list(range(256)))
    grow(session, list(range(256, 300)))
    cut, _ = cache.publish(session, list(range(300)))
    shallow = cache.match(list(range(257)), new_store()).cut.state.blobs
    spoil(storage, min(cut.state.blobs - shallow))
    match, loaded = cache.load(list(range(301)), new_store())

    assert (256, 256) == (match.position, loaded.session.position)
    assert "damaged" in match.reason

    spoil(storage, min(shallow))
    with pytest.raises(PackError):
        cache.load(list(range(301)), new_store())


def spoil(storage, blob):
    name = blob_name(blob)
    data = bytearray(storage.read(name, limit=1 << 30))
    data[-1] ^= 1
    storage.replace(name, bytes(data))


def test_two_publishers_of_one_cut_do_not_conflict_and_it_is_stored_once():
    cache = PrefixCache(MemoryStorage(), FINGERPRINT)
    for _ in range(2):
        cache.publish(grow(new_store().open([]), list(range(300))), list(range(300)))

    assert 1 == len(cache.storage.list("cuts"))


def test_another_tenant_finds_nothing():
    storage = MemoryStorage()
    session = grow(new_store().open([]), list(range(256)))
    PrefixCache(storage, FINGERPRINT, salt=b"a").publish(session, list(range(256)))

    assert 0 == PrefixCache(storage, FINGERPRINT).match(list(range(300)), new_store()).position
    mine = PrefixCache(storage, FINGERPRINT, salt=b"a").match(list(range(300)), new_store())
    assert 256 == mine.position


def test_a_conversation_of_ten_turns_stores_each_row_once():
    storage = MemoryStorage()
    cache = PrefixCache(storage, FINGERPRINT)
    store = new_store()
    ids = []
    named = 0
    for turn in range(10):
        _, loaded = cache.load([*ids, 9], store, remember=True)
        session = store.open([]) if loaded is None else loaded.session
        more = list(range(turn * 70, turn * 70 + 70))
        grow(session, more)
        ids += more
        cut, _ = cache.publish(session, ids)
        named = max(named, len(cut.state.blobs))
        session.close()
    stored = sum(storage.size(name) for name in storage.list("blobs"))
    group_rows = {"f0": len(ids) * 2, "s32": 0, "s64": 0}
    for position in range(70, 701, 70):
        group_rows["s32"] += 31 * 2
        group_rows["s64"] += min(position, 63) * 2
    headers = len(storage.list("blobs")) * 700
    row_nbytes = 2 * (4 + 4) * 2

    assert stored - headers <= 1.05 * sum(group_rows.values()) * row_nbytes


@settings(max_examples=40)
@given(data=st.data())
def test_match_agrees_with_an_oracle_that_tries_every_cut(data):
    windows = data.draw(st.sampled_from([(32,), (64, 33), (300,)]))
    geometry = tiny_geometry(windows)
    store = KVStore(geometry, max_context=2048)
    cache = PrefixCache(MemoryStorage(), Fingerprint.of(geometry, weights="w"))
    texts, cuts = [], []
    for producer in range(data.draw(st.integers(1, 4))):
        ids, start = [], 0
        if texts and data.draw(st.booleans()):
            base = data.draw(st.sampled_from(texts))
            keep = data.draw(st.integers(0, len(base)))
            _, loaded = cache.load([*base[:keep], 3], store, remember=True)
            if loaded is not None:
                start = loaded.session.position
                ids = list(base[:start])
                session = loaded.session
        if not start:
            session = store.open([])
        for _ in range(data.draw(st.integers(1, 4))):
            count = data.draw(st.sampled_from([1, 7, 31, 64, 200, 256, 300]))
            more = [data.draw(st.integers(0, 1))] * count
            extend(session, more, producer + 1)
            ids += more
            if data.draw(st.booleans()):
                cache.publish(session, ids)
                cuts.append(tuple(ids))
        texts.append(ids)
        session.close()
    prompt = list(data.draw(st.sampled_from(texts)))
    prompt = prompt[: data.draw(st.integers(0, len(prompt)))]
    prompt += [data.draw(st.integers(0, 1))] * data.draw(st.sampled_from([0, 1, 2, 300]))
    usable = [len(c) for c in cuts if len(c) < len(prompt) and tuple(prompt[: len(c)]) == c]

    assert max(usable, default=0) == cache.match(prompt, store).position


def test_cuts_are_wished_at_the_chunks_edge_the_end_and_on_the_way():
    groups = tiny_geometry((32,)).groups

    assert [256, 300] == wished_cuts(0, 300, groups, chunk=256)
    assert [256] == wished_cuts(0, 256, groups, chunk=256)
    assert [2048, 4096, 4352, 4400] == wished_cuts(0, 4400, groups, chunk=256)
    assert [4352, 4400] == wished_cuts(4097, 4400, groups, chunk=256)
    assert [] == wished_cuts(5, 5, groups, chunk=256)
