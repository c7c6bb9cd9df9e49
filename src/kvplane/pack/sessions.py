"""Sessions saved under a name: what a person stops today and goes on with tomorrow."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from kvplane.errors import ArgumentError, PackCorrupt, SessionNotFound, StorageMissing
from kvplane.pack.chain import ID_NBYTES, Aux, Chain, packed_ids
from kvplane.pack.documents import SavedSession
from kvplane.pack.encoding import is_text
from kvplane.pack.fingerprint import Fingerprint
from kvplane.pack.geometries import geometry_fields
from kvplane.pack.inputs import ordered
from kvplane.pack.lease import Lease
from kvplane.pack.limits import BLOCK, DOCUMENT_NBYTES
from kvplane.pack.reader import Loaded, load_state
from kvplane.pack.root import open_root
from kvplane.pack.source import RowSource
from kvplane.pack.writer import Codec, Written, check_present, state_at
from kvplane.session import Session
from kvplane.storage import Storage
from kvplane.store import KVStore

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}", re.ASCII)
BAD_ENDINGS = (".json", ".lock", ".tmp")


def check_session_name(name: str) -> str:
    """The name, once it can be one: ArgumentError."""
    if not NAME.fullmatch(name) or name.endswith(BAD_ENDINGS):
        expected = "a-z, 0-9, '.', '_', '-', at most 100, beginning with a letter or digit"
        raise ArgumentError(argument="name", expected=expected, got=name)
    return name


def session_file(name: str) -> str:
    """The file of a saved session."""
    return f"sessions/{check_session_name(name)}.json"


def session_names(storage: Storage) -> list[str]:
    """The names of all saved sessions."""
    files = storage.list("sessions")
    return [
        file.removeprefix("sessions/").removesuffix(".json")
        for file in files
        if file.endswith(".json")
    ]


def save(
    root: str | os.PathLike[str] | Storage,
    name: str,
    session: Session,
    fingerprint: Fingerprint,
    *,
    tokens: Sequence[int] | None = None,
    aux: Sequence[Aux] = (),
    states: Mapping[str, Tensor] | None = None,
    sequence: int = 0,
    padding: int = 0,
    tokenizer: str | None = None,
    template: str | None = None,
    codec: Codec = Codec.RAW,
) -> Written:
    """Save a session in a root, which is made where there is none, against other writers.

    As `save_session`, with the name's lock held meanwhile.

    Raises:
        SessionLocked: another process writes this session. Nothing was written.
    """
    storage = open_root(root, create=True)
    with storage.lock(check_session_name(name)):
        return save_session(
            storage,
            name,
            session,
            fingerprint,
            tokens=tokens,
            aux=aux,
            states=states,
            sequence=sequence,
            padding=padding,
            tokenizer=tokenizer,
            template=template,
            codec=codec,
        )


def load(
    root: str | os.PathLike[str] | Storage,
    name: str,
    store: KVStore,
    fingerprint: Fingerprint | None = None,
    *,
    remember: bool = True,
) -> tuple[SavedSession, Loaded]:
    """A saved session of a root in a store: as `load_session`."""
    return load_session(open_root(root), name, store, fingerprint, remember=remember)


def save_session(
    storage: Storage,
    name: str,
    session: Session,
    fingerprint: Fingerprint,
    *,
    tokens: Sequence[int] | None = None,
    aux: Sequence[Aux] = (),
    states: Mapping[str, Tensor] | None = None,
    sequence: int = 0,
    padding: int = 0,
    tokenizer: str | None = None,
    template: str | None = None,
    codec: Codec = Codec.RAW,
) -> Written:
    """Save a session under a name; an older one of that name is replaced at one instant.

    Args:
        storage: an opened root; the caller holds the name's lock when others may write it.
        name: the session's.
        session: with no step open. Only rows that no blob holds yet are written.
        fingerprint: of the model that made the rows.
        tokens: ids, of the whole session; None takes those that it remembers.
        aux: other inputs than tokens.
        states: of recurrent and convolution layers.
        sequence: which one of a batch.
        padding: of that sequence, in front: its rows are left out, positions begin behind them.
        tokenizer: recorded, and only warned about when it differs.
        template: likewise.
        codec: of the blobs of rows that are written.

    Raises:
        ArgumentError: a name that cannot be one, or ids that are not one a position.
        PackMismatch: the session has other layer groups than the fingerprint.
        StepOpen, SessionClosed, SessionBusy: the session is in use.
        PackTooLarge: more than a document holds.
        StorageError: something could not be written; the older session is still there.
    """
    file = session_file(name)
    for argument, said in (("tokenizer", tokenizer), ("template", template)):
        if said is not None and not is_text(said):
            raise ArgumentError(argument=argument, expected="text in UTF-8", got=said)
    with session.guard, Lease(storage) as lease:
        session.check_open()
        session.check_idle()
        fingerprint.check_groups(session.groups)
        source = RowSource(session, sequence=sequence, padding=padding)
        ids = _ids(source, sequence, tokens)
        begin = session.first_position
        held = ordered(aux, below=source.position)

        def put() -> tuple[SavedSession, Written]:
            state, written = state_at(
                source,
                storage,
                lease,
                fingerprint=fingerprint.hex,
                position=source.position,
                firsts={group.id: source.first_held(group) for group in session.groups},
                states=states,
                codec=codec,
            )
            saved = SavedSession(
                state=state,
                name=name,
                cursors={group.id: source.cursor(group) for group in session.groups},
                parts=fingerprint.parts,
                geometry=geometry_fields(session.geometry),
                chain=None if ids is None or begin else _chain(fingerprint.hex, ids, held),
                ids=ids,
                aux=held,
                tokenizer=tokenizer,
                template=template,
            )
            storage.replace(file, saved.encoded())
            return saved, written

        saved, written = put()
        if check_present(storage, saved.state):
            # somebody swept a blob between its naming and this: put it again from the rows
            _, again = put()
            written.add(again)
        return written


def _ids(source: RowSource, sequence: int, tokens: Sequence[int] | None) -> bytes | None:
    """The packed ids of a sequence behind its padding: ArgumentError when not one a position."""
    session = source.session
    known = None
    if session.ids is not None:
        count = session.position - session.first_position
        known = session.ids[sequence][source.padding : count]
    ids = known if tokens is None else tokens
    if ids is None:
        return None
    count = source.position - session.first_position
    if len(ids) != count:
        raise ArgumentError(argument="tokens", expected=f"{count} ids", got=len(ids))
    packed = packed_ids(ids)
    if known is not None and packed != packed_ids(known):
        expected = "the ids that the session remembers"
        raise ArgumentError(argument="tokens", expected=expected, got="others")
    return packed


def _chain(fingerprint: str, ids: bytes, aux: Sequence[Aux]) -> str:
    chain = Chain.packed(fingerprint, ids, aux=aux)
    return chain.at(len(ids) // ID_NBYTES // BLOCK)


def read_session(storage: Storage, name: str) -> SavedSession:
    """What a saved session says; its blobs are not looked at.

    Raises:
        SessionNotFound: none of that name; the nearest are named.
        PackCorrupt, PackVersion, PackTooLarge: the file is not one.
    """
    file = session_file(name)
    try:
        data = storage.read(file, limit=DOCUMENT_NBYTES)
    except StorageMissing:
        raise _not_found(storage, name) from None
    path = f"{storage.location}/{file}"
    saved = SavedSession.decoded(data, path)
    if saved.name != name:
        raise PackCorrupt(path=path, what=f"says that it is session {saved.name[:100]!r}")
    if saved.ids is not None and saved.chain is not None:
        chain = _chain(saved.state.fingerprint, saved.ids, saved.aux)
        if chain != saved.chain:
            raise PackCorrupt(path=path, what="its chain is not that of its tokens")
    return saved


def load_session(
    storage: Storage,
    name: str,
    store: KVStore,
    fingerprint: Fingerprint | None = None,
    *,
    remember: bool = True,
) -> tuple[SavedSession, Loaded]:
    """A saved session in a store: every live row, both origins, ids and position.

    Args:
        storage: an opened root.
        name: the session's.
        store: of the same geometry and dtype.
        fingerprint: of the model that will go on; None when the caller vouches for it.
        remember: whether the session remembers its ids, and so wants those of every step.

    Raises:
        PackMismatch: another model's; names the part that differs. Nothing was made.
        SessionNotFound, PackMissing, PackCorrupt, PackVersion, PackTooLarge: nothing was made.
        SnapshotMismatch, LimitReached, MemoryUnavailable: as `KVStore.builder`.
    """
    saved = read_session(storage, name)
    if fingerprint is not None:
        fingerprint.check(saved.parts)
    Fingerprint(saved.parts).check_groups(store.geometry.groups)
    loaded = load_state(
        storage,
        saved.state,
        store,
        cursors=saved.cursors,
        first_position=saved.first_position,
        tokens=saved.tokens if remember else None,
        needed_by=f"session {name}",
    )
    return saved, loaded


def remove_session(storage: Storage, name: str) -> None:
    """Forget a saved session; its blobs stay until they are swept: SessionNotFound."""
    file = session_file(name)
    if not storage.exists(file):
        raise _not_found(storage, name)
    storage.delete(file)


def _not_found(storage: Storage, name: str) -> SessionNotFound:
    nearest = difflib.get_close_matches(name, session_names(storage), n=3)
    return SessionNotFound(name=name, nearest=nearest)
