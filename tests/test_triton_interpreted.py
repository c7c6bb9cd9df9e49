"""The GPU's tests at small sizes under Triton's interpreter: the same kernels, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parent / "gpu"
# what needs a real device is in test_device_*only.py
FILES = sorted(path for path in GPU.glob("test_*.py") if not path.stem.endswith("_only"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_kernels_do_on_a_cpu_what_they_must_do_on_a_gpu(path: Path):
    # a process of its own: triton reads the variable when it is imported
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:xdist", str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=GPU.parent.parent,
    )

    assert done.returncode == 0, done.stdout + done.stderr
