"""What the site's pages are given while it is built."""

import importlib.util
from pathlib import Path

import pytest

from kvplane.cli import COMMANDS


@pytest.fixture(scope="module")
def hooks():
    path = Path(__file__).parents[1] / "tools" / "docs_hooks.py"
    spec = importlib.util.spec_from_file_location("docs_hooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_has_what_every_help_says(hooks):
    page = hooks.on_page_markdown("before\n<!-- commands -->\nafter")

    assert page.startswith("before\n## kvplane bench\n")
    assert all(f"\n## kvplane {name}\n" in page for name, _, _ in COMMANDS)
    assert "--max-new-tokens INT" in page


def test_the_page_of_benchmarks_has_every_page_that_was_written(hooks, tmp_path):
    (tmp_path / "b.md").write_text("# Second\n\nmore")
    (tmp_path / "a.md").write_text("# First\n")
    (tmp_path / "index.md").write_text("# This one\n")

    assert "* [First](a.md)\n* [Second](b.md)" == hooks.pages(tmp_path)


def test_other_pages_are_left_alone(hooks):
    assert "as it is" == hooks.on_page_markdown("as it is")
