"""A server that errs, stalls, lies or loses: never a hang, never other bytes, usable afterwards."""

import sys
import time

import pytest
from faulty_proxy import Kind, between

from kvplane.errors import ExtraMissing, PackCorrupt, PackError, StorageError, StorageMissing
from kvplane.storage import open_storage
from kvplane.storage.object_client import Patience

DATA = bytes(range(256)) * 700
NEW = bytes(reversed(range(256))) * 700
BRIEF = Patience(timeout_s=0.4, deadline_s=0.8, connect_s=0.4, retries=2, pause_s=0.01)
# a request, its repetitions and what follows a failure, with room for a busy machine
BOUND_S = 20


@pytest.fixture(scope="module")
def proxy(s3):
    with between(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def storage(s3, proxy):
    storage = s3.storage(endpoint=proxy.endpoint, patience=BRIEF)
    storage.put("there", DATA)
    return storage


def part(storage):
    memory = bytearray(1000)
    with storage.reading("there") as file:
        file.read_into(memory, first=5000)
    return bytes(memory)


READS = {
    "read": (lambda storage: storage.read("there", limit=len(DATA)), DATA),
    "reading": (part, DATA[5000:6000]),
    "size": (lambda storage: storage.size("there"), len(DATA)),
    "exists": (lambda storage: storage.exists("there"), True),
    "list": (lambda storage: storage.list(), ("there",)),
}
WRITES = {
    "put": lambda storage: storage.put("new", NEW),
    "replace": lambda storage: storage.replace("there", NEW),
    "delete": lambda storage: storage.delete("there"),
    "touch": lambda storage: storage.touch("there"),
    "lock": lambda storage: storage.lock("chat").release(),
}
# bits that change on the way are seen by whoever knows a digest, sizes that lie by comparing
SEEN_ABOVE = {Kind.FLIP, Kind.SHORTER}
READ_FAULTS = [
    (verb, kind)
    for verb in READS
    for kind in Kind
    if kind not in SEEN_ABOVE and (verb, kind) != ("size", Kind.LONGER)
]
STALLS = {Kind.STALL, Kind.STALL_BODY, Kind.TRICKLE}


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize(("verb", "kind"), READ_FAULTS)
def test_reading_gives_the_bytes_or_an_error_and_does_not_hang(storage, proxy, verb, kind, lasting):
    call, expected = READS[verb]
    began = time.monotonic()
    with proxy.failing(kind, lasting=lasting):
        try:
            found = call(storage)
        except StorageMissing:
            pytest.fail("what is there is not missing")
        except PackError:
            found = expected

    assert expected == found
    assert time.monotonic() - began < BOUND_S
    assert expected == call(storage)


@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.BUSY, Kind.STALL, Kind.HANG_UP, Kind.CUT])
def test_what_goes_wrong_once_is_asked_again(storage, proxy, kind):
    with proxy.failing(kind, methods={"GET"}) as hits:
        found = storage.read("there", limit=len(DATA))

    assert DATA == found
    assert hits


@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.DENIED, Kind.STALL])
@pytest.mark.parametrize("verb", ["read", *WRITES])
def test_what_goes_wrong_for_good_is_an_error_that_names_the_object(storage, proxy, verb, kind):
    call = READS[verb][0] if verb in READS else WRITES[verb]
    began = time.monotonic()
    with (
        proxy.failing(kind, lasting=True),
        pytest.raises(PackError, match="s3://packs-") as refused,
    ):
        call(storage)

    assert not isinstance(refused.value, StorageMissing)
    assert time.monotonic() - began < BOUND_S


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in STALLS])
@pytest.mark.parametrize("verb", ["put", "replace"])
def test_what_is_said_to_be_stored_is_stored_and_else_the_old_is_there(
    storage, proxy, verb, kind, number
):
    name = "new" if verb == "put" else "there"
    before = DATA if verb == "replace" else None
    with proxy.failing(kind, number=number):
        try:
            WRITES[verb](storage)
            allowed = {NEW}
        except PackError:
            allowed = {before, NEW}
    found = storage.read(name, limit=len(NEW)) if storage.exists(name) else None

    assert found in allowed
    WRITES[verb](storage)
    assert NEW == storage.read(name, limit=len(NEW))


@pytest.mark.parametrize("verb", ["put", "replace"])
def test_a_server_that_always_loses_what_it_confirms_is_found_out(storage, proxy, verb):
    with (
        proxy.failing(Kind.LOSE, lasting=True),
        pytest.raises(StorageError, match="lost what it said it had stored"),
    ):
        WRITES[verb](storage)

    assert DATA == storage.read("there", limit=len(DATA))


def test_an_answer_that_was_lost_does_not_make_a_put_another_writers(storage, proxy):
    with proxy.failing(Kind.HANG_UP, methods={"PUT"}):
        storage.put("new", NEW)

    assert NEW == storage.read("new", limit=len(NEW))


def test_a_length_that_is_less_than_was_put_is_found_out(storage, proxy):
    with proxy.failing(Kind.SHORTER, methods={"HEAD"}), pytest.raises(PackCorrupt, match="holds"):
        storage.put("new", NEW)


def test_a_part_that_is_said_to_end_early_is_an_error(storage, proxy):
    with (
        proxy.failing(Kind.SHORTER, lasting=True),
        storage.reading("there") as file,
        pytest.raises(PackCorrupt, match="ends at"),
    ):
        file.read_into(bytearray(len(DATA)))


def test_a_size_that_lies_takes_no_memory(storage, proxy):
    with proxy.failing(Kind.LONGER, lasting=True), pytest.raises(PackError):
        storage.read("there", limit=len(DATA))


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_is_not_there_is_no_empty_root():
    with pytest.raises(StorageError, match="no-such-bucket") as refused:
        open_storage("s3://no-such-bucket/root")

    assert not isinstance(refused.value, StorageMissing)


@pytest.mark.parametrize("url", ["s3://", "s3:///", "s3://no_such/../x y"])
@pytest.mark.usefixtures("s3")
def test_an_address_of_no_bucket_is_refused(url):
    with pytest.raises(StorageError):
        open_storage(url)


def test_without_its_extra_an_address_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ExtraMissing, match=r"kvplane\[s3\]"):
        open_storage("s3://bucket/root")


def test_long_objects_come_in_parts_at_once_of_one_version(s3, monkeypatch):
    monkeypatch.setattr("kvplane.storage.object.WHOLE_NBYTES", 1000)
    monkeypatch.setattr("kvplane.storage.object.PART_NBYTES", 30_000)
    storage = s3.storage()
    storage.put("there", DATA)
    found = bytearray(len(DATA) - 7)
    with storage.reading("there") as file:
        file.read_into(found, first=7)
        storage.replace("there", NEW)
        with pytest.raises(StorageError, match="replaced while it was read"):
            file.read_into(bytearray(10))

    assert DATA[7:] == found


def test_a_server_that_is_not_there_is_an_error_soon(s3):
    began = time.monotonic()
    with pytest.raises(StorageError):
        s3.storage(endpoint="http://127.0.0.1:9", patience=BRIEF)

    assert time.monotonic() - began < BOUND_S
