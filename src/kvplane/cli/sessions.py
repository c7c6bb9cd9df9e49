"""`kvplane sessions ls|show|rm|fork`: what `kvplane run --session` keeps."""

import dataclasses
from datetime import UTC, datetime

from rich.console import Console

from kvplane.cli.output import console, human, print_table
from kvplane.errors import ArgumentError, PackError
from kvplane.home import home
from kvplane.pack import open_root, read_session, remove_session, session_names
from kvplane.pack.blob import blob_name
from kvplane.pack.documents import SavedSession
from kvplane.pack.sessions import check_session_name, session_file
from kvplane.storage import Storage


def _root() -> Storage:
    return open_root(home(), create=True)


def _nbytes(storage: Storage, saved: SavedSession) -> int:
    names = map(blob_name, saved.state.blobs)
    return sum(storage.size(name) for name in names if storage.exists(name))


def ls() -> None:
    """List the saved sessions.

    Example: kvplane sessions ls
    """
    storage = _root()
    rows = []
    for name in session_names(storage):
        when = datetime.fromtimestamp(storage.modified(session_file(name)), tz=UTC)
        try:
            saved = read_session(storage, name)
        except PackError:
            # kvplane pack verify says what is wrong; the others can still be listed
            held = ["damaged", ""]
        else:
            held = [f"{saved.state.position:,}", human(_nbytes(storage, saved))]
        rows.append([name, *held, when.strftime("%Y-%m-%d %H:%M")])
    if not rows:
        console().print("no sessions yet: kvplane run --session NAME makes one")
        return
    print_table(console(), "", ["", "tokens", "bytes", "saved (UTC)"], rows)


def show(name: str, /) -> None:
    """Say what a saved session holds.

    Example: kvplane sessions show notes

    Args:
        name: The session's.
    """
    saved = read_session(_root(), name)
    out = console()
    out.print(f"session {name}: {saved.state.position:,} tokens, canonical {saved.state.canonical}")
    out.print(f"fingerprint {saved.state.fingerprint}")
    out.print(f"weights {saved.parts.get('weights')}")
    for group, cursor in saved.cursors.items():
        capacity, length, origin_logical, origin_physical = cursor
        live = f"[{origin_logical}, {origin_logical + length})"
        out.print(f"{group}: {live} of capacity {capacity}, oldest in row {origin_physical}")
    for stop, numerics in saved.state.numerics:
        out.print(f"rows up to {stop} by {dict(numerics)}")


def rm(name: str, /) -> None:
    """Forget a saved session.

    Example: kvplane sessions rm notes

    Args:
        name: The session's.
    """
    storage = _root()
    with storage.lock(check_session_name(name)):
        remove_session(storage, name)
    Console(stderr=True).print(f"removed session {name}")


def fork(name: str, copy: str, /) -> None:
    """Give a saved session a second name; both go on their own way, sharing what they have.

    Example: kvplane sessions fork notes other-ending

    Args:
        name: The session's.
        copy: The new name, which must be free.
    """
    storage = _root()
    saved = read_session(storage, name)
    with storage.lock(check_session_name(copy)):
        if copy in session_names(storage):
            raise ArgumentError(argument="copy", expected="a free name", got=copy)
        storage.replace(session_file(copy), dataclasses.replace(saved, name=copy).encoded())
    Console(stderr=True).print(f"{copy} is a fork of {name}")
