"""`kvplane pack verify`: what is broken in a root, and what can still be used."""

import json
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from kvplane.cli.output import console, human
from kvplane.cli.pack import AsJson, file_of
from kvplane.cli.where import where_all
from kvplane.pack.inventory import Kind, kind_of
from kvplane.pack.verify import Report, Usable
from kvplane.pack.verify import verify as verified
from kvplane.storage import Storage, open_storage

DAMAGED = 1
SHOWN_REASONS = 4
SHOWN_PROGRESS = 256 << 20


def verify(*names: str, root: str | None = None, as_json: AsJson = False) -> None:
    """Read everything in a root: name what is broken and what can still be used.

    Changes nothing. Exits with 1 when something is broken.

    Example: kvplane pack verify --root packs

    Args:
        names: Sessions, cuts' files, or paths of them: only whether these can be resumed.
        root: The root; by default what kvplane run keeps.
        as_json: Print JSON.
    """
    place, wanted = where_all(names, root)
    storage = open_storage(place)
    for name in wanted:
        file_of(storage, name)
    report = _with_progress(storage)
    if wanted:
        # damage elsewhere is not what was asked about; what concerns these is in their reasons
        entries = [entry for entry in report.entries if entry.name in wanted]
        report = Report(entries=entries, num_blobs=report.num_blobs, nbytes=report.nbytes)
    if as_json:
        print(json.dumps(_facts(report)))  # noqa: T201
    else:
        _print(report)
    if not report.sound:
        raise SystemExit(DAMAGED)


def _with_progress(storage: Storage) -> Report:
    notes = Console(stderr=True)
    blobs = [file for file in storage.list("blobs") if kind_of(file) is Kind.BLOB]
    total = sum(storage.size(file) for file in blobs) if notes.is_terminal else 0
    if total < SHOWN_PROGRESS:
        return verified(storage)
    columns = TextColumn("verifying"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("verifying", total=total)
        return verified(storage, progress=lambda nbytes: bar.advance(task, nbytes))


def _print(report: Report) -> None:
    out = console()
    for problem in report.problems:
        out.print(f"broken: {problem.file}: {problem.what}", soft_wrap=True)
    for entry in report.entries:
        if not entry.usable:
            _print_unusable(entry)
    for file in report.foreign:
        out.print(f"not ours: {file}", soft_wrap=True)
    if report.unnamed:
        out.print(f"{len(report.unnamed)} blobs that nothing names: a sweep may take them")
    for kind, word in ((Kind.SESSION, "sessions"), (Kind.CUT, "cuts")):
        entries = [entry for entry in report.entries if entry.kind is kind]
        usable = sum(entry.usable for entry in entries)
        out.print(f"{usable} of {len(entries)} {word} can be resumed")
    unusable = sum(not entry.usable for entry in report.entries)
    broken = f"broken files: {len(report.problems)}, not resumable: {unusable}"
    end = "all is well" if report.sound else broken
    out.print(f"{report.num_blobs:,} blobs, {human(report.nbytes)} read: {end}")


def _print_unusable(entry: Usable) -> None:
    out = console()
    word = "session" if entry.kind is Kind.SESSION else "cut"
    at = "" if entry.position is None else f" at {entry.position:,}"
    out.print(f"{word} {entry.name}{at} cannot be resumed:", soft_wrap=True)
    for reason in entry.why_not[:SHOWN_REASONS]:
        out.print(f"  {reason}", soft_wrap=True)
    if len(entry.why_not) > SHOWN_REASONS:
        out.print(f"  and {len(entry.why_not) - SHOWN_REASONS} more")
    if entry.instead is not None:
        first, all_of_it = f"{entry.instead.position:,}", f"{entry.position:,}"
        out.print(f"  its first {first} of {all_of_it} tokens can, from {entry.instead.name}")


def _facts(report: Report) -> dict[str, Any]:
    return {
        "sound": report.sound,
        "problems": [problem._asdict() for problem in report.problems],
        "entries": [
            {
                "kind": entry.kind.name.lower(),
                "name": entry.name,
                "position": entry.position,
                "usable": entry.usable,
                "why_not": list(entry.why_not),
                "instead": None if entry.instead is None else entry.instead.name,
            }
            for entry in report.entries
        ],
        "unnamed": report.unnamed,
        "foreign": report.foreign,
        "num_blobs": report.num_blobs,
        "nbytes": report.nbytes,
    }
