"""What commands that send or receive share: who they are, and how they show what moves."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from kvplane.errors import ArgumentError

if TYPE_CHECKING:
    from kvplane.transfer.clock import Progress as Moved
    from kvplane.transfer.links import Identity

FILES = "--certificate, --key and --authority together, or none of them"


def identity_of(
    certificate: Path | None, key: Path | None, authority: Path | None
) -> "Identity | None":
    """The identity that three options name; None without any: ArgumentError."""
    from kvplane.transfer.links import Identity  # noqa: PLC0415 - torch, seconds

    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        given = [certificate, key, authority]
        raise ArgumentError(argument="identity", expected=FILES, got=[str(path) for path in given])
    return Identity(certificate=certificate, key=key, authority=authority)


def rate(nbytes: int, seconds: float) -> str:
    """Bytes a second, in units of 10^6."""
    return f"{nbytes / max(seconds, 1e-9) / 1e6:,.0f} MB/s"


@contextlib.contextmanager
def shown(notes: Console, what: str) -> Iterator["Moved | None"]:
    """A progress bar over segments, on a terminal."""
    if not notes.is_terminal:
        yield None
        return
    columns = TextColumn(what), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
