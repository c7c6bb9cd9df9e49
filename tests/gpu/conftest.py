import os

import pytest
from gpu_cases import REAL, SMALL, Shape


@pytest.fixture(scope="session")
def shape() -> Shape:
    """Sizes of the real model on a GPU, small ones under Triton's interpreter."""
    return SMALL if os.environ.get("TRITON_INTERPRET") == "1" else REAL
