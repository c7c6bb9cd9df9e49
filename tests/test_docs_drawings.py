"""The drawings in the documentation are what the code draws now."""

import importlib.util
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree as ET

import pytest

from kvplane.ring import RingCursor

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("draw_docs", ROOT / "tools" / "draw_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_drawing_is_as_the_code_draws_it(tool):
    for name, text in tool.drawings():
        assert text == (ROOT / "docs" / "images" / name).read_text(), f"python {tool.__file__}"


def test_every_drawing_is_sound_and_says_what_it_is(tool):
    for _, text in tool.drawings():
        root = ET.fromstring(text)  # noqa: S314 - our own drawing

        assert root.get("aria-label")


def test_a_ring_that_turns_otherwise_is_not_drawn(tool):
    with (
        mock.patch.object(RingCursor, "as_tuple", return_value=(8, 8, 5, 0)),
        pytest.raises(RuntimeError),
    ):
        tool.store_check()
