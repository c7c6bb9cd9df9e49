"""Sessions and cuts from one root to another: what is there already is not sent again.

Blobs first, several at a time and each verified before it is stored; then cuts; then sessions. So
a carrying that is interrupted leaves nothing that names what is not there, and the next one goes
on where it ended.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvplane.errors import ArgumentError, PackMissing, SessionNotFound, StorageMissing
from kvplane.pack.blob import blob_name, check_digest
from kvplane.pack.content import put_content
from kvplane.pack.documents import Cut, SavedSession
from kvplane.pack.inventory import Kind, documents, kind_of, read_cut
from kvplane.pack.lease import Lease
from kvplane.pack.limits import DOCUMENT_NBYTES, STATES_NBYTES
from kvplane.pack.sessions import read_session, session_file
from kvplane.storage import Storage

WORKERS = 8
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What was carried.

    Args:
        sessions: names, those that were there already as well.
        cuts: files, likewise.
        blobs_sent: that were not there.
        nbytes_sent: their bytes.
        blobs_there: that were not sent.
    """

    sessions: tuple[str, ...]
    cuts: tuple[str, ...]
    blobs_sent: int
    nbytes_sent: int
    blobs_there: int


def carry(
    source: Storage,
    target: Storage,
    *,
    names: Sequence[str] | None = None,
    cuts: bool = False,
    replace: bool = False,
    progress: Progress = lambda _: None,
) -> Carried:
    """Copy sessions, or cuts, to another root.

    Args:
        source: an opened root.
        target: an opened root, which may be of another kind.
        names: sessions, or cuts' files; None: every session.
        cuts: every cut too.
        replace: a session of that name that says something else is replaced.
        progress: called with the bytes of each blob that was sent.

    Raises:
        SessionNotFound: no session or cut of that name. Nothing was written.
        ArgumentError: a session of that name says something else. No session was written.
        SessionLocked: another process writes a session of that name.
        PackMissing, PackCorrupt: a blob is not what it should be; nothing names it.
        StorageError: something could not be read or written.
    """
    wanted = _wanted(source, names, cuts=cuts)
    data = {
        # what was looked at, whatever is saved meanwhile
        file: content.encoded()
        for file, content in wanted.items()
        if isinstance(content, SavedSession)
    }
    if not replace:
        _check_new(target, data)
    blobs = sorted(set().union(*(content.state.blobs for content in wanted.values())))
    with Lease(source) as reading, Lease(target) as writing:

        def send(needed: Iterable[str]) -> list[int]:
            with ThreadPoolExecutor(WORKERS) as pool:
                try:
                    return list(pool.map(one, needed))
                finally:
                    pool.shutdown(cancel_futures=True)

        def one(blob: str) -> int:
            reading.keep()
            writing.keep()
            nbytes = _send(source, target, blob)
            progress(nbytes)
            return nbytes

        sent = send(blobs)
        for file, content in wanted.items():
            if isinstance(content, Cut):
                put_content(target, file, content.encoded())
        for file, document in data.items():
            with target.lock(_name_of(file)):
                target.replace(file, document)
        # as every writer: what a sweeper took before it was named is sent again
        again = send(blobs)
    total = [one + two for one, two in zip(sent, again, strict=True)]
    return Carried(
        sessions=tuple(map(_name_of, data)),
        cuts=tuple(file for file in wanted if file not in data),
        blobs_sent=sum(1 for nbytes in total if nbytes),
        nbytes_sent=sum(total),
        blobs_there=sum(1 for nbytes in total if not nbytes),
    )


def _wanted(
    source: Storage, names: Sequence[str] | None, *, cuts: bool
) -> dict[str, Cut | SavedSession]:
    found: dict[str, Cut | SavedSession] = {}
    for name in names or ():
        if kind_of(name) is Kind.CUT:
            try:
                found[name] = read_cut(source, name)
            except StorageMissing:
                raise SessionNotFound(name=name, nearest=[]) from None
        else:
            found[session_file(name)] = read_session(source, name)
    for one in documents(source):
        if (names is None and one.kind is Kind.SESSION) or (cuts and one.kind is Kind.CUT):
            if one.content is not None:
                found[one.file] = one.content
            elif one.kind is Kind.SESSION and one.error is not None:
                # a damaged cut is passed over by everybody; a damaged session was asked for
                raise one.error
    return found


def _check_new(target: Storage, data: dict[str, bytes]) -> None:
    for file, document in data.items():
        try:
            there = target.read(file, limit=DOCUMENT_NBYTES)
        except StorageMissing:
            continue
        if there != document:
            expected = f"no session {_name_of(file)!r} that says something else (--replace)"
            raise ArgumentError(argument="names", expected=expected, got=target.location)


def _send(source: Storage, target: Storage, blob: str) -> int:
    """The bytes that were sent: 0 where the blob is there."""
    name = blob_name(blob)
    try:
        nbytes = source.size(name)
        if target.exists(name) and target.size(name) == nbytes:
            return 0
        data = source.read(name, limit=STATES_NBYTES)
    except StorageMissing as error:
        raise PackMissing(blob=blob, needed_by=source.location) from error
    check_digest(memoryview(data), blob, f"{source.location}/{name}")
    put_content(target, name, data)
    return len(data)


def _name_of(file: str) -> str:
    return file.removeprefix("sessions/").removesuffix(".json")
