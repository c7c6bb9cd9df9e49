"""`kvplane pack ls|show|du|rm`: what lies in a root of packs."""

import difflib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from kvplane.cli.output import console, human, print_table
from kvplane.cli.where import root_of, where, where_all
from kvplane.errors import ArgumentError, SessionNotFound, StorageMissing
from kvplane.pack import open_root, read_session
from kvplane.pack.documents import Cut, SavedSession
from kvplane.pack.inventory import Kind, documents, kind_of, read_cut
from kvplane.pack.sessions import session_file, session_names
from kvplane.pack.usage import Share, usage
from kvplane.storage import Storage

AsJson = Annotated[bool, Parameter(name="--json", negative="")]


def ls(*, root: str | None = None, cuts: bool = False, as_json: AsJson = False) -> None:
    """List the sessions and cuts of a root.

    Example: kvplane pack ls --root packs --cuts

    Args:
        root: The root; by default what kvplane run keeps.
        cuts: List every cut, not only how many there are.
        as_json: Print JSON.
    """
    storage = open_root(root_of(root))
    shares = {(share.kind, share.name): share for share in usage(storage).shares}
    rows = [
        _line(storage, one.kind, one.name, one.content, one.error, shares)
        for one in documents(storage)
    ]
    if as_json:
        print(json.dumps(rows))  # noqa: T201
        return
    out = console()
    for kind, title in ((Kind.SESSION, "sessions"), (Kind.CUT, "cuts")):
        lines = [row for row in rows if row["kind"] == kind.name.lower()]
        if kind is Kind.CUT and not cuts:
            models = {row["name"].split("/")[1] for row in lines}
            out.print(f"{len(lines)} cuts of {len(models)} models")
        elif lines:
            header = ["", "tokens", "bytes", "its own", "saved (UTC)"]
            print_table(out, title, header, [_cells(row) for row in lines])


def _line(
    storage: Storage,
    kind: Kind,
    name: str,
    content: Cut | SavedSession | None,
    error: Exception | None,
    shares: Mapping[tuple[Kind, str], Share],
) -> dict[str, Any]:
    share = shares.get((kind, name))
    file = name if kind is Kind.CUT else session_file(name)
    return {
        "kind": kind.name.lower(),
        "name": name,
        "position": None if content is None else content.state.position,
        "nbytes": None if share is None else share.nbytes,
        "own_nbytes": None if share is None else share.own_nbytes,
        "saved": datetime.fromtimestamp(storage.modified(file), tz=UTC).isoformat("T", "seconds"),
        "error": None if error is None else str(error),
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [row["name"], "damaged", "", "", row["saved"][:16].replace("T", " ")]
    return [
        row["name"],
        f"{row['position']:,}",
        human(row["nbytes"]),
        human(row["own_nbytes"]),
        row["saved"][:16].replace("T", " "),
    ]


def show(name: str, /, *, root: str | None = None, as_json: AsJson = False) -> None:
    """Say what a saved session or a cut holds, and who made its rows.

    Example: kvplane pack show notes

    Args:
        name: A session's, a cut's file as `kvplane pack ls --cuts` prints it, or a path of either.
        root: The root; by default what kvplane run keeps.
        as_json: Print JSON.
    """
    place = where(name, root)
    content = find(open_root(place.root), place.name)
    facts = _facts(content)
    if as_json:
        print(json.dumps(facts))  # noqa: T201
        return
    out = console()
    out.print(f"{name}: {facts['position']:,} tokens, the first {facts['canonical']:,} canonical")
    out.print(f"fingerprint {facts['fingerprint']}")
    for field in ("weights", "tokenizer", "template"):
        if facts.get(field) is not None:
            out.print(f"{field} {facts[field]}")
    rows = [
        [
            group,
            f"[{rows['first']:,}, {facts['position']:,})",
            f"{rows['num_blobs']:,}",
            "" if rows["cursor"] is None else f"{rows['cursor']['capacity']:,}",
            "" if rows["cursor"] is None else f"{rows['cursor']['origin_physical']:,}",
        ]
        for group, rows in facts["groups"].items()
    ]
    print_table(out, "", ["", "positions", "blobs", "capacity", "oldest in row"], rows)
    for stop, numerics in facts["numerics"]:
        out.print(f"rows up to {stop:,} by {numerics}")


def find(storage: Storage, name: str) -> SavedSession | Cut:
    """A session by its name, or a cut by its file.

    Raises:
        SessionNotFound: neither; the nearest names are in it.
        PackCorrupt, PackVersion, PackTooLarge: the file is not one.
    """
    if kind_of(name) is not Kind.CUT:
        return read_session(storage, name)
    try:
        return read_cut(storage, name)
    except StorageMissing:
        raise SessionNotFound(name=name, nearest=[]) from None


def _facts(content: SavedSession | Cut) -> dict[str, Any]:
    state = content.state
    facts: dict[str, Any] = {
        "position": state.position,
        "canonical": state.canonical,
        "fingerprint": state.fingerprint,
        "states": state.states,
        "numerics": [[stop, dict(numerics)] for stop, numerics in state.numerics],
        "groups": {
            group: {
                "first": rows.first,
                "num_spans": len(rows.spans),
                "num_blobs": len({span.blob for span in rows.spans}),
                "cursor": None,
            }
            for group, rows in state.groups.items()
        },
    }
    if isinstance(content, SavedSession):
        names = ("capacity", "length", "origin_logical", "origin_physical")
        for group, cursor in content.cursors.items():
            facts["groups"][group]["cursor"] = dict(zip(names, cursor, strict=True))
        facts |= {
            "weights": content.parts.get("weights"),
            "tokenizer": content.tokenizer,
            "template": content.template,
            "num_tokens": None if content.tokens is None else len(content.tokens),
        }
    return facts


def du(*names: str, root: str | None = None, cuts: bool = False, as_json: AsJson = False) -> None:
    """Say where the bytes of a root are, and what removing a session would free.

    Example: kvplane pack du

    Args:
        names: Sessions, cuts' files, or paths of them: a line for each, and no other.
        root: The root; by default what kvplane run keeps.
        cuts: A line for every cut, not only for sessions.
        as_json: Print JSON.
    """
    place, wanted = where_all(names, root)
    storage = open_root(place)
    for name in wanted:
        file_of(storage, name)
    found = usage(storage)
    shares = [
        share
        for share in found.shares
        if (share.name in wanted if wanted else cuts or share.kind is Kind.SESSION)
    ]
    if as_json:
        facts = {
            "nbytes": found.nbytes,
            "kinds": {kind.value: amount._asdict() for kind, amount in found.kinds.items()},
            "unnamed": found.unnamed._asdict(),
            "shares": [
                {"name": s.name, "nbytes": s.nbytes, "own_nbytes": s.own_nbytes} for s in shares
            ],
        }
        print(json.dumps(facts))  # noqa: T201
        return
    out = console()
    rows = [
        [kind.value, f"{amount.num_files:,}", human(amount.nbytes)]
        for kind, amount in found.kinds.items()
        if amount.num_files
    ]
    if found.unnamed.num_files:
        label = "blobs that nothing names"
        rows.append([label, f"{found.unnamed.num_files:,}", human(found.unnamed.nbytes)])
    print_table(out, f"{human(found.nbytes)} in all", ["", "files", "bytes"], rows)
    if shares:
        lines = [[s.name, human(s.nbytes), human(s.own_nbytes)] for s in shares]
        print_table(out, "", ["", "rows", "its own"], lines)


def rm(*names: str, root: str | None = None) -> None:
    """Forget sessions or cuts; their rows stay until a sweep, as others may need them.

    Example: kvplane pack rm notes old-notes

    Args:
        names: Sessions, files of cuts as `kvplane pack ls --cuts` prints them, or paths of either.
        root: The root; by default what kvplane run keeps.
    """
    if not names:
        raise ArgumentError(argument="names", expected="at least one", got="none")
    place, wanted = where_all(names, root)
    storage = open_root(place)
    with ExitStack() as held:
        # all or none: every name is there and nobody writes it before one is removed
        files = {name: _held(storage, name, held) for name in wanted}
        for file in files.values():
            storage.delete(file)
    notes = Console(stderr=True, highlight=False)
    for name in files:
        notes.print(f"removed {name}")


def _held(storage: Storage, name: str, held: ExitStack) -> str:
    file = file_of(storage, name)
    if file != name:
        held.enter_context(storage.lock(name))
    return file


def file_of(storage: Storage, name: str) -> str:
    """The file of a session or cut: SessionNotFound, with the nearest names."""
    file = name if kind_of(name) is Kind.CUT else session_file(name)
    if not storage.exists(file):
        nearest = difflib.get_close_matches(name, session_names(storage), n=3)
        raise SessionNotFound(name=name, nearest=nearest)
    return file
