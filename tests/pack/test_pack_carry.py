"""Sessions and cuts carried to another root: only what is new, verified, never half there."""

import pytest

from kvplane.errors import ArgumentError, PackCorrupt, PackMissing, SessionNotFound, StorageError
from kvplane.pack import PrefixCache, load_session, open_root, save_session
from kvplane.pack.carry import carry
from kvplane.pack.inventory import Kind, documents, kind_of
from kvplane.storage import MemoryStorage
from saved_roots import FINGERPRINT, cut_at, grow, make_root, new_store

NO_CUT = f"cuts/{'0' * 64}/{'0' * 64}/5.-.{'0' * 16}.json"


@pytest.fixture
def source():
    return make_root(MemoryStorage(), lengths=(600, 300), cuts=(256,))


@pytest.fixture
def target():
    return open_root(MemoryStorage(), create=True)


def position(storage, name):
    saved, loaded = load_session(storage, name, new_store(), FINGERPRINT)
    loaded.session.close()
    return saved.state.position


def test_sessions_arrive_whole_and_byte_for_byte(source, target):
    carried = carry(source, target)

    assert ("a", "b") == carried.sessions
    assert [600, 300] == [position(target, name) for name in "ab"]
    for file in target.list("sessions"):
        assert source.read(file, limit=1 << 20) == target.read(file, limit=1 << 20)


def test_what_is_there_is_not_sent_again(source, target):
    sent = []
    first = carry(source, target, names=["b"], progress=sent.append)
    second = carry(source, target, names=["a"])
    third = carry(source, target)

    assert first.nbytes_sent == sum(sent)
    assert first.blobs_sent
    assert second.blobs_there
    assert (0, 0) == (third.blobs_sent, third.nbytes_sent)


def test_a_cut_arrives_under_its_name_and_is_matched(source, target):
    cut = cut_at(source, 256).file
    carried = carry(source, target, names=[cut])
    found = PrefixCache(target, FINGERPRINT).match(list(range(300)), new_store())

    assert ((), (cut,)) == (carried.sessions, carried.cuts)
    assert 256 == found.position


def test_all_cuts_go_along_when_asked_for(source, target):
    assert (cut_at(source, 256).file,) == carry(source, target, cuts=True).cuts
    assert 1 == sum(one.kind is Kind.CUT for one in documents(target))


@pytest.mark.parametrize("name", ["c", NO_CUT])
def test_what_is_not_there_is_refused_and_nothing_is_written(source, target, name):
    before = target.list()
    with pytest.raises(SessionNotFound):
        carry(source, target, names=["a", name])

    assert before == target.list()


def test_another_session_of_that_name_is_not_replaced_unasked(source, target):
    session = grow(new_store().open(tokens=[]), list(range(7)))
    save_session(target, "a", session, FINGERPRINT)
    with pytest.raises(ArgumentError, match="--replace"):
        carry(source, target)

    assert 7 == position(target, "a")
    assert ("sessions/a.json",) == target.list("sessions")
    carry(source, target, replace=True)
    assert 600 == position(target, "a")


@pytest.mark.parametrize(("damage", "error"), [("missing", PackMissing), ("flipped", PackCorrupt)])
def test_a_damaged_blob_is_refused_and_nothing_names_it(source, target, damage, error):
    blob = next(file for file in source.list("blobs") if kind_of(file) is Kind.BLOB)
    if damage == "missing":
        source.delete(blob)
    else:
        data = bytearray(source.read(blob, limit=1 << 20))
        data[-1] ^= 1
        source.replace(blob, data)
    with pytest.raises(error):
        carry(source, target)

    assert () == target.list("sessions")
    assert not target.exists(blob)


def test_a_damaged_session_is_refused(source, target):
    source.replace("sessions/a.json", b'{"format":1}')
    with pytest.raises(PackCorrupt):
        carry(source, target)


@pytest.mark.parametrize("number", range(0, 9, 2))
def test_interrupted_anywhere_it_leaves_nothing_that_names_what_is_missing(source, number):
    class Failing(MemoryStorage):
        """Refuses from the n-th write on."""

        left = 10_000

        def put(self, name, data, *, durable=True):
            self.left -= 1
            if self.left < 0:
                raise StorageError(path=name, what="full")
            return super().put(name, data, durable=durable)

    target = open_root(Failing(), create=True)
    target.left = number
    with pytest.raises(StorageError, match="full"):
        carry(source, target)
    target.left = 10_000

    assert all(position(target, one.name) for one in documents(target))
    rest = carry(source, target)
    assert [600, 300] == [position(target, name) for name in "ab"]
    assert number <= rest.blobs_there
