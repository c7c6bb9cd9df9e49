"""The root of packs: what an empty folder becomes, and what another folder is refused for."""

import os

from kvplane.errors import PackCorrupt, PackMismatch, StorageMissing
from kvplane.pack.encoding import canonical, parsed
from kvplane.pack.limits import BLOCK, FORMAT, ROOT_NBYTES
from kvplane.storage import Storage, open_storage

ROOT = "root.json"
KIND = "kvplane-root"
CONTENT = canonical({"block": BLOCK, "format": FORMAT, "kind": KIND})


def open_root(root: str | os.PathLike[str] | Storage, *, create: bool = False) -> Storage:
    """The storage of a root of packs; an empty one becomes a root when `create`.

    Raises:
        PackCorrupt: it holds something else.
        PackVersion: a root of another format.
        StorageError: it is not there, or cannot be read or written.
    """
    storage = open_storage(root, create=create)
    try:
        data = storage.read(ROOT, limit=ROOT_NBYTES)
    except StorageMissing:
        if not storage.is_empty():
            what = "is no root of packs, and not empty"
            raise PackCorrupt(path=storage.location, what=what) from None
        if not create:
            what = "is empty: no packs were saved here"
            raise PackCorrupt(path=storage.location, what=what) from None
        storage.put(ROOT, CONTENT)
        return storage
    path = f"{storage.location}/{ROOT}"
    fields = parsed(data, path)
    if fields.get("kind") != KIND:
        raise PackCorrupt(path=path, what=f"kind is {fields.get('kind')!r}")
    if fields.get("block") != BLOCK:
        raise PackMismatch(field="block", expected=BLOCK, got=fields.get("block"))
    if data != CONTENT:
        raise PackCorrupt(path=path, what="unknown fields")
    return storage
