"""What mkdocs asks for while it builds: what would drift, were it written down."""

import contextlib
import io
import os
from pathlib import Path
from unittest import mock

BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put commands' help, and the list of pages that benches wrote, where a page asks for them."""
    for mark, make in (("<!-- commands -->", helps), ("<!-- benchmarks -->", pages)):
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def pages(folder: Path = BENCHMARKS) -> str:
    """Every page that a bench wrote, by its title, as a Markdown list."""
    lines = []
    for path in sorted(folder.glob("*.md")):
        if path.name != "index.md":
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            lines.append(f"* [{title}]({path.name})")
    return "\n".join(lines)


def helps() -> str:
    """Every command and what its `--help` prints, as Markdown."""
    from kvplane.cli import COMMANDS, GROUPS, main  # noqa: PLC0415 - only for that page

    paths = [[name] for name, _, _ in COMMANDS]
    paths += [[group, name] for group, _, commands in GROUPS for name, _, _ in commands]
    parts = []
    with mock.patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"}):
        for path in sorted(paths):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                main([*path, "--help"])
            parts.append(
                f"## kvplane {' '.join(path)}\n\n```text\n{printed.getvalue().strip()}\n```\n"
            )
    return "\n".join(parts)
