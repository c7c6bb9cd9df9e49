"""Which blobs of a document others name too: one document at a time is in memory."""

from dataclasses import dataclass

from kvplane.pack.documents import State
from kvplane.pack.inventory import Document, Kind, documents
from kvplane.storage import Storage

SHOWN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """Another document with blobs in common.

    Args:
        kind: "session" or "cut".
        name: what people call it.
        num_blobs: that both name.
        nbytes: theirs.
    """

    kind: str
    name: str
    num_blobs: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Who shares a document's blobs.

    Args:
        sharers: the largest first, at most SHOWN.
        num_sharers: how many there are.
        users: by blob, how many documents name it beside this one; absent for none.
        num_unreadable: documents of the root that could not be read.
    """

    sharers: tuple[Sharer, ...]
    num_sharers: int
    users: dict[str, int]
    num_unreadable: int


def sharing(storage: Storage, mine: Document, state: State, sizes: dict[str, int]) -> Sharing:
    """Who else of a root names blobs of a document.

    Args:
        storage: an opened root.
        mine: the document.
        state: what it says.
        sizes: bytes of its blobs.
    """
    blobs = state.blobs
    found: list[Sharer] = []
    users: dict[str, int] = {}
    unreadable = 0
    for other in documents(storage):
        if other.file == mine.file:
            continue
        if other.content is None:
            unreadable += 1
            continue
        common = blobs & other.content.state.blobs
        for blob in common:
            users[blob] = users.get(blob, 0) + 1
        if common:
            kind = "cut" if other.kind is Kind.CUT else "session"
            nbytes = sum(sizes.get(blob, 0) for blob in common)
            found.append(Sharer(kind=kind, name=other.name, num_blobs=len(common), nbytes=nbytes))
    found.sort(key=lambda sharer: (-sharer.nbytes, sharer.name))
    return Sharing(
        sharers=tuple(found[:SHOWN]),
        num_sharers=len(found),
        users=users,
        num_unreadable=unreadable,
    )
