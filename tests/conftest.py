"""What every test run shares: reproducible Hypothesis, one thread, poisoned memory on request."""

from unittest import mock

import pytest
import torch
from hypothesis import settings

from poison import poisoned

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ci")
torch.set_num_threads(1)


@pytest.fixture
def poison():
    """Every store made in the test has memory that is NaN wherever nothing was written."""
    with mock.patch("kvplane.store.choose", poisoned):
        yield
