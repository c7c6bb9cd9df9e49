import errno
import shutil
from pathlib import Path

import pytest

from kvplane.errors import StorageError
from kvplane.storage import LocalStorage
from kvplane.storage.system import System
from kvplane.testing.faults import FaultySystem


def tree(root):
    """Every file below a folder, with its bytes; temporaries too."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(Path(root).rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def test_bytes_are_synced_before_they_have_a_name_and_the_name_before_it_is_reported(tmp_path):
    system = FaultySystem()
    storage = LocalStorage(tmp_path, system=system)
    storage.put("blobs/ab/a", b"x")
    steps = [call for call in system.calls if call in {"make_folder", "write", "sync", "link"}]

    # each new folder, and .tmp, is made durable in the folder above before the bytes are written
    assert ["make_folder", "sync"] * 3 + ["write", "sync", "link", "sync"] == steps
    system.calls.clear()
    storage.replace("blobs/ab/b", b"x")
    steps = [call for call in system.calls if call in {"make_folder", "write", "sync", "rename"}]
    assert ["write", "sync", "rename", "sync"] == steps


def test_what_need_not_outlive_a_loss_of_power_waits_for_no_disk(tmp_path):
    system = FaultySystem()
    storage = LocalStorage(tmp_path, system=system)

    assert storage.put("nodes/ab/a", b"x", durable=False)
    assert not storage.put("nodes/ab/a", b"x", durable=False)
    assert b"x" == storage.read("nodes/ab/a", limit=1)
    assert 0 == system.calls.count("sync")
    system.calls.clear()
    storage.put("nodes/ab/b", b"x")
    # root, nodes and .tmp for the folders made before, the bytes, the folder of the name
    steps = [call for call in system.calls if call in {"make_folder", "write", "sync", "link"}]
    assert ["sync"] * 3 + ["write", "sync", "link", "sync"] == steps


def test_what_was_there_already_is_made_as_durable_as_if_it_were_new(tmp_path):
    LocalStorage(tmp_path).put("blobs/ab/a", b"x")
    system = FaultySystem()
    storage = LocalStorage(tmp_path, system=system)
    system.calls.clear()
    storage.put("blobs/ab/a", b"x")

    # whoever made the two folders and the name may have died before it synced them
    assert 3 == system.calls.count("sync")
    assert 0 == system.calls.count("write")


def test_a_folder_that_somebody_took_away_is_made_and_made_durable_again(tmp_path):
    system = FaultySystem()
    storage = LocalStorage(tmp_path, system=system)
    storage.put("blobs/a", b"x")
    shutil.rmtree(tmp_path / "blobs")
    system.calls.clear()
    storage.put("blobs/a", b"x")

    assert 1 == system.calls.count("make_folder")
    # the root for its new folder, the bytes, the folder for its new name
    assert 3 == system.calls.count("sync")


def test_a_new_root_is_made_durable_and_one_that_was_there_too(tmp_path):
    steps = []
    for _ in range(2):
        system = FaultySystem()
        LocalStorage(tmp_path / "a" / "b", create=True, system=system)
        steps.append([call for call in system.calls if call in {"make_folder", "sync"}])

    assert [["make_folder", "sync"] * 2, ["sync"]] == steps


def test_a_root_whose_folder_above_is_closed_to_us_may_be_used(tmp_path):
    class Closed(System):
        def open_root(self, path):
            if path == str(tmp_path):
                raise PermissionError(errno.EACCES, "Permission denied")
            return super().open_root(path)

    (tmp_path / "root").mkdir()

    assert LocalStorage(tmp_path / "root", create=True, system=Closed()).is_empty()


def test_two_who_make_one_folder_both_have_it(tmp_path):
    class Slower(System):
        def make_folder(self, folder, part, mode):
            super().make_folder(folder, part, mode)
            super().make_folder(folder, part, mode)

    storage = LocalStorage(tmp_path / "root", create=True, system=Slower())

    assert storage.put("blobs/a", b"x")


def test_a_folder_that_goes_away_while_names_are_listed_held_nothing(tmp_path):
    class Sweeping(System):
        def entries(self, folder):
            found = super().entries(folder)
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
            return found

    storage = LocalStorage(tmp_path, system=Sweeping())
    storage.put("gone/a", b"x")
    storage.put("here/a", b"x")

    assert ("here/a",) == storage.list()


def test_a_deletion_is_durable_also_when_it_is_repeated(tmp_path):
    system = FaultySystem()
    storage = LocalStorage(tmp_path, system=system)
    storage.put("a", b"x")
    for _ in range(2):
        system.calls.clear()
        storage.delete("a")

        assert ["unlink", "sync", "close"] == system.calls[-3:]


def test_a_name_that_a_sweeper_took_away_between_two_looks_is_stored_after_all(tmp_path):
    class SweptAtLink(System):
        def link(self, source, part, target, name):
            if not (tmp_path / "swept").exists():
                (tmp_path / "swept").touch()
                raise FileExistsError(errno.EEXIST, "File exists")
            super().link(source, part, target, name)

    storage = LocalStorage(tmp_path, system=SweptAtLink())

    assert storage.put("a", b"x")
    assert {"a": b"x", "swept": b""} == tree(tmp_path)


def test_a_system_that_takes_no_bytes_is_an_error_and_no_endless_loop(tmp_path):
    class Full(System):
        def write(self, *_):
            return 0

    with pytest.raises(StorageError, match="took no bytes"):
        LocalStorage(tmp_path, system=Full()).put("a", b"x")
    assert {} == tree(tmp_path)
