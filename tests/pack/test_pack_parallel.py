"""Many names at a time, where a storage is worth it."""

import threading
import time

import pytest

from kvplane.errors import PackCorrupt
from kvplane.pack import load_session, open_root, save_session
from kvplane.pack.parallel import mapped
from kvplane.storage import MemoryStorage
from saved_roots import FINGERPRINT, grow, new_store


class Server(MemoryStorage):
    """Counts how many ask at a time; answers once `parallel` do, or after half a second."""

    parallel = 6

    def __init__(self):
        super().__init__()
        self.begin()
        self.count = threading.Lock()

    def begin(self):
        self.now = self.most = 0
        self.full = threading.Event()

    def wait(self):
        with self.count:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now == self.parallel:
                self.full.set()
        self.full.wait(0.5)
        time.sleep(0.005)
        with self.count:
            self.now -= 1

    def put(self, name, data, *, durable=True):
        self.wait()
        return super().put(name, data, durable=durable)

    def reading(self, name):
        self.wait()
        return super().reading(name)

    def exists(self, name):
        self.wait()
        return super().exists(name)


def test_a_server_is_asked_many_things_at_a_time_and_no_more():
    storage = open_root(Server(), create=True)
    session = grow(new_store().open(tokens=[]), list(range(1500)))
    seen = []
    for work in (
        lambda: save_session(storage, "a", session, FINGERPRINT),
        lambda: load_session(storage, "a", new_store(), FINGERPRINT),
    ):
        storage.begin()
        work()
        seen.append(storage.most)

    assert [6, 6] == seen


def test_a_folder_is_asked_by_as_many_threads_as_the_caller_says():
    threads = set()
    mapped(MemoryStorage(), lambda _: threads.add(threading.get_ident()), range(20))

    assert {threading.get_ident()} == threads


@pytest.mark.parametrize("parallel", [1, 4])
def test_results_come_in_order_and_an_error_ends_it(parallel):
    storage = MemoryStorage()
    storage.parallel = parallel
    asked = []

    def call(number):
        asked.append(number)
        if number == 5:
            raise PackCorrupt(path="a", what="five")
        time.sleep(0.002)
        return number * 2

    assert [0, 2, 4] == mapped(storage, call, range(3))
    with pytest.raises(PackCorrupt):
        mapped(storage, call, range(1000))
    assert len(asked) < 50
