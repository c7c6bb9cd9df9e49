"""`kvplane pack gc`: delete what nothing names, and keep to a budget."""

import json
import re
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from kvplane.cli.output import console, human
from kvplane.cli.where import root_of
from kvplane.cli.working import working
from kvplane.errors import ArgumentError
from kvplane.pack import open_root
from kvplane.pack.sweep import Swept, sweep

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]i?)?b?", re.IGNORECASE)


def gc(
    *,
    root: str | None = None,
    budget: str | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Delete rows that no session and no cut names; with a budget, also cuts used longest ago.

    What a session names is never deleted. Safe while others save and load.

    Example: kvplane pack gc --budget 20GB --dry-run

    Args:
        root: The root; by default what kvplane run keeps.
        budget: Bytes to keep to, such as 500MB or 20GiB.
        dry_run: Delete nothing; say what would be.
        as_json: Print JSON.
    """
    nbytes = None if budget is None else size_of(budget)
    with working("looking at what is named"):
        swept = sweep(open_root(root_of(root)), budget_nbytes=nbytes, dry_run=dry_run)
    if as_json:
        print(json.dumps(asdict(swept)))  # noqa: T201
        return
    _print(swept, dry_run=dry_run)


def size_of(text: str) -> int:
    """Bytes of what a person wrote, 1 GB = 1e9: ArgumentError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ArgumentError(argument="budget", expected="bytes, such as 500MB or 20GiB", got=text)
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()])


def _print(swept: Swept, *, dry_run: bool) -> None:
    out = console()
    verb = "would delete" if dry_run else "deleted"
    parts = [
        f"{len(files):,} {what}"
        for files, what in (
            (swept.blobs, "blobs"),
            (swept.cuts, "cuts"),
            (swept.nodes, "nodes"),
            (swept.leases, "leases"),
        )
        if files
    ]
    out.print(f"{verb} {', '.join(parts) or 'nothing'}: {human(swept.nbytes)}")
    out.print(f"left: {human(swept.left_nbytes)}")
    if swept.young:
        out.print(f"{swept.young:,} blobs that nothing names are too new to be deleted")
    if swept.busy:
        out.print("somebody is at work here: blobs that nothing names were kept")
    for file in swept.unreadable:
        out.print(f"{file} cannot be read and may name anything: no blob was deleted")
