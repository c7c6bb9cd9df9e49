"""`kvplane pack push|pull`: sessions from one root to another, a folder or an address."""

import json
import sys
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvplane.cli.output import console, human
from kvplane.cli.where import root_of
from kvplane.pack import open_root
from kvplane.pack.carry import Carried, carry
from kvplane.storage import Storage

AsJson = Annotated[bool, Parameter(name="--json", negative="")]
Flag = Annotated[bool, Parameter(negative="")]


def push(
    target: str,
    /,
    *names: str,
    root: str | None = None,
    cuts: Flag = False,
    replace: Flag = False,
    as_json: AsJson = False,
) -> None:
    """Copy sessions to another root; only what is not there is sent.

    Example: kvplane pack push s3://bucket/packs notes

    Args:
        target: The other root: a folder, or an address such as s3://bucket/packs; made if need be.
        names: Sessions, or cuts' files; none: every session.
        root: The root to copy from; by default what kvplane run keeps.
        cuts: Every cut too.
        replace: A session there that says something else is replaced.
        as_json: Print JSON.
    """
    source = open_root(root_of(root))
    _carried(source, open_root(target, create=True), names, cuts, replace, as_json)


def pull(
    source: str,
    /,
    *names: str,
    root: str | None = None,
    cuts: Flag = False,
    replace: Flag = False,
    as_json: AsJson = False,
) -> None:
    """Copy sessions from another root; only what is not here is fetched.

    Example: kvplane pack pull s3://bucket/packs notes

    Args:
        source: The other root: a folder, or an address such as s3://bucket/packs.
        names: Sessions, or cuts' files; none: every session.
        root: The root to copy to; by default what kvplane run keeps.
        cuts: Every cut too.
        replace: A session here that says something else is replaced.
        as_json: Print JSON.
    """
    target = open_root(root_of(root), create=True)
    _carried(open_root(source), target, names, cuts, replace, as_json)


def _carried(
    source: Storage,
    target: Storage,
    names: tuple[str, ...],
    cuts: bool,  # noqa: FBT001 - as the commands have them
    replace: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    notes = Console(stderr=True)
    columns = TextColumn("copying"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, console=notes, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("copying", total=None)
        carried = carry(
            source,
            target,
            names=names or None,
            cuts=cuts,
            replace=replace,
            progress=lambda nbytes: bar.advance(task, nbytes),
        )
    if as_json:
        print(json.dumps(_facts(carried)))  # noqa: T201
        return
    what = f"{len(carried.sessions)} sessions"
    if carried.cuts:
        what += f" and {len(carried.cuts)} cuts"
    console().print(
        f"{what}: {carried.blobs_sent:,} blobs copied ({human(carried.nbytes_sent)}), "
        f"{carried.blobs_there:,} were there"
    )


def _facts(carried: Carried) -> dict[str, object]:
    return {
        "sessions": list(carried.sessions),
        "cuts": list(carried.cuts),
        "blobs_sent": carried.blobs_sent,
        "nbytes_sent": carried.nbytes_sent,
        "blobs_there": carried.blobs_there,
    }
