"""Files of dead writers are told from those of live ones: by their lock, and by their age."""

import fcntl
import os
import time

import pytest

from kvplane.errors import StorageError
from kvplane.storage import LocalStorage
from kvplane.storage.system import System
from kvplane.testing.faults import attempt, each_fault

DAY_S = 86_400


def left_behind(root, name, *, age_s=2 * DAY_S):
    folder = root / ".tmp"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(b"half of a blob")
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def test_what_a_dead_writer_left_is_swept_once_it_is_old(tmp_path):
    old, young = left_behind(tmp_path, "old"), left_behind(tmp_path, "young", age_s=DAY_S / 2)
    storage = LocalStorage(tmp_path)

    assert 1 == storage.sweep_temporaries(older_than_s=DAY_S)
    assert (False, True) == (old.exists(), young.exists())
    assert 0 == storage.sweep_temporaries(older_than_s=DAY_S)


def test_what_a_living_writer_holds_is_kept_however_old_it_is(tmp_path):
    path = left_behind(tmp_path, "held")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        assert 0 == LocalStorage(tmp_path).sweep_temporaries(older_than_s=DAY_S)
    assert path.exists()
    assert 1 == LocalStorage(tmp_path).sweep_temporaries(older_than_s=DAY_S)


@pytest.mark.parametrize("verb", ["put", "replace"])
def test_a_writer_holds_its_file_while_it_writes(tmp_path, verb):
    swept = []

    class Looked(System):
        def write(self, file, data, first):
            swept.append(LocalStorage(tmp_path).sweep_temporaries(older_than_s=-1))
            return super().write(file, data, first)

    getattr(LocalStorage(tmp_path, system=Looked()), verb)("a", b"content")

    assert [0] == swept
    assert b"content" == (tmp_path / "a").read_bytes()


def test_only_plain_files_are_swept_and_no_link_is_followed(tmp_path):
    kept = tmp_path / "kept"
    kept.write_bytes(b"")
    folder = tmp_path / ".tmp"
    (folder / "inner").mkdir(parents=True)
    (folder / "link").symlink_to(kept)

    assert 0 == LocalStorage(tmp_path).sweep_temporaries(older_than_s=-1)
    assert kept.exists()


def test_a_root_without_temporaries_has_nothing_to_sweep(tmp_path):
    assert 0 == LocalStorage(tmp_path).sweep_temporaries(older_than_s=DAY_S)


def test_where_files_cannot_be_locked_writing_goes_on_and_sweeping_says_so(tmp_path):
    class Unlocked(System):
        def lock(self, file):
            raise OSError(95, f"not supported of {file}")

    storage = LocalStorage(tmp_path, system=Unlocked())
    storage.put("a", b"content")
    path = left_behind(tmp_path, "old")

    assert b"content" == storage.read("a", limit=99)
    with pytest.raises(StorageError, match="not supported"):
        storage.sweep_temporaries(older_than_s=DAY_S)
    assert path.exists()


def test_a_sweep_that_is_killed_or_fails_anywhere_takes_nothing_but_what_is_old(tmp_path):
    young = left_behind(tmp_path, "young", age_s=0)

    def run(system):
        left_behind(tmp_path, "old")
        return LocalStorage(tmp_path, system=system).sweep_temporaries(older_than_s=DAY_S)

    for fault in each_fault(run):
        outcome = attempt(run, fault)

        assert young.exists()
        assert outcome.error is not None or outcome.value in {0, 1}
