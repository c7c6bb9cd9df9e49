"""Folders below one root, opened a part at a time, and what the system says when it refuses.

No symbolic link below the root is followed, at any instant. A new folder outlives the loss of
power before anything in it is said to be stored.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvplane.errors import KVPlaneError, StorageError, StorageMissing
from kvplane.storage.base import is_name
from kvplane.storage.system import System


class Folders:
    """One root; whoever opens something gives an ExitStack that closes it."""

    def __init__(self, root: str | os.PathLike[str], *, system: System, mode: int) -> None:
        # a link to the root itself is the user's to make; those below it are not followed
        self.root = os.path.realpath(root)
        self._system = system
        self._mode = mode
        # folders whose entry in the folder above is known to be on disk
        self._durable: set[str] = set()

    def path(self, name: str) -> str:
        """What messages call a name."""
        return f"{self.root}/{name}" if name else self.root

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Whatever the system refuses inside becomes a StorageError about `name`."""
        try:
            yield
        except KVPlaneError:
            raise
        except FileNotFoundError as error:
            raise StorageMissing(path=self.path(name)) from error
        except OSError as error:
            raise StorageError(path=self.path(name), what=cause(error)) from error

    def open_root(self, files: ExitStack) -> int:
        """The root, which has to be there: without it nothing is merely missing."""
        try:
            return self._keep(files, self._system.open_root(self.root))
        except FileNotFoundError as error:
            raise StorageError(path=self.root, what="there is no such folder") from error
        except OSError as error:
            raise StorageError(path=self.root, what=cause(error)) from error

    def make_root(self) -> None:
        """The root made and durable, with the folders above it, unless it is there."""
        with self.naming(""), ExitStack() as files:
            try:
                self._keep(files, self._system.open_root(self.root))
            except FileNotFoundError:
                self._make_root(self.root)
                return
            # whoever made it may have died before this; the folder above may be closed to us
            with suppress(OSError):
                above = str(Path(self.root).parent)
                self._system.sync(self._keep(files, self._system.open_root(above)))

    def open(self, files: ExitStack, parts: list[str]) -> int:
        """The folder of these parts; FileNotFoundError where there is none."""
        folder = self.open_root(files)
        for part in parts:
            try:
                folder = self._enter(files, folder, part)
            except NotADirectoryError as error:
                # below a file nothing is stored
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
        return folder

    def make(self, files: ExitStack, parts: list[str], *, durable: bool = True) -> int:
        """The folder of these parts, made and, if asked, durable."""
        folder = self.open_root(files)
        for depth, part in enumerate(parts, 1):
            path = "/".join(parts[:depth])
            try:
                inner = self._enter(files, folder, part)
            except FileNotFoundError:
                self._durable.discard(path)
                # another writer may be faster; then its folder is the one
                with suppress(FileExistsError):
                    self._system.make_folder(folder, part, self._mode)
                inner = self._enter(files, folder, part)
            # whoever made it may have died before this
            if durable and path not in self._durable:
                self._system.sync(folder)
                self._durable.add(path)
            folder = inner
        return folder

    def close(self, file: int) -> None:
        """Give back what was only read: an error can no longer mean anything."""
        with suppress(OSError):
            self._system.close(file)

    def names(self, folder: int, path: str) -> Iterator[str]:
        """Every name below an open folder, in no order."""
        for part, is_folder in self._system.entries(folder):
            name = f"{path}/{part}" if path else part
            if not is_name(name):
                continue
            if not is_folder:
                yield name
                continue
            with ExitStack() as files, suppress(FileNotFoundError):
                yield from self.names(self._enter(files, folder, part), name)

    def _enter(self, files: ExitStack, folder: int, part: str) -> int:
        try:
            return self._keep(files, self._system.open_folder(folder, part))
        except NotADirectoryError:
            # the system says the same of a link that it was told not to follow
            if stat.S_ISLNK(self._system.stat(folder, part).st_mode):
                raise OSError(errno.ELOOP, "") from None
            raise

    def _make_root(self, path: str) -> None:
        above = str(Path(path).parent)
        with ExitStack() as files:
            try:
                folder = self._keep(files, self._system.open_root(above))
            except FileNotFoundError:
                self._make_root(above)
                folder = self._keep(files, self._system.open_root(above))
            with suppress(FileExistsError):
                self._system.make_folder(folder, Path(path).name, self._mode)
            self._system.sync(folder)

    def _keep(self, files: ExitStack, file: int) -> int:
        files.callback(self.close, file)
        return file


def cause(error: OSError) -> str:
    """The reason the system gave, for people and for searching."""
    if error.errno == errno.ELOOP:
        return "is a symbolic link, and none is followed inside a root"
    code = errno.errorcode.get(error.errno or 0, "no code")
    return f"{error.strerror or error} ({code})"
