"""Which storage an address means."""

import os

from kvplane.errors import StorageError
from kvplane.storage.base import Storage
from kvplane.storage.local import LocalStorage


def open_storage(root: str | os.PathLike[str] | Storage, *, create: bool = False) -> Storage:
    """The storage at `root`: a folder, or a storage that is open already.

    Args:
        root: a path, or any Storage, which is given back as it is.
        create: make the folder, and those above it, where it is not there.

    Raises:
        StorageError: nothing is there and `create` is False, it is no folder, it may not be
            opened, or it is an address of a kind that this version cannot reach.
    """
    if not isinstance(root, str | os.PathLike):
        return root
    path = os.fspath(root)
    scheme, separator, _ = path.partition("://")
    if separator:
        raise StorageError(path=path, what=f"no storage for addresses that begin with {scheme}://")
    if not path or "\0" in path:
        raise StorageError(path=ascii(path), what="not the path of a folder")
    return LocalStorage(path, create=create)
