"""A folder of this machine as a storage.

.tmp/<uuid>     written and synced here first, then linked (put) or renamed (replace); held by
                flock while it is written
locks/<name>    held by flock for the holder's life; never deleted
"""

import errno
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Self

from kvplane.errors import PackCorrupt, PackTooLarge, StorageError, StorageMissing
from kvplane.storage.base import Data, check_name, check_same_size, flat, flat_target
from kvplane.storage.folders import Folders, cause
from kvplane.storage.holder import LIMIT_HOLDER, Holder, check_lock_name
from kvplane.storage.system import System, is_file

TEMPORARY = ".tmp"


class LocalStorage:
    """Files below one folder."""

    parallel = 1

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        create: bool = False,
        file_mode: int = 0o600,
        system: System | None = None,
    ) -> None:
        """Nothing is written unless `create` asks for the folder; files are made with `file_mode`.

        Raises:
            StorageError: the folder is not there, is no folder or may not be opened.
        """
        self._system = system or System()
        self._file_mode = file_mode
        # a folder may be entered by those who may read it
        folder_mode = file_mode | (file_mode & 0o444) >> 2
        self._folders = Folders(root, system=self._system, mode=folder_mode)
        self.location = self._folders.root
        if create:
            self._folders.make_root()
        with ExitStack() as files:
            self._folders.open_root(files)

    def read(self, name: str, *, limit: int) -> bytes:
        """See Storage.read."""
        with self._file(name) as (file, size):
            if size > limit:
                raise PackTooLarge(
                    what=f"the size of {self._folders.path(name)}", limit=limit, got=size
                )
            buffer = bytearray(size)
            LocalReading(self._system, file, self._folders.path(name), size).read_into(buffer)
        return bytes(buffer)

    def size(self, name: str) -> int:
        """See Storage.size."""
        return self._found(name).st_size

    @contextmanager
    def reading(self, name: str) -> Iterator["LocalReading"]:
        """See Storage.reading."""
        with self._file(name) as (file, size):
            yield LocalReading(self._system, file, self._folders.path(name), size)

    def exists(self, name: str) -> bool:
        """See Storage.exists."""
        try:
            self._found(name)
        except StorageMissing:
            return False
        return True

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """See Storage.list."""
        parts = check_name(prefix).split("/") if prefix else []
        try:
            with self._folders.naming(prefix), ExitStack() as files:
                return tuple(sorted(self._folders.names(self._folders.open(files, parts), prefix)))
        except StorageMissing:
            return ()

    def is_empty(self) -> bool:
        """See Storage.is_empty."""
        with self._folders.naming(""), ExitStack() as files:
            entries = self._system.entries(self._folders.open_root(files))
        return all(part == TEMPORARY for part, _ in entries)

    def put(self, name: str, data: Data, *, durable: bool = True) -> bool:
        """See Storage.put."""
        view = flat(data)
        with self._made_folder_of(name, durable=durable) as (folder, part):
            stored = not self._is_there(name, folder, part, nbytes=len(view))
            if stored:
                with self._temporary(view, durable=durable) as (source, temporary):
                    stored = self._link(name, source, temporary, folder, part, nbytes=len(view))
            if durable:
                self._system.sync(folder)
        return stored

    def replace(self, name: str, data: Data) -> None:
        """See Storage.replace."""
        view = flat(data)
        with self._made_folder_of(name) as (folder, part):
            with self._temporary(view) as (source, temporary):
                self._system.rename(source, temporary, folder, part)
            self._system.sync(folder)

    def delete(self, name: str) -> None:
        """See Storage.delete."""
        with suppress(StorageMissing), self._folder_of(name) as (folder, part):
            with suppress(FileNotFoundError):
                self._system.unlink(folder, part)
            # also when it was gone: whoever took it away may have died before this
            self._system.sync(folder)

    def lock(self, name: str) -> "LocalLock":
        """See Storage.lock."""
        path = f"locks/{check_lock_name(name)}"
        with self._made_folder_of(path) as (folder, part), ExitStack() as files:
            file = self._system.open_lock(folder, part, self._file_mode)
            files.callback(self._folders.close, file)
            self._check_plain(path, self._system.stat_open(file))
            try:
                self._system.lock(file)
            except BlockingIOError:
                raise self._holder_of(file).refusal(name) from None
            # who holds it is for messages: a full disk does not stop a clean-up that frees it
            with suppress(OSError):
                said = memoryview(Holder.this_process().to_bytes())
                self._write(file, said)
                self._system.truncate(file, len(said))
            files.pop_all()
        return LocalLock(self._system, file)

    def touch(self, name: str) -> None:
        """See Storage.touch."""
        with self._folder_of(name) as (folder, part):
            self._check_plain(name, self._system.stat(folder, part))
            self._system.touch(folder, part)

    def modified(self, name: str) -> float:
        """See Storage.modified."""
        return self._found(name).st_mtime

    def sweep_temporaries(self, *, older_than_s: float) -> int:
        """Take away what dead writers left under no name; how many.

        Args:
            older_than_s: what was written to since then is kept; so is what a writer still holds.

        Raises:
            StorageError: they cannot be looked at or taken away.
        """
        swept = 0
        with suppress(StorageMissing), self._folders.naming(TEMPORARY), ExitStack() as files:
            folder = self._folders.open(files, [TEMPORARY])
            for part, _ in self._system.entries(folder):
                with suppress(FileNotFoundError):
                    swept += self._swept(folder, part, before=time.time() - older_than_s)
        return swept

    def _swept(self, folder: int, part: str, *, before: float) -> bool:
        found = self._system.stat(folder, part)
        if not is_file(found) or found.st_mtime >= before:
            return False
        file = self._system.open_read(folder, part)
        try:
            self._system.lock(file)
            self._system.unlink(folder, part)
        except BlockingIOError:
            return False
        finally:
            self._folders.close(file)
        return True

    def move(self, name: str, new: str) -> None:
        """See Storage.move."""
        check_name(name)
        with (
            self._made_folder_of(new) as (target, target_part),
            self._folder_of(name) as (folder, part),
        ):
            self._system.rename(folder, part, target, target_part)
            self._system.sync(target)
            self._system.sync(folder)

    def clear_temporaries(self, *, before: float) -> int:
        """See Storage.clear_temporaries."""
        cleared = 0
        with suppress(StorageMissing), self._folders.naming(TEMPORARY), ExitStack() as files:
            folder = self._folders.open(files, [TEMPORARY])
            for part, is_folder in self._system.entries(folder):
                with suppress(FileNotFoundError):
                    if not is_folder and self._system.stat(folder, part).st_mtime < before:
                        cleared += self._clear(folder, part)
        return cleared

    def _clear(self, folder: int, part: str) -> bool:
        """Whether a temporary was a dead writer's, and is gone."""
        file = self._system.open_read(folder, part)
        try:
            self._system.lock(file)
            self._system.unlink(folder, part)
        except BlockingIOError:
            # who writes it lives
            return False
        finally:
            self._folders.close(file)
        return True

    @contextmanager
    def _folder_of(self, name: str) -> Iterator[tuple[int, str]]:
        *parts, last = check_name(name).split("/")
        with self._folders.naming(name), ExitStack() as files:
            yield self._folders.open(files, parts), last

    @contextmanager
    def _made_folder_of(self, name: str, *, durable: bool = True) -> Iterator[tuple[int, str]]:
        *parts, last = check_name(name).split("/")
        with self._folders.naming(name), ExitStack() as files:
            yield self._folders.make(files, parts, durable=durable), last

    @contextmanager
    def _file(self, name: str) -> Iterator[tuple[int, int]]:
        with self._folder_of(name) as (folder, part):
            file = self._system.open_read(folder, part)
            try:
                found = self._system.stat_open(file)
                self._check_plain(name, found)
                yield file, found.st_size
            finally:
                self._folders.close(file)

    @contextmanager
    def _temporary(self, data: memoryview, *, durable: bool = True) -> Iterator[tuple[int, str]]:
        part = str(uuid.uuid4())
        with ExitStack() as files:
            folder = self._folders.make(files, [TEMPORARY], durable=durable)
            file = self._system.open_new(folder, part, self._file_mode)
            try:
                try:
                    # says that its writer lives; where files cannot be locked, age alone says so
                    with suppress(OSError):
                        self._system.lock(file)
                    self._write(file, data)
                    if durable:
                        self._system.sync(file)
                finally:
                    self._system.close(file)
                yield folder, part
            finally:
                # a rename has taken the name away; what cannot be unlinked is swept later
                with suppress(OSError):
                    self._system.unlink(folder, part)

    def _found(self, name: str) -> os.stat_result:
        with self._folder_of(name) as (folder, part):
            found = self._system.stat(folder, part)
            self._check_plain(name, found)
        return found

    def _check_plain(self, name: str, found: os.stat_result) -> None:
        if not is_file(found):
            raise StorageError(path=self._folders.path(name), what="is not a plain file")

    def _is_there(self, name: str, folder: int, part: str, *, nbytes: int) -> bool:
        try:
            found = self._system.stat(folder, part)
        except FileNotFoundError:
            return False
        self._check_plain(name, found)
        check_same_size(self._folders.path(name), there=found.st_size, nbytes=nbytes)
        return True

    def _link(
        self, name: str, source: int, temporary: str, folder: int, part: str, *, nbytes: int
    ) -> bool:
        while True:
            try:
                self._system.link(source, temporary, folder, part)
            except FileExistsError:
                # another writer was faster, or a sweeper took it away again since
                if self._is_there(name, folder, part, nbytes=nbytes):
                    return False
            else:
                return True

    def _write(self, file: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            count = self._system.write(file, data[done:], done)
            if count == 0:
                raise OSError(errno.EIO, "the system took no bytes")
            done += count

    def _holder_of(self, file: int) -> Holder:
        buffer = bytearray(LIMIT_HOLDER)
        with suppress(OSError):
            count = self._system.read(file, memoryview(buffer), 0)
            return Holder.from_bytes(bytes(buffer[:count]))
        return Holder.from_bytes(b"")


class LocalReading:
    """An open file: the bytes stay those of one version, renamed over or not."""

    def __init__(self, system: System, file: int, path: str, nbytes: int) -> None:
        self._system = system
        self._file = file
        self._path = path
        self.nbytes = nbytes

    def read_into(self, buffer: bytearray | memoryview, *, first: int = 0) -> None:
        """See Reading.read_into."""
        target = flat_target(buffer, first=first)
        done = 0
        while done < len(target):
            try:
                count = self._system.read(self._file, target[done:], first + done)
            except OSError as error:
                raise StorageError(path=self._path, what=cause(error)) from error
            if count == 0:
                what = f"ends at byte {first + done}, expected {first + len(target)}"
                raise PackCorrupt(path=self._path, what=what)
            done += count


class LocalLock:
    """A file held by flock."""

    def __init__(self, system: System, file: int) -> None:
        self._system = system
        self._file: int | None = file
        self._pid = os.getpid()

    def release(self) -> None:
        """See Lock.release."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with suppress(OSError):
            try:
                # a process forked meanwhile has the file too: closing it here would not end the
                # hold, and that process must not
                if os.getpid() == self._pid:
                    self._system.unlock(file)
            finally:
                self._system.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
