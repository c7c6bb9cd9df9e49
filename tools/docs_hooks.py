"""What mkdocs asks for while it builds: the commands' own help, so that it cannot drift."""

import contextlib
import io
import os
from unittest import mock

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put every command's help where a page asks for it."""
    return markdown.replace(MARK, helps()) if MARK in markdown else markdown


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
