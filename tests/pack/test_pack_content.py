"""What is damaged under its name is mended by whoever has the right bytes: a save always counts."""

import pytest
from made_by_hand import Made, bits_of

from kvplane.pack import PrefixCache, load_session, open_root, read_session, save_session
from kvplane.pack.blob import blob_name
from kvplane.pack.content import PIECE_NBYTES, put_content
from kvplane.storage import MemoryStorage

LIMIT = 1 << 26
DAMAGES = {
    "emptied": lambda data: data[:0],
    "cut short": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}
damage = pytest.mark.parametrize("harm", DAMAGES.values(), ids=DAMAGES)


def spoil(storage, name, harm):
    storage.replace(name, harm(storage.read(name, limit=LIMIT)))


@damage
@pytest.mark.parametrize("folder", ["blobs", "cuts", "nodes"])
def test_a_file_that_is_damaged_is_mended_by_the_next_who_publishes_its_content(folder, harm):
    made = Made(8, None)
    storage = MemoryStorage()
    PrefixCache(storage, made.fingerprint).publish(made.open(range(600)))
    whole = {name: storage.read(name, limit=LIMIT) for name in storage.list(folder)}
    for name in whole:
        spoil(storage, name, harm)
    cache = PrefixCache(storage, made.fingerprint)
    # who finds a cut damaged reads the prompt again, and publishes it
    cache.load(range(601), made.store)
    if folder == "nodes":
        for name in storage.list("cuts"):
            storage.delete(name)
        storage.delete(max(whole, key=lambda name: whole[name]))
    cache.publish(made.open(range(600)))
    match, loaded = cache.load(range(601), made.store)

    assert (600, 600) == (match.position, loaded.session.position)
    if folder != "nodes":
        assert whole == {name: storage.read(name, limit=LIMIT) for name in storage.list(folder)}


@damage
def test_a_blob_that_is_damaged_does_not_stop_a_save_of_equal_rows(harm):
    made = Made(8, None)
    storage = open_root(MemoryStorage(), create=True)
    save_session(storage, "a", made.open(range(300)), made.fingerprint)
    for blob in read_session(storage, "a").state.blobs:
        spoil(storage, blob_name(blob), harm)
    session = made.open(range(300))
    written = save_session(storage, "b", session, made.fingerprint)

    assert written.blobs_named == written.blobs_written
    for name in ("a", "b"):
        loaded = load_session(storage, name, made.store, made.fingerprint)[1].session
        assert bits_of(session) == bits_of(loaded)


def test_a_blob_that_a_session_wrote_and_that_is_too_short_for_its_rows_is_written_again():
    made = Made(8, None)
    storage = open_root(MemoryStorage(), create=True)
    session = made.open(range(300))
    save_session(storage, "a", session, made.fingerprint)
    for blob in read_session(storage, "a").state.blobs:
        storage.replace(blob_name(blob), b"")
    written = save_session(storage, "a", session, made.fingerprint)

    assert written.blobs_named == written.blobs_written
    loaded = load_session(storage, "a", made.store, made.fingerprint)[1].session
    assert bits_of(session) == bits_of(loaded)


@pytest.mark.parametrize("at", [0, PIECE_NBYTES - 1, PIECE_NBYTES, 2 * PIECE_NBYTES + 4])
def test_every_piece_is_compared(at):
    data = bytes(2 * PIECE_NBYTES + 5)
    other = bytearray(data)
    other[at] = 1
    storage = MemoryStorage()
    storage.put("a", other)

    assert put_content(storage, "a", data)
    assert data == storage.read("a", limit=LIMIT)


def test_bytes_that_are_there_and_whole_are_left_alone():
    storage = MemoryStorage(clock=iter(range(9)).__next__)
    stored = [put_content(storage, "a", b"content") for _ in range(3)]

    assert [True, False, False] == stored
    assert 0 == storage.modified("a")


def test_a_file_swept_away_while_it_is_compared_is_put_again():
    class Sweeping(MemoryStorage):
        def put(self, name, data, *, durable=True):
            stored = super().put(name, data, durable=durable)
            self.delete(name)
            return stored

    storage = Sweeping()
    storage.replace("a", b"content")

    assert put_content(storage, "a", b"content")
    assert b"content" == storage.read("a", limit=LIMIT)


def test_a_longer_file_that_begins_with_the_bytes_is_not_they():
    class Trusting(MemoryStorage):
        def put(self, name, data, *, durable=True):
            return not self.exists(name) and super().put(name, data, durable=durable)

    storage = Trusting()
    storage.put("a", b"content and more")

    assert put_content(storage, "a", b"content")
    assert b"content" == storage.read("a", limit=LIMIT)
