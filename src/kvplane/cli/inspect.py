"""`kvplane inspect`: a saved session or a cut, as a page to look at or in brief."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from kvplane.cli.output import console, human, print_table
from kvplane.cli.where import where
from kvplane.errors import ArgumentError, StorageError
from kvplane.inspect import Inspection, found, inspected, page, words
from kvplane.pack import open_root, session_names
from kvplane.pack.inventory import Document
from kvplane.storage import Storage

DAMAGED = 1
SHOWN_PROGRESS = 256 << 20


def inspect(
    name: str,
    /,
    *,
    root: str | None = None,
    out: Path | None = None,
    text: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Write a page about a saved session or a cut: rings, plan, blocks, norms, who made it.

    Every blob is read and verified on the way; memory does not grow with the session. The page is
    one file that loads nothing. Exits with 1 when something is broken; the page is there all the
    same.

    Example: kvplane inspect notes --out notes.html

    Args:
        name: A session's, its file, a cut's file as `kvplane pack ls --cuts` prints it, or a root
            with one session.
        root: The root; by default what kvplane run keeps.
        out: The page; by default its name and .html, here.
        text: Print it in brief instead.
    """
    storage, one = _document(name, root)
    looked = _with_progress(storage, one)
    if text:
        _print(looked)
    else:
        path = out or Path(f"{name.rstrip('/').rsplit('/', 1)[-1].removesuffix('.json')}.html")
        _write(path, page(looked))
        Console(stderr=True, highlight=False).print(f"written: {path}", soft_wrap=True)
    if looked.num_problems:
        raise SystemExit(DAMAGED)


def _document(name: str, root: str | None) -> tuple[Storage, Document]:
    if root is None and Path(name, "root.json").is_file():
        storage = open_root(name)
        names = session_names(storage)
        if len(names) != 1:
            expected = f"one of its sessions, with --root {name}: {', '.join(names[:8])}"
            raise ArgumentError(argument="name", expected=expected, got=name)
        return storage, found(storage, names[0])
    place = where(name, root)
    storage = open_root(place.root)
    return storage, found(storage, place.name)


def _with_progress(storage: Storage, one: Document) -> Inspection:
    notes = Console(stderr=True)
    if not notes.is_terminal:
        return inspected(storage, one)
    columns = TextColumn("reading"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("reading", total=None)
        return inspected(storage, one, progress=lambda nbytes: bar.advance(task, nbytes))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(path=str(path), what=error.strerror or str(error)) from error


def _print(looked: Inspection) -> None:
    out = console()
    good, verdict = words.state_of(looked)
    out.print(words.title_of(looked), style="bold", markup=False, soft_wrap=True)
    out.print(verdict, style="green" if good else "red")
    for problem in looked.problems:
        out.print(f"  {problem}", markup=False, soft_wrap=True)
    for name, said in words.facts_of(looked):
        out.print(f"{name}: {said}", markup=False, soft_wrap=True)
    out.print()
    rows = []
    for part in looked.groups:
        _, length, origin_logical, origin_physical = part.cursor
        rows.append(
            [
                part.group.id,
                f"[{origin_logical:,}, {origin_logical + length:,})",
                f"{length:,} of {part.cursor[0]:,}",
                f"{origin_physical:,}" if part.group.is_sliding else "",
                f"{part.wraps:,}" if part.group.is_sliding else "",
                human(part.held),
                "yes" if part.held == part.planned else f"no: {human(part.planned)}",
            ]
        )
    header = ["", "positions", "rows", "oldest in row", "wraps", "held", "as planned"]
    print_table(out, "", header, rows)
    sharing = looked.sharing
    for sharer in sharing.sharers[:8]:
        out.print(
            f"shares {sharer.num_blobs:,} blobs, {human(sharer.nbytes)}, with {sharer.kind} "
            f"{sharer.name}",
            markup=False,
            soft_wrap=True,
        )
    for run, facts in words.provenance_of(looked):
        said = ", ".join(f"{name} {value}" for name, value in facts)
        out.print(f"{run}: {said}", markup=False, soft_wrap=True)
    read = human(looked.nbytes)
    out.print(f"{looked.num_blobs:,} blobs, {read} read in {looked.seconds:.1f} s")
