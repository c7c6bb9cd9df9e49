import os
import shutil
import stat
from pathlib import Path

import pytest

from kvplane.errors import PackTooLarge, StorageError
from kvplane.storage import LocalStorage, MemoryStorage, open_storage

SESSION = "sessions/chat.json"


def tree(root):
    """Every file below a folder, with its bytes; temporaries too."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(Path(root).rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def opened(storage, name):
    with storage.reading(name):
        pass


def test_a_root_that_is_not_there_is_an_error_and_is_not_made(tmp_path):
    with pytest.raises(StorageError, match=r"missing: there is no such folder"):
        open_storage(tmp_path / "missing")

    assert [] == list(tmp_path.iterdir())


def test_a_root_that_went_away_is_an_error_and_never_an_empty_one(tmp_path):
    storage = open_storage(tmp_path / "root", create=True)
    shutil.rmtree(tmp_path / "root")

    for call in (
        storage.list,
        storage.is_empty,
        lambda: storage.exists(SESSION),
        lambda: storage.read(SESSION, limit=9),
        lambda: storage.delete(SESSION),
        lambda: storage.put(SESSION, b"x"),
    ):
        with pytest.raises(StorageError, match="there is no such folder"):
            call()


def test_a_root_is_made_with_the_folders_above_it_when_asked(tmp_path):
    for _ in range(2):
        storage = open_storage(tmp_path / "a" / "b" / "c", create=True)

        assert storage.is_empty()
    assert str(tmp_path / "a" / "b" / "c") == storage.location


@pytest.mark.parametrize("create", [False, True])
def test_a_root_that_is_a_file_is_refused_and_kept(tmp_path, create):
    (tmp_path / "file").write_bytes(b"precious")

    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="ENOTDIR"):
            open_storage(root, create=create)
    assert {"file": b"precious"} == tree(tmp_path)


@pytest.mark.parametrize("root", ["", "a\0b"])
def test_a_root_that_is_no_path_is_refused(root):
    with pytest.raises(StorageError, match="not the path of a folder"):
        open_storage(root)


@pytest.mark.parametrize("root", ["ftp://host/prefix", "file://host/somewhere"])
def test_an_address_that_cannot_be_reached_is_no_folder_of_that_name(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(StorageError, match="no storage for addresses that begin with"):
        open_storage(root, create=True)
    assert [] == list(tmp_path.iterdir())


def test_a_storage_is_its_own_address():
    storage = MemoryStorage()

    assert storage is open_storage(storage)


def test_a_root_in_the_folder_the_process_left_is_still_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = open_storage("root", create=True)
    monkeypatch.chdir("/")
    storage.put("a", b"x")

    assert (tmp_path / "root" / "a").exists()


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to("disk")
    open_storage(tmp_path / "root").put("a", b"x")

    assert {"disk/a": b"x"} == tree(tmp_path)


@pytest.mark.parametrize("target", ["outside", "root/inside", "nowhere"])
def test_a_folder_that_is_a_link_is_refused_by_every_call(tmp_path, target):
    for folder in ("outside", "root", "root/inside"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "chat.json").write_bytes(b"secret")
    (tmp_path / "root" / "sessions").symlink_to(tmp_path / target)
    before = tree(tmp_path)
    storage = open_storage(tmp_path / "root")

    for call in (
        lambda: storage.read(SESSION, limit=100),
        lambda: opened(storage, SESSION),
        lambda: storage.size(SESSION),
        lambda: storage.exists(SESSION),
        lambda: storage.put(SESSION, b"other!"),
        lambda: storage.replace(SESSION, b"other!"),
        lambda: storage.delete(SESSION),
        lambda: storage.touch(SESSION),
        lambda: storage.list("sessions"),
    ):
        with pytest.raises(StorageError, match="symbolic link"):
            call()
    assert before == tree(tmp_path)
    # what it is shows in the listing; nothing behind it does
    assert "sessions" in storage.list()
    assert SESSION not in storage.list()


@pytest.mark.parametrize("target", ["outside", "root/other", "nowhere"])
def test_a_file_that_is_a_link_is_not_read_through(tmp_path, target):
    (tmp_path / "root" / "sessions").mkdir(parents=True)
    for name in ("outside", "root/other"):
        (tmp_path / name).write_bytes(b"secret")
    (tmp_path / "root" / SESSION).symlink_to(tmp_path / target)
    before = tree(tmp_path)
    storage = open_storage(tmp_path / "root")

    for call in (
        lambda: storage.read(SESSION, limit=100),
        lambda: opened(storage, SESSION),
        lambda: storage.size(SESSION),
        lambda: storage.exists(SESSION),
        lambda: storage.put(SESSION, b"secret"),
        lambda: storage.touch(SESSION),
    ):
        with pytest.raises(StorageError, match=r"symbolic link|not a plain file"):
            call()
    assert before == tree(tmp_path)
    assert SESSION in storage.list()


def test_replacing_a_link_replaces_the_link_and_not_what_it_points_to(tmp_path):
    (tmp_path / "root" / "sessions").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "root" / SESSION).symlink_to(tmp_path / "outside")
    open_storage(tmp_path / "root").replace(SESSION, b"new")

    assert {"outside": b"secret", "root/" + SESSION: b"new"} == tree(tmp_path)


def test_a_lock_that_is_a_link_is_refused_and_its_target_not_written(tmp_path):
    (tmp_path / "root" / "locks").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "root" / "locks" / "gc").symlink_to(tmp_path / "outside")

    with pytest.raises(StorageError, match="symbolic link"):
        open_storage(tmp_path / "root").lock("gc")
    assert b"secret" == (tmp_path / "outside").read_bytes()


def test_a_lock_that_is_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    (tmp_path / "locks").mkdir()
    os.mkfifo(tmp_path / "locks" / "gc")

    with pytest.raises(StorageError, match="not a plain file"):
        open_storage(tmp_path).lock("gc")


def test_nothing_of_an_earlier_holder_stays_in_a_locks_file(tmp_path):
    storage = open_storage(tmp_path)
    storage.lock("chat").release()
    said = (tmp_path / "locks" / "chat").read_bytes()
    (tmp_path / "locks" / "chat").write_bytes(said[:-1] + b'"' * 99)
    storage.lock("chat").release()

    assert len(said) == (tmp_path / "locks" / "chat").stat().st_size


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_plain_file_is_refused_without_waiting_for_it(tmp_path, make):
    make(tmp_path / "a")
    storage = open_storage(tmp_path)

    for call in (
        lambda: storage.read("a", limit=9),
        lambda: opened(storage, "a"),
        lambda: storage.size("a"),
        lambda: storage.put("a", b""),
        lambda: storage.touch("a"),
    ):
        with pytest.raises(StorageError, match="not a plain file"):
            call()


def test_a_folder_is_not_replaced_or_deleted(tmp_path):
    storage = open_storage(tmp_path)
    storage.put(SESSION, b"x")

    with pytest.raises(StorageError, match="EISDIR"):
        storage.replace("sessions", b"y")
    with pytest.raises(StorageError, match=r"EISDIR|EPERM"):
        storage.delete("sessions")
    assert {SESSION: b"x"} == tree(tmp_path)


def test_a_file_of_more_than_the_limit_takes_no_memory(tmp_path):
    storage = open_storage(tmp_path)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 41)

    with pytest.raises(PackTooLarge, match=str(1 << 41)):
        storage.read("huge", limit=64 << 20)


def test_what_is_in_the_root_without_a_name_of_ours_is_neither_listed_nor_touched(tmp_path):
    for name in (".hidden", "Photos/a.jpg", "été", ".tmp/old", "a b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"mine")
    before = tree(tmp_path)
    storage = open_storage(tmp_path)
    storage.put("a", b"x")

    assert ("a",) == storage.list()
    assert before | {"a": b"x"} == tree(tmp_path)


def test_a_folder_with_foreign_files_is_not_empty_and_one_with_temporaries_is(tmp_path):
    storage = open_storage(tmp_path)
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "old").write_bytes(b"left by a killed writer")

    assert storage.is_empty()
    (tmp_path / "My Thesis").write_bytes(b"")
    assert not storage.is_empty()


def test_folders_as_deep_as_a_name_can_be_are_listed_and_deeper_ones_not_entered(tmp_path):
    (tmp_path / "/".join(["d"] * 30)).mkdir(parents=True)
    (tmp_path / "/".join(["d"] * 15) / "f").write_bytes(b"")
    (tmp_path / "/".join(["d"] * 16) / "g").write_bytes(b"")

    assert ("/".join(["d"] * 15 + ["f"]),) == open_storage(tmp_path).list()


@pytest.mark.parametrize(
    ("file_mode", "umask", "file", "folder"),
    [
        (0o600, 0o022, 0o600, 0o700),
        (0o600, 0o277, 0o400, 0o500),
        (0o644, 0o022, 0o644, 0o755),
        (0o664, 0o007, 0o660, 0o770),
    ],
)
def test_files_are_for_their_owner_unless_asked_and_follow_the_umask(
    tmp_path, file_mode, umask, file, folder
):
    before = os.umask(umask)
    try:
        storage = LocalStorage(tmp_path / "root", create=True, file_mode=file_mode)
        storage.put("blobs/a", b"x")
        storage.replace("sessions/a", b"x")
        storage.lock("a").release()
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("*")
    }

    expected = dict.fromkeys(("root/blobs/a", "root/sessions/a", "root/locks/a"), file)
    folders = ("root", "root/blobs", "root/sessions", "root/locks", "root/.tmp")
    assert expected | dict.fromkeys(folders, folder) == modes
