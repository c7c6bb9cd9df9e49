"""Address space of this process, by the system's own calls (Linux).

`mmap` of the standard library cannot place a mapping at an address; two mappings of one page, or a
page put under a tensor that exists, need that.
"""

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref

import torch

from kvplane.errors import MemoryUnavailable

PAGE_NBYTES = mmap.PAGESIZE
_PROT_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_PUNCH_HOLE = 0x01 | 0x02  # with FALLOC_FL_KEEP_SIZE


def available() -> str | None:
    """None where these calls work; else why not."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return "needs Linux with memfd_create"
    if ctypes.sizeof(ctypes.c_void_p) < 8:  # noqa: PLR2004 - bytes of a 64-bit address
        return "needs a 64-bit address space"
    return None


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


_LIBC = _libc() if available() is None else None


def _call() -> ctypes.CDLL:
    if _LIBC is None:
        raise MemoryUnavailable(f"mapped memory {available()}")
    return _LIBC


def failed(what: str, nbytes: int, code: int) -> MemoryUnavailable:
    """The error of a call that failed, with the limit that usually stands behind it."""
    hints = {
        errno.ENOMEM: "no memory, or vm.max_map_count mappings are reached",
        errno.ENOSPC: "the memory file system is full",
        errno.EFBIG: "a file may not be that large (ulimit -f)",
        errno.EMFILE: "this process has too many descriptors (ulimit -n)",
        errno.ENFILE: "the system has too many descriptors",
    }
    hint = hints.get(code, os.strerror(code))
    name = errno.errorcode.get(code, str(code))
    return MemoryUnavailable(f"{what} of {nbytes} bytes failed: {hint} ({name})")


class AddressRange:
    """Reserved addresses; they go back when the last tensor over them is gone.

    Args:
        nbytes: a multiple of the page.

    Raises:
        MemoryUnavailable: the address space cannot be had.
    """

    def __init__(self, nbytes: int) -> None:
        _SPARE.keep()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _call().mmap(None, nbytes, _PROT_NONE, flags, -1, 0)
        if address in {None, _MAP_FAILED}:
            raise failed("reserving address space", nbytes, ctypes.get_errno())
        self.nbytes = nbytes
        self._address = int(address)
        # the array exports the memory; every tensor over it keeps it alive
        array = (ctypes.c_uint8 * nbytes).from_address(self._address)
        weakref.finalize(array, _unmap, self._address, nbytes).atexit = False
        self.bytes = memoryview(array).cast("B")
        self.tensor = torch.frombuffer(self.bytes, dtype=torch.uint8)

    def map(self, first: int, nbytes: int, fd: int, offset: int) -> None:
        """Show the file's bytes [offset, offset + nbytes) at [first, first + nbytes).

        Raises:
            MemoryUnavailable: the system refuses one more mapping. What was there stays.
        """
        address = _call().mmap(
            self._address + first, nbytes, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset
        )
        if address in {None, _MAP_FAILED}:
            raise failed("mapping", nbytes, ctypes.get_errno())

    def map_back(self, first: int, nbytes: int, fd: int, offset: int) -> None:
        """Show again what was shown before, when a further mapping was refused.

        Raises:
            MemoryUnavailable: refused, and the mappings kept for this are spent.
        """
        try:
            self.map(first, nbytes, fd, offset)
        except MemoryUnavailable:
            if not _SPARE.spend():
                raise
            self.map(first, nbytes, fd, offset)

    def detach(self) -> bool:
        """Put zero pages of this process under every address: tensors left over read zeros.

        Whoever still holds one can then neither see nor change pages that others use.

        Returns:
            Whether the system let them be put there; else the addresses can only be read from now
            on, and show whatever becomes of the pages.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        for _ in range(2):
            address = _call().mmap(self._address, self.nbytes, _READ_WRITE, flags, -1, 0)
            if address not in {None, _MAP_FAILED}:
                return True
            # one mapping too many refuses even one in the place of others
            if not _SPARE.spend():
                break
        _call().mprotect(self._address, self.nbytes, mmap.PROT_READ)
        return False


class _Spare:
    """A few mappings kept aside: where no more are to be had, what was can still be shown again.

    The system lets their number pass its limit by one, and then refuses even a mapping in the
    place of another.
    """

    PAGES = 8

    def __init__(self) -> None:
        self._address: int | None = None
        self._lock = threading.Lock()

    def keep(self) -> None:
        """Have them, if they can be had."""
        with self._lock:
            if self._address is None:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
                nbytes = self.PAGES * PAGE_NBYTES
                address = _call().mmap(None, nbytes, _PROT_NONE, flags, -1, 0)
                if address in {None, _MAP_FAILED}:
                    return
                self._address = int(address)
                for page in range(0, self.PAGES, 2):
                    # neighbours that differ cannot be one mapping
                    _call().mprotect(
                        self._address + page * PAGE_NBYTES, PAGE_NBYTES, mmap.PROT_READ
                    )

    def spend(self) -> bool:
        """Give them up; False when they are given up already."""
        with self._lock:
            address, self._address = self._address, None
        if address is not None:
            _unmap(address, self.PAGES * PAGE_NBYTES)
        return address is not None


_SPARE = _Spare()


def _unmap(address: int, nbytes: int) -> None:
    _call().munmap(address, nbytes)


def allocate(fd: int, offset: int, nbytes: int) -> None:
    """Give a range of a file its pages now, so that no store to it can fail: MemoryUnavailable."""
    while _call().fallocate(fd, 0, offset, nbytes):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise failed("taking pages", nbytes, code)


def write(fd: int, offset: int, content: memoryview) -> None:
    """Put bytes into pages of a file that were allocated: MemoryUnavailable."""
    while content:
        try:
            done = os.pwrite(fd, content, offset)
        except OSError as error:
            raise failed("copying pages", len(content), error.errno or 0) from error
        offset, content = offset + done, content[done:]


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Take a range's pages back; its bytes are zero again."""
    while _call().fallocate(fd, _PUNCH_HOLE, offset, nbytes):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise failed("giving pages back", nbytes, code)
