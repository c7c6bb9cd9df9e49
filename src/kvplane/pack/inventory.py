"""What lies in a root: every file by its kind, every document with what it needs.

One document at a time is in memory: a cut of a long prompt holds all its ids.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kvplane.errors import PackCorrupt, PackError
from kvplane.pack.chain import EMPTY_TAIL, TAIL_LENGTH, block_digest
from kvplane.pack.documents import Cut, SavedSession
from kvplane.pack.limits import BLOCK, DOCUMENT_NBYTES
from kvplane.pack.match import sealed_name
from kvplane.pack.root import ROOT
from kvplane.pack.sessions import read_session
from kvplane.storage import Storage

_HEX = "[0-9a-f]{64}"
_BLOB = re.compile(r"blobs/([0-9a-f]{2})/(\1[0-9a-f]{62})\.safetensors")
_SHAPES = {
    "cuts": re.compile(rf"cuts/{_HEX}/{_HEX}/[0-9]+\.([0-9a-f]{{16}}|-)\.[0-9a-f]{{16}}\.json"),
    "sessions": re.compile(r"sessions/[a-z0-9][a-z0-9._-]{0,99}\.json"),
    "nodes": re.compile(rf"nodes/{_HEX}/{_HEX}\.json"),
    "locks": re.compile(r"locks/[^/]+"),
    "leases": re.compile(r"leases/[^/]+\.json"),
}


class Kind(Enum):
    """What a file of a root is."""

    ROOT = "root"
    BLOB = "blobs"
    CUT = "cuts"
    SESSION = "sessions"
    NODE = "nodes"
    LOCK = "locks"
    LEASE = "leases"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A cut or a saved session, or why it cannot be read.

    Args:
        kind: Kind.CUT or Kind.SESSION.
        file: its name in the root.
        content: what it says; None when it cannot be read.
        error: why not; None when it can.
    """

    kind: Kind
    file: str
    content: Cut | SavedSession | None = None
    error: PackError | None = None

    @property
    def name(self) -> str:
        """What people call it: a session's name, a cut's file."""
        if self.kind is Kind.CUT:
            return self.file
        return self.file.removeprefix("sessions/").removesuffix(".json")


def kind_of(file: str) -> Kind:
    """What a file is, by its name alone."""
    if file == ROOT:
        return Kind.ROOT
    if _BLOB.fullmatch(file):
        return Kind.BLOB
    for kind, shape in _SHAPES.items():
        if shape.fullmatch(file):
            return Kind(kind)
    return Kind.FOREIGN


def blob_of(file: str) -> str:
    """The digest that a blob's file is named by."""
    return file.rsplit("/", 1)[-1].removesuffix(".safetensors")


def documents(storage: Storage) -> Iterator[Document]:
    """Every cut and saved session, sessions first, each read when it is asked for."""
    for folder in ("sessions", "cuts"):
        for file in storage.list(folder):
            kind = kind_of(file)
            if kind in {Kind.CUT, Kind.SESSION}:
                yield document(storage, file)


def document(storage: Storage, file: str) -> Document:
    """One cut or saved session by its file's name."""
    kind = kind_of(file)
    try:
        if kind is Kind.CUT:
            return Document(kind=kind, file=file, content=read_cut(storage, file))
        name = file.removeprefix("sessions/").removesuffix(".json")
        return Document(kind=kind, file=file, content=read_session(storage, name))
    except PackError as error:
        return Document(kind=kind, file=file, error=error)


def read_cut(storage: Storage, file: str) -> Cut:
    """What a cut says, once it is what its name says.

    Its chain is not recomputed: the salt is the tenant's.

    Raises:
        StorageMissing: there is none.
        PackCorrupt, PackVersion, PackTooLarge: the file is not one, or another's.
    """
    data = storage.read(file, limit=DOCUMENT_NBYTES)
    path = f"{storage.location}/{file}"
    cut = Cut.decoded(data, path)
    position = cut.state.position
    block, rest = divmod(position, BLOCK)
    tail = EMPTY_TAIL
    if rest:
        ids = cut.tokens[block * BLOCK :]
        tail = block_digest(bytes.fromhex(cut.chain), block, ids, cut.aux).hex()[:TAIL_LENGTH]
    if sealed_name(cut, tail, data) != file:
        raise PackCorrupt(path=path, what="its name is another's")
    return cut
