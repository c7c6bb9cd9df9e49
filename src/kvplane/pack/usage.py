"""Where a root's bytes are: by kind of file, and by who needs them."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from kvplane.errors import StorageMissing
from kvplane.pack.inventory import Kind, blob_of, documents, kind_of
from kvplane.storage import Storage


class Amount(NamedTuple):
    """Files, and their bytes."""

    num_files: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The blobs of one cut or session.

    Args:
        kind: Kind.CUT or Kind.SESSION.
        name: what people call it.
        nbytes: all blobs that it names.
        own_nbytes: those that nothing else names: what a sweep frees once it is removed.
    """

    kind: Kind
    name: str
    nbytes: int
    own_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A root's bytes.

    Args:
        kinds: every kind of file.
        shares: every readable cut and session, sessions first.
        unnamed: blobs that no readable cut or session names: what a sweep frees now.
    """

    kinds: dict[Kind, Amount]
    shares: tuple[Share, ...]
    unnamed: Amount

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(amount.nbytes for amount in self.kinds.values())


def usage(storage: Storage) -> Usage:
    """Where the bytes of a root are; no blob is read."""
    kinds = {kind: Amount(0, 0) for kind in Kind}
    blobs: dict[str, int] = {}
    for file in storage.list():
        try:
            size = storage.size(file)
        except StorageMissing:
            # removed since it was listed
            continue
        kind = kind_of(file)
        kinds[kind] = Amount(kinds[kind].num_files + 1, kinds[kind].nbytes + size)
        if kind is Kind.BLOB:
            blobs[blob_of(file)] = size
    named = [
        (one.kind, one.name, one.content.state.blobs)
        for one in documents(storage)
        if one.content is not None
    ]
    users = Counter(blob for _, _, needed in named for blob in needed)
    rest = [size for blob, size in blobs.items() if blob not in users]
    return Usage(
        kinds=kinds,
        shares=tuple(
            Share(
                kind=kind,
                name=name,
                nbytes=sum(blobs.get(blob, 0) for blob in needed),
                own_nbytes=sum(blobs.get(blob, 0) for blob in needed if users[blob] == 1),
            )
            for kind, name, needed in named
        ),
        unnamed=Amount(len(rest), sum(rest)),
    )
