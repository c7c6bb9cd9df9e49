"""What `make check` asks of the documents: every link and image of ours leads somewhere.

Nothing is fetched: addresses of others are only looked at for their shape.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")


def documents() -> list[Path]:
    """The README and its like, and every page."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(path: Path) -> set[str]:
    """What a page's headings can be linked by, as mkdocs and GitHub name them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+ (.+?)\s*#*$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        found.add(re.sub(r"\s", "-", plain))
        found.add(re.sub(r"[-\s]+", "-", plain))
    return found


def broken(path: Path) -> Iterator[str]:
    """Every link of a page that leads nowhere, and why."""
    text = CODE.sub("", FENCE.sub("", path.read_text(encoding="utf-8")))
    for link in LINK.findall(text):
        if re.match(r"https://[\w.-]+(/\S*)?$", link) or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = path if not name else (path.parent / name).resolve()
        if ":" in name or not target.exists():
            yield f"{path.relative_to(ROOT)}: {link} leads nowhere"
        elif anchor and anchor not in anchors(target):
            yield f"{path.relative_to(ROOT)}: {link}: no such heading"


def main() -> int:
    """Print every finding; whether there was one is the exit status."""
    findings = [finding for path in documents() for finding in broken(path)]
    for finding in findings:
        print(finding)
    return min(len(findings), 1)


if __name__ == "__main__":
    sys.exit(main())
