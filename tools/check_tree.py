"""What `make check` asks of the tree beside the linters: file sizes, and what is banned where."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

LIMIT_LINES = 400


class Ban(NamedTuple):
    """A pattern, the files it is banned in, and why."""

    pattern: str
    where: str
    unless: str
    why: str


BANS = (
    Ban(r"^\s*assert ", r"^src/", r"^src/kvplane/testing/", "users get typed errors"),
    Ban(
        r"%\s*(self\.)?_?(capacity|window)\b",
        r"^src/",
        r"^src/kvplane/ring\.py$",
        "a row is never derived from an absolute position",
    ),
    Ban(
        r"torch\.empty\b",
        r"^src/kvplane/(plane|store|session|step)\.py$",
        r"^$",
        "zero-filled is the default; uninitialised memory is a named constructor",
    ),
    Ban(r"make_block_ptr|tl\.advance", r"^src/", r"^$", "address arithmetic is explicit int64"),
    Ban(
        r"\b(TODO|FIXME|XXX)\b",
        r"^(src|tests|tools)/",
        r"^tools/check_tree\.py$",
        "say when it ends",
    ),
    Ban(r"import pickle|pickle\.(load|dump)", r"^src/", r"^$", "no pickle anywhere"),
)


def main() -> int:
    """Print every finding; the number of them is the exit status."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
    )
    findings = []
    for name in listed.stdout.splitlines():
        path = Path(name)
        if not path.exists():
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > LIMIT_LINES:
            findings.append(f"{name}: {len(lines)} lines, the limit is {LIMIT_LINES}")
        for ban in BANS:
            if not re.search(ban.where, name) or re.search(ban.unless, name):
                continue
            findings += [
                f"{name}:{number}: {line.strip()} ({ban.why})"
                for number, line in enumerate(lines, 1)
                if re.search(ban.pattern, line)
            ]
    for finding in findings:
        print(finding)
    return min(len(findings), 1)


if __name__ == "__main__":
    sys.exit(main())
