"""What every test run shares: reproducible Hypothesis, one thread, poisoned memory on request."""

from unittest import mock

import pytest
import torch
from hypothesis import settings

import poison as poisons
import tiny
from kvplane.memory import choose

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ci")
torch.set_num_threads(1)


@pytest.fixture(params=["heap", "mapped"])
def memory(request, monkeypatch):
    """The memory of every store of the test that asks for none by name: the test runs in each.

    The store's own tests ask for it, module by module, with `usefixtures`.
    """

    def chosen(memory, device):
        return choose(request.param if memory == "auto" else memory, device)

    monkeypatch.setattr(tiny, "MEMORY", request.param)
    monkeypatch.setattr(poisons, "choose", chosen)
    monkeypatch.setattr("kvplane.store.choose", chosen)
    return request.param


@pytest.fixture
def poison():
    """Every store made in the test has memory that is NaN wherever nothing was written."""
    with mock.patch("kvplane.store.choose", poisons.poisoned):
        yield
