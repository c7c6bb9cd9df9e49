import shutil

import pytest

from kvplane.pack import (
    PrefixCache,
    open_root,
)
from kvplane.pack.inventory import Kind
from kvplane.pack.usage import usage
from kvplane.storage import LocalStorage, MemoryStorage, open_storage
from saved_roots import (
    FINGERPRINT,
    make_root,
)

FULL, SLIDING = "f0.2x4x4.f16", "s32.2x4x4.f16"
TOKENS = list(range(300))


@pytest.fixture(scope="module")
def sound_root(tmp_path_factory):
    """A root that nobody changes: sessions of 300, 300 and 10 tokens, cuts at 128, 200 and 256."""
    root = tmp_path_factory.mktemp("sound") / "root"
    make_root(root, lengths=(300, 300, 10), cuts=(128, 200, 256))
    return root


@pytest.fixture
def root(sound_root, tmp_path):
    """A copy to damage."""
    return shutil.copytree(sound_root, tmp_path / "root")


def test_usage_counts_every_file_once_and_what_only_one_needs(root):
    storage = open_root(root)
    found = usage(storage)
    files = [path for path in root.rglob("*") if path.is_file()]

    assert sum(path.stat().st_size for path in files) == found.nbytes
    assert len(files) == sum(amount.num_files for amount in found.kinds.values())
    for share in found.shares:
        copy = MemoryStorage()
        for file in storage.list():
            copy.put(file, storage.read(file, limit=1 << 20))
        copy.delete(f"sessions/{share.name}.json" if share.kind is Kind.SESSION else share.name)

        # what it alone needed is what nothing names once it is gone
        assert share.own_nbytes == usage(copy).unnamed.nbytes
        assert share.own_nbytes <= share.nbytes
    assert (0, 0) == found.unnamed


def test_a_file_that_goes_away_while_usage_looks_is_not_counted(root):
    class Sweeping(LocalStorage):
        def list(self, prefix=""):
            return (*super().list(prefix), "blobs/00/gone")

    assert usage(open_storage(root)) == usage(Sweeping(root))


def test_usage_of_an_empty_root_is_that_of_its_root_file(tmp_path):
    found = usage(PrefixCache(tmp_path / "new", FINGERPRINT).storage)

    assert (tmp_path / "new" / "root.json").stat().st_size == found.nbytes
    assert () == found.shares
