"""The system calls that a folder is written and read by, behind one seam.

Tests put an object in its place that fails, shortens or dies at the n-th call. Names are always
relative to an open folder, and a symbolic link is never followed.
"""

import fcntl
import os
import stat

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


class System:
    """The calls themselves; each raises OSError as the system does."""

    def open_root(self, path: str) -> int:
        """The root folder; the only path that is taken whole, links included."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open_folder(self, folder: int, part: str) -> int:
        """A folder inside another."""
        return os.open(part, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=folder)

    def open_read(self, folder: int, part: str) -> int:
        """A file to read; a pipe does not make it wait."""
        return os.open(part, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=folder)

    def open_new(self, folder: int, part: str, mode: int) -> int:
        """A file that was not there, to write."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
        return os.open(part, flags, mode, dir_fd=folder)

    def open_lock(self, folder: int, part: str, mode: int) -> int:
        """A file to lock, there or not."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _OPEN
        return os.open(part, flags, mode, dir_fd=folder)

    def close(self, file: int) -> None:
        """Give a descriptor back."""
        os.close(file)

    def read(self, file: int, buffer: memoryview, first: int) -> int:
        """Bytes from `first` on into `buffer`; how many, 0 at the end."""
        return os.preadv(file, [buffer], first)

    def write(self, file: int, data: memoryview, first: int) -> int:
        """Bytes from `first` on; how many were taken."""
        return os.pwrite(file, data, first)

    def truncate(self, file: int, nbytes: int) -> None:
        """Make a file this long."""
        os.ftruncate(file, nbytes)

    def sync(self, file: int) -> None:
        """Make a file's bytes or a folder's entries outlive the loss of power."""
        os.fsync(file)

    def make_folder(self, folder: int, part: str, mode: int) -> None:
        """A new folder inside another."""
        os.mkdir(part, mode, dir_fd=folder)

    def link(self, source: int, part: str, target: int, name: str) -> None:
        """A second name for a file, unless it is taken."""
        os.link(part, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)

    def rename(self, source: int, part: str, target: int, name: str) -> None:
        """Another name for a file, in place of whatever had it."""
        os.rename(part, name, src_dir_fd=source, dst_dir_fd=target)

    def unlink(self, folder: int, part: str) -> None:
        """Take a name away."""
        os.unlink(part, dir_fd=folder)

    def stat(self, folder: int, part: str) -> os.stat_result:
        """What a name is, a link itself."""
        return os.stat(part, dir_fd=folder, follow_symlinks=False)

    def stat_open(self, file: int) -> os.stat_result:
        """What an open file is."""
        return os.fstat(file)

    def touch(self, folder: int, part: str) -> None:
        """Set the times of a name to now."""
        os.utime(part, dir_fd=folder, follow_symlinks=False)

    def entries(self, folder: int) -> list[tuple[str, bool]]:
        """Every entry of a folder, and whether it is a folder itself."""
        with os.scandir(folder) as found:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]

    def lock(self, file: int) -> None:
        """Hold a file alone, or BlockingIOError."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, file: int) -> None:
        """Let others hold it."""
        fcntl.flock(file, fcntl.LOCK_UN)


def is_file(found: os.stat_result) -> bool:
    """Whether it is a plain file: no link, pipe, folder or device."""
    return stat.S_ISREG(found.st_mode)
