"""Every file of a small root damaged in every way: refused by name, or bitwise right."""

import json

import pytest
import torch

from kvplane import KVStore
from kvplane.errors import PackCorrupt, PackError, PackMismatch, PackVersion
from kvplane.pack import Fingerprint, PrefixCache, load_session, open_root, save_session
from kvplane.pack.encoding import canonical, sealed
from kvplane.pack.root import ROOT
from kvplane.storage import MemoryStorage
from test_pack_prefix import extend, tiny_geometry

GEOMETRY = tiny_geometry((4,))
FINGERPRINT = Fingerprint.of(GEOMETRY, weights="w")
STORE = KVStore(GEOMETRY, max_context=64)
LIMIT = 1 << 20


def small_root(ids=tuple(range(10)), producer=1):
    storage = MemoryStorage()
    cache = PrefixCache(storage, FINGERPRINT)
    session = STORE.open([])
    extend(session, ids[:6], producer)
    cache.publish(session, ids[:6])
    extend(session, ids[6:], producer)
    save_session(storage, "s", session, FINGERPRINT)
    session.close()
    return storage


ORIGINAL = small_root()
NAMES = ORIGINAL.list()


def rows_of(session):
    found = []
    for layer in session.planes:
        live = session.live(layer)
        for key, value in session.spans(layer, live.start, live.stop):
            found += [key.clone(), value.clone()]
    return [session.position, session.tokens, *found]


def same(first, second):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(first, second, strict=True)
    )


def loaded(storage):
    """What the session and the cut give: rows, or the error."""
    results = []
    try:
        root = open_root(storage)
    except PackError as error:
        return [error, error]
    try:
        session = load_session(root, "s", STORE, FINGERPRINT)[1].session
    except PackError as error:
        results.append(error)
    else:
        results.append(rows_of(session))
        session.close()
    cache = PrefixCache(root, FINGERPRINT)
    try:
        _, found = cache.load(list(range(10)), STORE, remember=True)
    except PackError as error:
        results.append(error)
    else:
        results.append(None if found is None else rows_of(found.session))
        if found is not None:
            found.session.close()
    return results


WHOLE = loaded(ORIGINAL)


def check_damaged(name, data):
    """With these bytes in place of a file's: an error, nothing, or the very rows."""
    storage = MemoryStorage()
    for other in NAMES:
        storage.replace(other, data if other == name else ORIGINAL.read(other, limit=LIMIT))
    results = loaded(storage)
    for result, right in zip(results, WHOLE, strict=True):
        if isinstance(result, PackError) or result is None:
            continue
        assert same(result, right)
    assert [] == STORE.sessions
    return results


def test_the_small_root_loads_when_nothing_is_damaged():
    assert 10 == WHOLE[0][0]
    assert 6 == WHOLE[1][0]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_every_byte_flipped_is_refused_or_right(name):
    data = ORIGINAL.read(name, limit=LIMIT)
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        check_damaged(name, bytes(flipped))


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_every_length_of_every_file_is_refused_or_right(name):
    data = ORIGINAL.read(name, limit=LIMIT)
    for length in range(len(data)):
        check_damaged(name, data[:length])
    check_damaged(name, data + b"\0")


def test_every_two_files_swapped_are_refused_or_right():
    other = small_root(ids=tuple(range(20, 30)), producer=2)
    pool = [ORIGINAL.read(name, limit=LIMIT) for name in NAMES]
    pool += [other.read(name, limit=LIMIT) for name in other.list()]
    for name in NAMES:
        for data in pool:
            check_damaged(name, data)


@pytest.mark.parametrize("prefix", ["sessions/", "cuts/"])
def test_every_field_replaced_by_another_valid_documents_is_refused_or_right(prefix):
    other = small_root(ids=tuple(range(20, 33)), producer=2)
    name = next(n for n in NAMES if n.startswith(prefix))
    theirs = json.loads(
        other.read(next(n for n in other.list() if n.startswith(prefix)), limit=LIMIT)
    )
    kind = "session" if prefix == "sessions/" else "cut"
    for field, value in theirs.items():
        mine = json.loads(ORIGINAL.read(name, limit=LIMIT))
        mine[field] = value
        check_damaged(name, canonical(mine))
        if field != "self":
            # a forger seals what he wrote
            check_damaged(name, sealed(kind, mine))


HOSTILE = [None, True, -1, 0, 1, 5, 2**52, "", "x", [], {}, [[]], {"a": 1}, "0" * 64]


@pytest.mark.parametrize("prefix", ["sessions/", "cuts/"])
def test_every_field_at_every_depth_replaced_by_nonsense_gives_nothing_but_pack_errors(prefix):
    name = next(n for n in NAMES if n.startswith(prefix))
    kind = "session" if prefix == "sessions/" else "cut"
    document = json.loads(ORIGINAL.read(name, limit=LIMIT))

    def places(value, path=()):
        yield path
        if isinstance(value, dict):
            for key in value:
                yield from places(value[key], (*path, key))
        elif isinstance(value, list):
            for key in range(len(value)):
                yield from places(value[key], (*path, key))

    for path in list(places(document))[1:]:
        for value in HOSTILE:
            changed = json.loads(json.dumps(document))
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            # a sealed lie about rows is refused by the blobs' digests and metadata, or is right
            storage = MemoryStorage()
            for other in NAMES:
                data = sealed(kind, changed) if other == name else ORIGINAL.read(other, limit=LIMIT)
                storage.replace(other, data)
            loaded(storage)
    assert [] == STORE.sessions


def test_another_format_version_is_refused_first():
    for name in NAMES:
        if not name.endswith(".json") or name.startswith("nodes"):
            continue
        fields = json.loads(ORIGINAL.read(name, limit=LIMIT))
        result = check_damaged(name, canonical({**fields, "format": 2}))

        if name == ROOT or name.startswith("sessions"):
            assert isinstance(result[0], PackVersion)


def test_a_folder_with_something_else_in_it_is_no_root():
    storage = MemoryStorage()
    storage.put("notes.txt", b"x")

    with pytest.raises(PackCorrupt, match="no root"):
        open_root(storage, create=True)
    with pytest.raises(PackCorrupt, match="empty"):
        open_root(MemoryStorage())


def test_a_root_of_another_block_size_or_kind_is_refused():
    for fields, error in (
        ({"block": 128, "format": 1, "kind": "kvplane-root"}, PackMismatch),
        ({"block": 256, "format": 1, "kind": "other"}, PackCorrupt),
        ({"block": 256, "format": 1, "kind": "kvplane-root", "more": 1}, PackCorrupt),
    ):
        storage = MemoryStorage()
        storage.put(ROOT, canonical(fields))
        with pytest.raises(error):
            open_root(storage)
