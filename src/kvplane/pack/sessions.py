"""Sessions saved under a name: what a person stops today and goes on with tomorrow."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvplane.errors import ArgumentError, PackCorrupt, SessionNotFound, StorageMissing
from kvplane.pack.chain import Aux, Chain
from kvplane.pack.documents import SavedSession
from kvplane.pack.fingerprint import Fingerprint
from kvplane.pack.limits import BLOCK, DOCUMENT_NBYTES
from kvplane.pack.reader import Loaded, load_state
from kvplane.pack.writer import RowSource, Written, check_present, state_at
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
    tokenizer: str | None = None,
    template: str | None = None,
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
        tokenizer: recorded, and only warned about when it differs.
        template: likewise.

    Raises:
        ArgumentError: a name that cannot be one, or more ids than positions.
        StorageError: something could not be written; the older session is still there.
    """
    file = session_file(name)
    if tokens is None and session.tokens is not None:
        ids = session.tokens
        tokens = ids if session.batch is None else ids[sequence]  # type: ignore[assignment]
    if tokens is not None and len(tokens) != session.position - session.first_position:
        raise ArgumentError(
            argument="tokens",
            expected=f"{session.position - session.first_position} ids",
            got=len(tokens),
        )
    firsts = {name: cursor.origin_logical for name, cursor in session.cursors.items()}
    chain = None
    if tokens is not None:
        chain = Chain(fingerprint.hex, tokens, aux=aux).at(len(tokens) // BLOCK)

    def state_of_session() -> tuple[SavedSession, Written]:
        state, written = state_at(
            session,
            storage,
            fingerprint=fingerprint.hex,
            position=session.position,
            firsts=firsts,
            source=RowSource(session, sequence=sequence),
            states=states,
        )
        saved = SavedSession(
            state=state,
            name=name,
            cursors={group: cursor.as_tuple() for group, cursor in session.cursors.items()},
            parts=fingerprint.parts,
            geometry=geometry_fields(session),
            chain=chain,
            tokens=None if tokens is None else tuple(tokens),
            aux=tuple(aux),
            tokenizer=tokenizer,
            template=template,
        )
        return saved, written

    saved, written = state_of_session()
    storage.replace(file, saved.encoded())
    if check_present(storage, saved.state):
        # somebody swept a blob between its naming and this: put it again from the rows
        saved, again = state_of_session()
        storage.replace(file, saved.encoded())
        written.blobs_written += again.blobs_written
        written.nbytes_written += again.nbytes_written
    return written


def geometry_fields(session: Session) -> dict[str, Any]:
    """The geometry as JSON without floats: what a reader needs to plan memory."""
    return {
        "dtype": session.geometry.dtype,
        "layers": [
            {
                "kind": layer.kind,
                "head_dim": layer.head_dim,
                "num_kv_heads": layer.num_kv_heads,
                "rotary": layer.rotary is not None,
                "shares_kv_with": layer.shares_kv_with,
                "sliding_window": layer.sliding_window,
                "value_head_dim": layer.value_head_dim,
            }
            for layer in session.geometry.layers
        ],
    }


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
        nearest = difflib.get_close_matches(name, session_names(storage), n=3)
        raise SessionNotFound(name=name, nearest=nearest) from None
    path = f"{storage.location}/{file}"
    saved = SavedSession.decoded(data, path)
    if saved.name != name:
        raise PackCorrupt(path=path, what=f"says that it is session {saved.name!r}")
    if saved.tokens is not None and saved.chain is not None:
        chain = Chain(saved.state.fingerprint, saved.tokens, aux=saved.aux)
        if chain.at(len(saved.tokens) // BLOCK) != saved.chain:
            raise PackCorrupt(path=path, what="its chain is not that of its tokens")
    if Fingerprint(saved.parts).hex != saved.state.fingerprint:
        raise PackCorrupt(path=path, what="its parts do not give its fingerprint")
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
    """
    saved = read_session(storage, name)
    if fingerprint is not None:
        fingerprint.check(saved.parts)
    loaded = load_state(
        storage,
        saved.state,
        store,
        cursors=saved.cursors,
        tokens=saved.tokens if remember else None,
        needed_by=f"session {name}",
    )
    return saved, loaded


def remove_session(storage: Storage, name: str) -> None:
    """Forget a saved session; its blobs stay until they are swept: SessionNotFound."""
    file = session_file(name)
    if not storage.exists(file):
        nearest = difflib.get_close_matches(name, session_names(storage), n=3)
        raise SessionNotFound(name=name, nearest=nearest)
    storage.delete(file)
