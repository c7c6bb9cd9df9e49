"""Bytes under names that say them: what is there already is believed once it was compared.

A name that holds other bytes is damaged, or was written by a file system that lied: the bytes at
hand are the right ones, so they take its place and every document that names them is whole again.
"""

from contextlib import suppress

from kvplane.errors import PackCorrupt, StorageMissing
from kvplane.storage import Data, Storage

PIECE_NBYTES = 1 << 20


def put_content(storage: Storage, name: str, data: Data, *, durable: bool = True) -> bool:
    """Store bytes under the name that says them; whether they were not there, or not whole.

    Args:
        storage: an opened root.
        name: for these bytes and no others.
        data: what.
        durable: as in `Storage.put`.

    Raises:
        StorageError: they could not be stored, or what is there could not be read.
    """
    # of another size than what was to be put: damaged
    with suppress(PackCorrupt):
        if storage.put(name, data, durable=durable):
            return True
        if _holds(storage, name, memoryview(data)):
            return False
    storage.replace(name, data)
    return True


def _holds(storage: Storage, name: str, data: memoryview) -> bool:
    """Whether exactly these bytes are stored: not where a sweeper took them away since."""
    with suppress(StorageMissing), storage.reading(name) as file:
        if file.nbytes != len(data):
            return False
        buffer = bytearray(min(PIECE_NBYTES, len(data)))
        for first in range(0, len(data), PIECE_NBYTES):
            expected = data[first : first + PIECE_NBYTES]
            got = memoryview(buffer)[: len(expected)]
            file.read_into(got, first=first)
            # bytes of an array are compared as memory, those of a view one by one
            if buffer[: len(expected)] != expected:
                return False
        return True
    return False
