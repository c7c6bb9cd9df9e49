"""`kvplane pack export|import`: whole sessions as files for other programs."""

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kvplane.cli.output import console, human
from kvplane.cli.where import root_of, where
from kvplane.cli.working import working
from kvplane.errors import ArgumentError
from kvplane.pack import open_root, read_session
from kvplane.pack.single import read_single, write_single
from kvplane.pack.whole import Whole, gathered, put_whole
from kvplane.storage import open_storage

Format = Literal["safetensors", "kvpack"]
Flag = Annotated[bool, Parameter(negative="")]


def export(
    name: str,
    path: str,
    /,
    *,
    root: str | None = None,
    format: Format = "safetensors",  # noqa: A002 - what people type
    key_file: str | None = None,
    tenant: str = "kvplane",
    epoch: int = 1,
    encrypt: Flag = False,
    lossless: Flag = False,
    replace: Flag = False,
) -> None:
    """Write a whole session where other programs can read it.

    Example: kvplane pack export notes notes.safetensors

    Args:
        name: A session.
        path: A file; for kvpack a folder, or an address such as s3://bucket/notes.
        root: The root; by default what kvplane run keeps.
        format: One safetensors file, or kvpack v1 (a draft).
        key_file: kvpack: a file with the root key; by default the environment has the key
            (KVPLANE_KVPACK_KEY) or names its file (KVPLANE_KVPACK_KEY_FILE).
        tenant: kvpack: whose namespace.
        epoch: kvpack: the key's epoch.
        encrypt: kvpack: encrypt rows and manifest.
        lossless: kvpack: pack runs of equal bytes.
        replace: A file of that name is replaced.
    """
    place, session = where(name, root)
    storage = open_root(place)
    saved = read_session(storage, session)
    if format == "safetensors":
        if Path(path).exists() and not replace:
            raise ArgumentError(argument="path", expected="a new file (--replace)", got=path)
        with working(f"writing {path}"):
            nbytes = write_single(path, gathered(storage, saved))
        console().print(f"{path}: {human(nbytes)}")
        return
    from kvplane.interchange import export_kvpack, tenant_id  # noqa: PLC0415
    from kvplane.kvpack import Codec, Keys, read_root  # noqa: PLC0415

    keys = Keys(read_root(key_file), tenant=tenant_id(tenant), epoch=epoch)
    target = open_storage(path, create=True)
    if not target.is_empty() and not replace:
        raise ArgumentError(argument="path", expected="an empty folder (--replace)", got=path)
    with working(f"writing {path}"):
        done = export_kvpack(
            target,
            gathered(storage, saved),
            keys,
            codec=Codec.LOSSLESS if lossless else Codec.RAW,
            encrypted=encrypt,
        )
    console().print(f"{path}/{done.pack}: {done.num_chunks:,} chunks, {human(done.nbytes)}")


def import_(
    path: str,
    /,
    *,
    root: str | None = None,
    name: str | None = None,
    key_file: str | None = None,
    tenant: str = "kvplane",
    epoch: int = 1,
    replace: Flag = False,
) -> None:
    """Save a session that was exported, every row of it verified.

    Example: kvplane pack import notes.safetensors --name notes2

    Args:
        path: A safetensors file; or the folder or address of a kvpack.
        root: The root; by default what kvplane run keeps.
        name: Save it under another name.
        key_file: kvpack: as for export.
        tenant: kvpack: whose namespace.
        epoch: kvpack: the newest epoch that may be read.
        replace: A session of that name is replaced.
    """
    with working(f"reading {path}"):
        whole = _read(path, key_file, tenant, epoch)
        storage = open_root(root_of(root), create=True)
        saved = put_whole(storage, whole, name=name, replace_it=replace)
    console().print(f"{saved.name}: {saved.state.position:,} tokens")


def _read(path: str, key_file: str | None, tenant: str, epoch: int) -> Whole:
    if os.path.isfile(path):  # noqa: PTH113 - an address is no path
        return read_single(path)
    from kvplane.interchange import import_kvpack, tenant_id  # noqa: PLC0415
    from kvplane.kvpack import Keys, read_root  # noqa: PLC0415

    keys = Keys(read_root(key_file), tenant=tenant_id(tenant), epoch=epoch)
    return import_kvpack(open_storage(path), keys)
