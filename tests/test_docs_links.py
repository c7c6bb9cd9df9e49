"""Links of the documents: all lead somewhere now, and one that does not would be found."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "check_links.py"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("check_links", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text("# A: *heading*, `twice`\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def said(tool, text, capsys):
    (tool.ROOT / "README.md").write_text(text)
    code = tool.main()
    printed = capsys.readouterr().out
    assert code == bool(printed)
    return printed


@pytest.mark.parametrize(
    "text",
    [
        "[a](docs/other.md) [b](docs/other.md#a-heading-twice) [c](https://example.org/x?y#z)",
        "# Here\n[a](#here) ![b](docs/other.md) [c](docs/)",
        "`[a](nowhere.md)`\n```\n[b](nowhere.md)\n```\n",
    ],
    ids=["files", "headings", "code"],
)
def test_links_that_lead_somewhere_are_let_through(tool, text, capsys):
    assert "" == said(tool, text, capsys)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("[a](docs/none.md)", "README.md: docs/none.md leads nowhere"),
        ("![a](docs/none.svg)", "README.md: docs/none.svg leads nowhere"),
        ("[a](docs/other.md#no)", "README.md: docs/other.md#no: no such heading"),
        ("[a](#no)", "README.md: #no: no such heading"),
        ("[a](http://example.org)", "README.md: http://example.org leads nowhere"),
    ],
    ids=["page", "image", "heading", "own-heading", "plain-http"],
)
def test_a_link_that_leads_nowhere_is_found(tool, text, finding, capsys):
    assert finding == said(tool, text, capsys).strip()


def test_every_document_of_ours_is_sound():
    spec = importlib.util.spec_from_file_location("check_links", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert [] == [finding for path in module.documents() for finding in module.broken(path)]
