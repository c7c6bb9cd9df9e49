"""Every code block of the site and the README runs, and prints what the page says it prints.

    python     runs, with the blocks before it on the page; a `text` block right below is its output
    console    lines after "$ " run in the same folder; what stands below them is printed
    ...        in an output: anything
    sh, diff   of pages that other tests look after
    json       what the vLLM connector is told: its options take it

Names of files that a page speaks of exist.
"""

import contextlib
import io
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from kvplane import ModelGeometry, footprint
from kvplane.cli import main
from kvplane.integrations.vllm.options import ConnectorOptions

ROOT = Path(__file__).parents[1]
# the README's shape and this page's blocks are looked at by its own test; mutants are diffs
ELSEWHERE = {"transformers.md"}
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.name not in ELSEWHERE
]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# what only who works on kvplane needs
DEVELOPERS = {"browser", "dev", "docs", "fuzz"}
LANGUAGES = {"python", "console", "text", "sh", "diff", "json"}


def blocks(page):
    """The code blocks of a page: language, text, and the output that is promised, if any."""
    found = list(FENCE.finditer(page.read_text(encoding="utf-8")))
    for number, block in enumerate(found):
        after = found[number + 1] if number + 1 < len(found) else None
        said = None
        if after is not None and after[1] == "text" and not page_between(block, after):
            said = after[3]
        yield block[1], block[3], said


def page_between(block, after):
    return block.string[block.end() : after.start()].strip()


def runs(page):
    return any(language in {"python", "console"} for language, _, _ in blocks(page))


def matches(expected, printed):
    """Whether a text is what was promised; "..." stands for anything."""
    parts = [re.escape(part) for part in expected.rstrip().split("...")]
    return re.fullmatch(".*".join(parts), printed.rstrip(), re.DOTALL) is not None


def squeezed(text):
    return "\n".join(re.sub(r"\s+", " ", line).strip() for line in text.splitlines())


@pytest.mark.parametrize("page", [*filter(runs, PAGES)], ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVPLANE_HOME", str(tmp_path / "home"))
    facts = {"__name__": "page"}
    for language, text, said in blocks(page):
        if language == "python" and "--8<--" not in text:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, page.name, "exec"), facts)  # noqa: S102 - our own page

            assert said is None or matches(said, printed.getvalue()), printed.getvalue()
        elif language == "console":
            for command, expected in commands(text):
                printed = called(command)

                assert matches(squeezed(expected), squeezed(printed)), printed


def commands(text):
    """Each "$ " line, and the lines below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition("\n")
        yield line, expected


def called(line):
    """What a command prints."""
    name, *words = shlex.split(line)
    if name == "pip":
        assert words == ["install", "."]
        return ""
    assert "kvplane" == name
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert 0 == main(words)
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_page_has_no_block_that_nobody_runs(page):
    assert LANGUAGES >= {language for language, _, _ in blocks(page)}


def test_what_the_vllm_connector_is_told_is_what_it_takes():
    told = [
        (page.stem, json.loads(text))
        for page in PAGES
        for language, text, _ in blocks(page)
        if language == "json"
    ]

    assert [("vllm", "s3://team-prefixes/gemma-3-4b")] == [
        (page, ConnectorOptions.of(extra).root) for page, extra in told
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_what_a_page_speaks_of_is_there(page):
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"`((?:examples|tools|tests|bench|docs)/[\w./-]*\w)`", text)
    names += re.findall(r'^--8<-- "(.*)"$', text, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^(?: {4}|\$ )make (\w+)|`make (\w+)`", text, re.MULTILINE)

    assert [] == [name for name in names if not (ROOT / name).exists()]
    assert [] == [
        one or other for one, other in targets if f"\n{one or other}:" not in f"\n{makefile}"
    ]


def test_every_module_has_its_line_in_the_architecture():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## The modules")[2]
    named = set(re.findall(r"`(\w+)/?[\w/]*`", table))
    package = ROOT / "src" / "kvplane"
    modules = {path.stem for path in package.glob("*.py") if not path.stem.startswith("_")}
    folders = {path.parent.name for path in package.glob("*/__init__.py")}

    assert set() == (modules | folders) - named


def test_every_extra_of_a_user_is_named_and_every_named_one_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    asked = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for names in re.findall(r'extra="(\w+)"|kvplane\[(\w+)\]', path.read_text(encoding="utf-8"))
        for name in filter(None, names)
    }

    assert asked <= extras
    assert all(f"`{name}` (" in page for name in extras - DEVELOPERS)


def test_the_readme_has_the_footprints_that_the_plan_gives():
    table = re.findall(r"^\| ([\d,]+(?: \| [\d,]+){4}) \|$", PAGES[0].read_text(), re.MULTILINE)
    rows = [[int(cell.replace(",", "")) for cell in row.split(" | ")] for row in table]
    geometry = ModelGeometry.preset("muse-glimmer-30b")
    plans = [footprint(geometry, context=row[0], sessions=4) for row in rows]

    assert 4 == len(rows)
    assert rows == [
        [
            plan.context,
            *(plan.kind(kind).reserved for kind in ("sliding_attention", "full_attention")),
            plan.session.reserved,
            plan.total.reserved,
        ]
        for plan in plans
    ]


def test_dots_stand_for_anything_and_nothing_else_does():
    assert matches("a ... c", "a b c\n")
    assert matches("...", "")
    assert not matches("a . c", "a b c")
    assert not matches("a", "a\nb")
