"""The page about transformers says what is so, and its examples run."""

import re
from pathlib import Path

import torch

import zoo
from zoo import modes
from zoo.models import EXCLUDED, MODELS

torch.set_num_threads(1)

PAGE = (Path(__file__).parents[1] / "docs" / "transformers.md").read_text()


def test_the_page_lists_every_model_with_its_layers():
    rows = dict(re.findall(r"^\| (\S+) \| ([SFLCDH]+) \|", PAGE, re.MULTILINE))

    assert {name: entry.layers for name, entry in MODELS.items()} == rows


def test_the_page_gives_every_exclusions_reason():
    rows = dict(re.findall(r"^\| (\S+) \| ([^|]{12,}) \|$", PAGE, re.MULTILINE))

    assert EXCLUDED == {name: reason for name, reason in rows.items() if name in EXCLUDED}


def test_the_examples_run_one_after_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = zoo.build("muse_glimmer")
    facts = {"model": model, "ids": zoo.text(21)}
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    assert 2 == len(examples)
    for example in examples:
        exec(example.replace("cache=cache", f"{modes.keyword(model)}=cache"), facts)  # noqa: S102 - our own page
    assert 40 == facts["cache"].seen
