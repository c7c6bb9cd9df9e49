"""Every example runs, says that it came out as it should, and is short enough to be read."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
LIMITS = {"own_engine.py": 80}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_comes_out_as_it_should(path, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path)])
    code = 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as ended:
        code = int(ended.code or 0)

    assert 0 == code
    assert "False" not in capfd.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert LIMITS.get(path.name, 60) >= len(path.read_text().splitlines())
