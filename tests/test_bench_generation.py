"""The bench of generation runs to its end at its smallest setting."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "generation.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quick_bench_prints_every_table_and_writes_nothing():
    before = sorted((BENCH.parents[1] / "docs" / "benchmarks").iterdir())
    command = [sys.executable, BENCH, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = sorted((BENCH.parents[1] / "docs" / "benchmarks").iterdir())

    assert before == after
    for title in ("glimmer-nano, f32", "window 2,048, 4 layers", "First token", "An agent"):
        assert f"## {title}" in done.stdout
    for cache in ("kvplane HybridCache", "DynamicCache", "StaticCache", "in the store's order"):
        assert cache in done.stdout
    assert "2, a message edited" in done.stdout
