"""Sessions in an object store, by way of a server that fails at one request of a save or load."""

import os
from itertools import count

import pytest
from faulty_proxy import Kind, between

from kvplane.errors import PackCorrupt, PackError
from kvplane.pack import PrefixCache, load_session, open_root, save_session
from kvplane.storage.object import ObjectStorage
from kvplane.storage.object_client import Patience
from test_pack_damage import FINGERPRINT, STORE, rows_of, same
from test_pack_prefix import extend

IDS = tuple(range(12))
BRIEF = Patience(timeout_s=5, deadline_s=5, connect_s=2, retries=1, pause_s=0.01)
NUMBERS = count()
# every request of a save, one after another; `make torture` takes each, a quick run one of five
STEP = 1 if os.environ.get("KVPLANE_TORTURE") else 5


@pytest.fixture(scope="module")
def proxy(s3):
    with between(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def bucket(s3):
    return s3.bucket()


def fresh(bucket):
    """A root with a session of six tokens."""
    storage = open_root(
        ObjectStorage(f"s3://{bucket}/root-{next(NUMBERS)}", patience=BRIEF), create=True
    )
    session = STORE.open([])
    extend(session, IDS[:6], 1)
    save_session(storage, "s", session, FINGERPRINT)
    rows = rows_of(session)
    session.close()
    return storage, rows


def through(proxy, storage):
    """The same root by way of the proxy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        return ObjectStorage(storage.location, patience=BRIEF)


def go_on(storage, faulty):
    """Resume, add six tokens; then take a cut and save over the old session by way of faults."""
    session = load_session(storage, "s", STORE, FINGERPRINT)[1].session
    try:
        extend(session, IDS[6:], 1)
        opened = open_root(faulty)
        PrefixCache(opened, FINGERPRINT).publish(session, IDS)
        save_session(opened, "s", session, FINGERPRINT)
        return rows_of(session)
    finally:
        session.close()


def what_is_there(storage):
    session = load_session(storage, "s", STORE, FINGERPRINT)[1].session
    rows = rows_of(session)
    session.close()
    _, loaded = PrefixCache(storage, FINGERPRINT).load([*IDS, 1], STORE, remember=True)
    if loaded is None:
        return rows, None
    cut = rows_of(loaded.session)
    loaded.session.close()
    return rows, cut


@pytest.mark.parametrize(
    ("kind", "lasting"),
    [(Kind.DENIED, True), (Kind.LOSE, False), (Kind.HANG_UP, False), (Kind.CUT, True)],
    ids=lambda one: one.name if isinstance(one, Kind) else "",
)
def test_with_any_request_failing_a_reader_finds_the_old_session_or_the_new(
    proxy, bucket, kind, lasting
):
    storage, old = fresh(bucket)
    faulty = through(proxy, storage)
    with proxy.failing(Kind.FLIP, number=1 << 30):
        new = go_on(storage, faulty)
        num_requests = len(proxy.requests)
    _, new_cut = what_is_there(storage)
    assert num_requests > 10
    for number in range(1, num_requests + 1, STEP):
        storage, _ = fresh(bucket)
        faulty = through(proxy, storage)
        error = None
        with proxy.failing(kind, number=number, lasting=lasting):
            try:
                go_on(storage, faulty)
            except PackError as refused:
                error = refused
        rows, cut = what_is_there(storage)
        is_new = len(rows[1]) == len(new[1])

        assert same(rows, new if is_new else old)
        assert cut is None or same(cut, new_cut)
        assert is_new or error is not None
        assert [] == STORE.sessions
        # what was left behind is in nobody's way
        assert same(rows if is_new else go_on(storage, storage), new)


@pytest.mark.parametrize(
    "kind",
    [Kind.FLIP, Kind.SHORTER, Kind.LONGER, Kind.CUT, Kind.DENIED],
    ids=lambda kind: kind.name,
)
def test_with_any_answer_damaged_a_load_is_right_or_refused(proxy, bucket, kind):
    storage, rows = fresh(bucket)
    faulty = through(proxy, storage)

    def load():
        session = load_session(open_root(faulty), "s", STORE, FINGERPRINT)[1].session
        found = rows_of(session)
        session.close()
        return found

    with proxy.failing(Kind.FLIP, number=1 << 30):
        load()
        num_requests = len(proxy.requests)
    for number in range(1, num_requests + 1):
        found = rows
        with proxy.failing(kind, number=number):
            try:
                found = load()
            except PackError:
                assert [] == STORE.sessions

        assert same(rows, found)


def test_a_byte_changed_in_the_bucket_is_found(bucket):
    storage, _ = fresh(bucket)
    for name in storage.list():
        if name.startswith(("blobs/", "sessions/")):
            data = bytearray(storage.read(name, limit=1 << 20))
            data[len(data) // 2] ^= 1
            storage.replace(name, bytes(data))

            with pytest.raises(PackCorrupt):
                load_session(storage, "s", STORE, FINGERPRINT)

            data[len(data) // 2] ^= 1
            storage.replace(name, bytes(data))
    load_session(storage, "s", STORE, FINGERPRINT)[1].session.close()
