"""A root by somebody who means harm: sizes, paths and names are checked before they are used."""

import itertools
import json
import os
import tracemalloc
from contextlib import suppress

import pytest
from made_by_hand import Made, producers_of

from kvplane.errors import ArgumentError, PackCorrupt, PackError, PackTooLarge, StorageError
from kvplane.pack import PrefixCache, load_session, open_root, read_session, save_session
from kvplane.pack.blob import blob_name
from kvplane.pack.encoding import digest, sealed
from kvplane.pack.sessions import remove_session, session_file
from kvplane.storage import LocalStorage, MemoryStorage
from kvplane.testing.faults import FaultySystem

LIMIT = 1 << 26
MADE = Made(8, None)
IDS = range(600)


def make_root(storage):
    """A session of 600 tokens, a cut at its end and one at 300."""
    cache = PrefixCache(storage, MADE.fingerprint)
    session = MADE.open(range(300))
    cache.publish(session)
    MADE.extend(session, range(300, 600))
    cache.publish(session)
    save_session(cache.storage, "s", session, MADE.fingerprint)


@pytest.fixture
def root(tmp_path):
    """A root in a folder, written without waiting for the disk."""
    make_root(LocalStorage(tmp_path / "root", create=True, system=FaultySystem()))
    return tmp_path / "root"


@pytest.mark.parametrize("folder", ["sessions", "cuts", "nodes"])
def test_a_manifest_of_2_gigabytes_takes_no_memory(root, folder):
    for path in (root / folder).rglob("*.json"):
        os.truncate(path, 2 << 30)
    cache = PrefixCache(root, MADE.fingerprint)
    tracemalloc.start()
    match = cache.match([*IDS, 0])
    if folder == "sessions":
        with pytest.raises(PackTooLarge, match=str(2 << 30)):
            load_session(cache.storage, "s", MADE.store, MADE.fingerprint)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert (0 if folder == "cuts" else 600) == match.position
    assert (folder == "cuts") == ("damaged" in match.reason)
    assert peak < 1 << 24


def test_a_header_that_claims_2_to_the_63_bytes_is_refused_for_that(root):
    storage = open_root(root)
    fields = json.loads(storage.read(session_file("s"), limit=LIMIT))
    for rows in fields["groups"].values():
        for span in rows["spans"]:
            data = bytearray(storage.read(blob_name(span[2]), limit=LIMIT))
            data[:8] = (1 << 63).to_bytes(8, "little")
            span[2] = digest(data).hex()
            storage.replace(blob_name(span[2]), data)
    storage.replace(session_file("s"), sealed("session", fields))

    with pytest.raises(PackTooLarge, match=str(1 << 63)):
        load_session(storage, "s", MADE.store, MADE.fingerprint)


@pytest.mark.parametrize(
    "name", ["../s", "..", "/etc/passwd", "a/../../s", "s\0", ".tmp", "S", "s/"]
)
def test_a_sessions_name_that_leaves_the_root_is_refused_at_every_door(root, name):
    storage = open_root(root)
    session = MADE.open(range(3))
    before = sorted(storage.list())

    for door in (
        lambda: read_session(storage, name),
        lambda: load_session(storage, name, MADE.store),
        lambda: remove_session(storage, name),
        lambda: save_session(storage, name, session, MADE.fingerprint),
    ):
        with pytest.raises(ArgumentError, match="name"):
            door()
    assert before == sorted(storage.list())


@pytest.mark.parametrize("name", ["../" * 21 + "a", "/" + "a" * 63, "." * 64, "A" * 64, "a" * 65])
def test_a_blobs_name_that_leaves_the_root_is_no_digest(root, name):
    storage = open_root(root)
    fields = json.loads(storage.read(session_file("s"), limit=LIMIT))
    fields["groups"]["f0.1x2x2.f32"]["spans"][0][2] = name
    storage.replace(session_file("s"), sealed("session", fields))

    with pytest.raises(PackCorrupt, match="not first, stop and blob"):
        load_session(storage, "s", MADE.store, MADE.fingerprint)


@pytest.mark.parametrize("part", ["blobs", "blobs/aa", "a blob", "sessions", "sessions/s.json"])
def test_a_link_out_of_the_root_is_followed_by_nobody(root, tmp_path, part):
    storage = open_root(root)
    blob = max(read_session(storage, "s").state.blobs)
    path = root / {"a blob": blob_name(blob), "blobs/aa": f"blobs/{blob[:2]}"}.get(part, part)
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)

    with pytest.raises(StorageError, match=r"symbolic link|not a plain file"):
        load_session(storage, "s", MADE.store, MADE.fingerprint)


def test_every_two_files_of_a_kind_swapped_are_refused_or_right():
    storage = MemoryStorage()
    make_root(storage)
    other = Made(8, None, weights="v")
    third = other.open(range(600), producer=2)
    PrefixCache(storage, other.fingerprint).publish(third)
    save_session(storage, "t", third, other.fingerprint)
    whole = {name: storage.read(name, limit=LIMIT) for name in storage.list()}
    kinds = itertools.groupby(sorted(whole), key=lambda name: name.partition("/")[0])
    pairs = [pair for _, names in kinds for pair in itertools.combinations(names, 2)]
    for one, two in pairs:
        storage.replace(one, whole[two])
        storage.replace(two, whole[one])
        for name, made, producer in (("s", MADE, 1), ("t", other, 2)):
            cache = PrefixCache(storage, made.fingerprint)
            for load in (
                lambda made=made, name=name: load_session(storage, name, made.store)[1],
                lambda made=made, cache=cache: cache.load([*IDS, 0], made.store, remember=True)[1],
            ):
                found = None
                with suppress(PackError):
                    found = load()
                if found is None:
                    continue
                makers = {maker for rows in producers_of(found.session).values() for maker in rows}

                assert {producer} == makers
                assert list(IDS[: found.session.position]) == found.session.tokens
                found.session.close()
        storage.replace(one, whole[one])
        storage.replace(two, whole[two])
    assert len(pairs) > 30
