"""Which session or cut a person means: a name in a root, or the path of its file.

notes                              a session that `kvplane run` keeps, or of --root
packs/sessions/notes.json          the same of another root, as a shell completes it
cuts/FINGERPRINT/CHAIN/CUT.json    a cut, as `kvplane pack ls --cuts` prints it
packs/cuts/...                     the same of another root
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvplane.errors import ArgumentError
from kvplane.home import home

_FILE = re.compile(
    r"(?:(?P<root>.*)/)?"
    r"(?:sessions/(?P<session>[^/]+)\.json|(?P<cut>cuts/[^/]+/[^/]+/[^/]+\.json))"
)


class Where(NamedTuple):
    """A session or cut, and the root it is in."""

    root: str | Path
    name: str


def root_of(root: str | None) -> str | Path:
    """The root that a command was given, or the one that `kvplane run` keeps."""
    return home() if root is None else root


def where(name: str, root: str | None) -> Where:
    """What a person means by `name`, beside the `--root` they gave, if any.

    Raises:
        ArgumentError: a path, and a root as well.
    """
    found = _FILE.fullmatch(name)
    if found is None:
        return Where(root_of(root), name)
    inside = found["cut"] or found["session"]
    if found["root"] is None and found["cut"]:
        return Where(root_of(root), inside)
    if root is not None:
        raise ArgumentError(argument="name", expected="a name, or a path without --root", got=name)
    # "" is what stands before the first slash of an absolute path
    return Where({None: ".", "": "/"}.get(found["root"], found["root"]), inside)


def where_all(names: Sequence[str], root: str | None) -> tuple[str | Path, list[str]]:
    """One root, and the names in it.

    Raises:
        ArgumentError: they are in several roots; or as `where`.
    """
    found = [where(name, root) for name in names]
    roots = list(dict.fromkeys(each.root for each in found))
    if len(roots) > 1:
        raise ArgumentError(argument="names", expected="all in one root", got=roots)
    return roots[0] if roots else root_of(root), list(dict.fromkeys(each.name for each in found))
