"""The text glimmer-nano learns from: one file of bytes, and a manifest that says what is where.

Three Debian packages, all under the PSF licence: the plain sources of Python's documentation, and
the docstrings of its standard library. A file whose bytes are already there is dropped before
anything is split. The split is by whole file and by a hash of its name, so it does not depend on
the order of a directory. What a held-out or validation file says is then removed from the training
text, paragraph by paragraph, so that the held-out figure measures prediction and not memory.
"""

import ast
import hashlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

DOCUMENTATION = "python3.11-doc"
LIBRARY = ("libpython3.11-minimal", "libpython3.11-stdlib")
# pydoc's topics are the reference manual again; lib2to3 is a grammar with hardly a sentence
UNREAD_FOLDERS = frozenset({"pydoc_data", "lib2to3"})
SALT = "glimmer-nano split 1"
HELDOUT_NBYTES = 290_000
VALIDATION_NBYTES = 400_000
# neither a stub nor a large part of the held-out text
SPLIT_FILE_NBYTES = range(4_096, 60_000)
SEEN_LINE_NBYTES = 40
SHARED_PARAGRAPH_NBYTES = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text and the part of the corpus it belongs to."""

    name: str
    source: str
    split: str
    text: bytes


def prepare(folder: Path, *, packages: Path | None = None) -> None:
    """Write `corpus.bin` and `manifest.json` into `folder`.

    Args:
        folder: Where they go; made if it is not there.
        packages: A folder that holds the three `.deb` files. Without one they are fetched with
            `apt-get download` into `folder/packages`.

    Raises:
        FileNotFoundError: A package is missing. Nothing is written.
    """
    if packages is None:
        packages = folder / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["apt-get", "download", DOCUMENTATION, *LIBRARY],  # noqa: S607
            check=True,
            cwd=packages,
        )
    archives = {name: _archive(packages, name) for name in (DOCUMENTATION, *LIBRARY)}
    with TemporaryDirectory() as scratch:
        roots = {
            name: _unpacked(archive, Path(scratch) / name) for name, archive in archives.items()
        }
        manuals, repeats = _split(_manual_files(roots[DOCUMENTATION]))
        docstrings = [
            document
            for name in LIBRARY
            for document in _docstring_documents(roots[name], source=name)
        ]
    documents, nbytes_removed = _without_shared_paragraphs(manuals + docstrings)
    manifest = {
        "packages": {
            name: {"file": archive.name, "sha256": _sha256(archive.read_bytes())}
            for name, archive in archives.items()
        },
        "repeats_dropped": repeats,
        "training_nbytes_removed_as_shared": nbytes_removed,
        "heldout_nbytes_in_lines_seen": _nbytes_in_lines_seen(documents),
        **_write(folder, documents),
    }
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8")


def documents_of(folder: Path, split: str) -> list[tuple[str, bytes]]:
    """The names and bytes of one split ("train", "validation" or "heldout"), in corpus order."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    corpus = (folder / "corpus.bin").read_bytes()
    if _sha256(corpus) != manifest["sha256"]:
        raise ValueError(f"{folder / 'corpus.bin'} is not the file its manifest describes")
    return [
        (entry["name"], corpus[entry["first"] : entry["stop"]])
        for entry in manifest["documents"]
        if entry["split"] == split
    ]


def _archive(packages: Path, name: str) -> Path:
    found = sorted(packages.glob(f"{name}_*.deb"))
    if not found:
        raise FileNotFoundError(f"{packages} holds no {name}_*.deb")
    return found[-1]


def _unpacked(archive: Path, root: Path) -> Path:
    root.mkdir()
    subprocess.run(["dpkg", "-x", archive, root], check=True)  # noqa: S607
    return root


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _manual_files(root: Path) -> list[tuple[str, bytes]]:
    """The manual's sources by name, each file once under each path the package has it at."""
    files = [path for path in root.rglob("*.rst.txt") if path.is_file()]
    return sorted((str(path).split("_sources/")[-1], path.read_bytes()) for path in files)


def _split(files: list[tuple[str, bytes]]) -> tuple[list[Document], int]:
    """Documents with their split, and how many files repeated another's bytes."""
    distinct: dict[str, tuple[str, bytes]] = {}
    for name, text in files:
        distinct.setdefault(_sha256(text), (name, text))
    drawn = sorted(distinct.values(), key=lambda file: _sha256(f"{SALT} {file[0]}".encode()))
    room = {"heldout": HELDOUT_NBYTES, "validation": VALIDATION_NBYTES}
    documents = []
    for name, text in drawn:
        fits = (part for part, left in room.items() if len(text) <= left)
        split = next(fits, "train") if len(text) in SPLIT_FILE_NBYTES else "train"
        if split in room:
            room[split] -= len(text)
        documents.append(Document(name=name, source=DOCUMENTATION, split=split, text=text))
    return sorted(documents, key=lambda document: document.name), len(files) - len(distinct)


def _docstring_documents(root: Path, *, source: str) -> Iterator[Document]:
    library = root / "usr/lib/python3.11"
    for path in sorted(library.rglob("*.py")):
        name = str(path.relative_to(library))
        if path.is_symlink() or UNREAD_FOLDERS & set(path.parts):
            continue
        text = "\n\n".join(_entries(ast.parse(path.read_bytes()), name))
        if text:
            yield Document(name=name, source=source, split="train", text=(text + "\n").encode())


def _entries(tree: ast.Module, name: str) -> Iterator[str]:
    """Each docstring as the manual would set it: a directive, then the text indented."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module):
            directive = f".. module:: {name.removesuffix('.py').replace('/', '.')}"
        elif isinstance(node, ast.ClassDef):
            directive = f".. class:: {node.name}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            directive = f".. function:: {node.name}({ast.unparse(node.args)})"
        else:
            continue
        if docstring := ast.get_docstring(node):
            lines = (f"   {line}".rstrip() for line in docstring.splitlines())
            yield directive + "\n\n" + "\n".join(lines)


def _without_shared_paragraphs(documents: list[Document]) -> tuple[list[Document], int]:
    """Training documents without the long paragraphs that a held-out file has too."""
    kept_apart = {
        _folded(paragraph)
        for document in documents
        if document.split != "train"
        for paragraph in document.text.split(b"\n\n")
        if len(_folded(paragraph)) >= SHARED_PARAGRAPH_NBYTES
    }
    cleaned, nbytes_removed = [], 0
    for document in documents:
        if document.split != "train":
            cleaned.append(document)
            continue
        paragraphs = document.text.split(b"\n\n")
        text = b"\n\n".join(p for p in paragraphs if _folded(p) not in kept_apart)
        nbytes_removed += len(document.text) - len(text)
        cleaned.append(
            Document(name=document.name, source=document.source, split="train", text=text)
        )
    return cleaned, nbytes_removed


def _nbytes_in_lines_seen(documents: list[Document]) -> int:
    """How much of the held-out text stands in lines that the training text still has."""
    seen: set[bytes] = set()
    for document in documents:
        if document.split == "train":
            seen.update(line.strip() for line in document.text.split(b"\n"))
    return sum(
        len(line)
        for document in documents
        if document.split == "heldout"
        for line in document.text.split(b"\n")
        if len(line.strip()) >= SEEN_LINE_NBYTES and line.strip() in seen
    )


def _folded(paragraph: bytes) -> bytes:
    return b" ".join(paragraph.split())


def _write(folder: Path, documents: list[Document]) -> dict[str, object]:
    entries: list[dict[str, object]] = []
    nbytes = {"train": 0, "validation": 0, "heldout": 0}
    corpus = bytearray()
    for document in documents:
        first = len(corpus)
        corpus += document.text
        nbytes[document.split] += len(document.text)
        entries.append(
            {
                "name": document.name,
                "source": document.source,
                "split": document.split,
                "first": first,
                "stop": len(corpus),
                "sha256": _sha256(document.text),
            }
        )
    (folder / "corpus.bin").write_bytes(corpus)
    return {"sha256": _sha256(bytes(corpus)), "nbytes": nbytes, "documents": entries}
