"""Timing, memory and reports that all benches share: medians of alternating rounds."""

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "benchmarks"


class Timing(NamedTuple):
    """Seconds of one call: median, least and most over rounds."""

    median: float
    least: float
    most: float


def paired(
    calls: dict[str, Callable[[], object]], *, rounds: int = 5, seconds: float = 0.2
) -> dict[str, Timing]:
    """Each call timed in every round, in alternating order, so that drift meets all alike."""
    counts = {}
    for name, call in calls.items():
        call()
        begin = time.perf_counter()
        call()
        once = max(time.perf_counter() - begin, 1e-7)
        counts[name] = max(1, min(100_000, int(seconds / once)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls) if number % 2 == 0 else list(calls)[::-1]
        for name in names:
            call = calls[name]
            gc.collect()
            begin = time.perf_counter()
            for _ in range(counts[name]):
                call()
            taken[name].append((time.perf_counter() - begin) / counts[name])
    return {
        name: Timing(statistics.median(times), min(times), max(times))
        for name, times in taken.items()
    }


def pss_nbytes() -> int:
    """Bytes of this process, shared pages counted in proportion."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    message = "no Pss line"
    raise OSError(message)


def machine() -> dict[str, Any]:
    """What a figure depends on beside the code."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "kvplane", "safetensors"):
        try:
            versions[name] = __import__(name).__version__
        except (ImportError, AttributeError):
            continue
    return {
        "cpu": model,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
        "date": datetime.now(tz=UTC).strftime("%Y-%m-%d"),
    }


def write(name: str, title: str, command: str, result: dict[str, Any], tables: str) -> None:
    """The JSON that the numbers live in, and the Markdown page that shows them."""
    OUT.mkdir(parents=True, exist_ok=True)
    facts = machine()
    whole = {"machine": facts, "command": command, **result}
    (OUT / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    versions = ", ".join(f"{what} {number}" for what, number in facts["versions"].items())
    page = (
        f"# {title}\n\nWritten by `{command}` on {facts['date']}: {facts['cpu']}, "
        f"{facts['threads']} threads, {versions}. Medians; ratios only from this run. "
        f"The numbers are in `{name}.json`.\n\n{tables}\n"
    )
    (OUT / f"{name}.md").write_text(page, encoding="utf-8")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def micros(timing: Timing) -> str:
    """A timing in microseconds with its spread."""
    if timing.median >= 1e-3:
        return f"{timing.median * 1e3:.2f} ms ({timing.least * 1e3:.2f} to {timing.most * 1e3:.2f})"
    return f"{timing.median * 1e6:.1f} µs ({timing.least * 1e6:.1f} to {timing.most * 1e6:.1f})"
