import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from kvplane.storage import LocalStorage, MemoryStorage
from kvplane.storage.memory import _Stored
from kvplane.testing.storage_contract import StorageContract


class TestMemory(StorageContract):
    @contextmanager
    def empty(self):
        yield MemoryStorage()

    def again(self, storage):
        return storage

    def read_behind(self, storage, name):
        return storage._stored[name].data

    def write_behind(self, storage, name, data):
        storage._stored[name] = _Stored(data, 0.0)


class TestLocal(StorageContract):
    @contextmanager
    def empty(self):
        folder = tempfile.mkdtemp()
        try:
            yield LocalStorage(folder)
        finally:
            shutil.rmtree(folder)

    def again(self, storage):
        return LocalStorage(storage.location)

    def read_behind(self, storage, name):
        return (Path(storage.location) / name).read_bytes()

    def write_behind(self, storage, name, data):
        path = Path(storage.location) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
