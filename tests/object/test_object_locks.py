"""Locks in an object store: renewed, given back, taken over from the dead."""

import json
import threading
import time

import pytest
import s3_server
from faulty_proxy import Kind, between

from kvplane.errors import SessionLocked
from kvplane.storage import object_lock
from kvplane.storage.object import ObjectStorage


@pytest.fixture
def fast(monkeypatch):
    """Renewed often, and stale after what whole seconds can tell."""
    monkeypatch.setattr(object_lock, "RENEW_S", 0.05)
    monkeypatch.setattr(object_lock, "STALE_S", 1.0)


def said(storage):
    return json.loads(storage.read("locks/chat.json", limit=1000))


def abandon(lock):
    """As a process that died: nothing is given back or renewed any more."""
    lock._end.set()
    lock._thread.join()


@pytest.mark.usefixtures("fast")
def test_a_lock_is_renewed_while_it_is_held_and_never_taken_over(s3):
    storage = s3.storage()
    with storage.lock("chat") as lock:
        began = time.monotonic()
        while time.monotonic() - began < 2.5:
            with pytest.raises(SessionLocked):
                storage.lock("chat")
            time.sleep(0.3)

        assert said(storage)["renewed"] > 5
        assert not lock.lost
    assert said(storage)["renewed"] == -1


@pytest.mark.usefixtures("fast")
def test_a_lock_of_a_dead_holder_is_taken_over_by_one(s3):
    storage = s3.storage()
    abandon(storage.lock("chat"))
    time.sleep(2.1)
    taken, refused = [], []

    def take():
        try:
            taken.append(ObjectStorage(storage.location, patience=s3_server.QUICK).lock("chat"))
        except SessionLocked as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (1, 5) == (len(taken), len(refused))
    taken[0].release()


@pytest.mark.usefixtures("fast")
def test_a_holder_that_was_taken_over_knows_and_does_not_give_back_what_is_anothers(s3):
    storage = s3.storage()
    lock = storage.lock("chat")
    # somebody else's, however it came about
    storage.replace("locks/chat.json", b'{"host":"other","pid":1,"renewed":3,"since":"now"}')
    time.sleep(0.5)

    assert lock.lost
    lock.release()
    assert "other" == said(storage)["host"]
    with pytest.raises(SessionLocked, match="process 1 on other"):
        storage.lock("chat")


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("kind", [Kind.HANG_UP, Kind.ERROR], ids=lambda kind: kind.name)
def test_a_lock_outlives_a_renewal_that_failed(s3, kind):
    with between(s3.endpoint) as proxy:
        storage = s3.storage(endpoint=proxy.endpoint)
        with storage.lock("chat") as lock:
            with proxy.failing(kind, lasting=True, methods={"PUT"}):
                time.sleep(0.4)
            time.sleep(0.4)

            assert not lock.lost


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_lock_is_had_where_the_answer_was_lost(s3, number):
    with between(s3.endpoint) as proxy:
        storage = s3.storage(endpoint=proxy.endpoint)
        for _ in range(2):
            with proxy.failing(Kind.HANG_UP, number=number, methods={"PUT"}):
                storage.lock("chat").release()

        with storage.lock("chat"), pytest.raises(SessionLocked):
            storage.lock("chat")


def test_a_lock_that_is_no_lock_is_somebodys(s3):
    storage = s3.storage()
    storage.put("locks/chat.json", b"\xff not json")

    with pytest.raises(SessionLocked, match="unknown"):
        storage.lock("chat")
