"""Which storage an address means."""

import os
from urllib.parse import unquote, urlsplit

from kvplane.errors import StorageError
from kvplane.storage.base import Storage
from kvplane.storage.local import LocalStorage

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")


def is_address(root: str | os.PathLike[str]) -> bool:
    """Whether it is an address of an object store, and so no path to make absolute."""
    scheme, separator, _ = os.fspath(root).partition("://")
    return bool(separator) and scheme in OBJECT_SCHEMES


def open_storage(root: str | os.PathLike[str] | Storage, *, create: bool = False) -> Storage:
    """The storage at `root`: a folder, an object store, or a storage that is open already.

    Args:
        root: a path, an address such as s3://bucket/prefix or file:///folder, or any Storage,
            which is given back as it is.
        create: make the folder, and those above it, where it is not there. Buckets are not made.

    Raises:
        StorageError: nothing is there and `create` is False, it is no folder, it may not be
            opened, or it is an address of a kind that this version cannot reach.
        ExtraMissing: obstore is not installed, which object stores need.
    """
    if not isinstance(root, str | os.PathLike):
        return root
    path = os.fspath(root)
    scheme, separator, rest = path.partition("://")
    if separator and scheme in OBJECT_SCHEMES:
        # object stores need a package of their own, which folders do not
        from kvplane.storage.object import ObjectStorage  # noqa: PLC0415

        if not rest.strip("/"):
            raise StorageError(path=path, what="names no bucket")
        return ObjectStorage(path)
    if separator and scheme == "file" and not urlsplit(path).netloc:
        return LocalStorage(unquote(urlsplit(path).path), create=create)
    if separator:
        raise StorageError(path=path, what=f"no storage for addresses that begin with {scheme}://")
    if not path or "\0" in path:
        raise StorageError(path=ascii(path), what="not the path of a folder")
    return LocalStorage(path, create=create)
