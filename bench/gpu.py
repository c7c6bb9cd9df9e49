"""Everything about the kernels on a GPU in one run: `bench/gpu.py --report` [--tune] [--out DIR].

First the tests in tests/gpu, then times: cold (planes of 256 MB in turn), inside CUDA graphs,
medians of three rounds in alternating order; then memory, and whole steps at the 30B shape. Writes
gpu.json and gpu.md.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

import gpu_decode  # noqa: E402 - found after the path is set
import gpu_memory  # noqa: E402
import gpu_others  # noqa: E402
import gpu_page  # noqa: E402
import gpu_prefill  # noqa: E402
import gpu_step  # noqa: E402
import gpu_tune  # noqa: E402
from gpu_decode import Decode  # noqa: E402
from gpu_model import big_model, hybrid  # noqa: E402
from gpu_timing import Timed, roofs  # noqa: E402
from measure import table  # noqa: E402

from kvplane.attention.triton_table import TABLE  # noqa: E402

CASES = [Decode(f"ring 2,048 x {batch}", 2048, batch, 2048) for batch in (1, 4, 16)] + [
    Decode(f"full {rows:,} x {batch}", rows, batch, None)
    for rows in (32768, 131072)
    for batch in (1, 4, 16)
]
OTHERS = [
    Decode("head_dim 256, 1 kv head, window 512", 512, 1, 512, heads=4, kv_heads=1, dim=256),
    Decode("head_dim 256, 4 kv heads, window 1,024", 1024, 1, 1024, heads=8, kv_heads=4, dim=256),
    Decode(
        "head_dim 64, 8 kv heads, window 128, sinks",
        128,
        1,
        128,
        heads=64,
        kv_heads=8,
        dim=64,
        sinks=True,
        dtype=torch.bfloat16,
    ),
]


def main() -> int:
    """Check, time, write; the number of failed tests decides the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="tests and all times")
    parser.add_argument("--tune", action="store_true", help="also try other sizes")
    parser.add_argument("--out", default=str(ROOT / "docs" / "benchmarks"))
    parser.add_argument("--limit", type=float, default=500, help="seconds: begin no part after it")
    asked = parser.parse_args()
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    report: dict[str, Any] = {"machine": machine(), "command": "python bench/gpu.py --report"}
    report["table"] = TABLE
    parts: list[tuple[str, Any]] = []
    if asked.report:
        parts += [("tests", tests), ("roofs", roofs), ("decode", decode), ("prefill", prefill)]
        parts += [("stores", gpu_prefill.stores), ("others", others)]
        for part in (gpu_others.block_tables, gpu_others.free_splits, gpu_others.batches):
            parts.append((part.__name__, part))
        parts += [("layouts", gpu_others.layouts), ("memory", gpu_memory.memory)]
        parts += [(name, partial(whole, part)) for name, part in WHOLE.items()]
        parts += [("cut", cut)]
    if asked.tune:
        parts.append(("tune", gpu_tune.tune))
    torch.manual_seed(0)
    for name, part in parts:
        if time.monotonic() - began > asked.limit:
            report[name] = "left out: no time"
            continue
        try:
            report[name] = part()
        except Exception as error:  # noqa: BLE001 - the other parts are worth having
            traceback.print_exc()
            report[name] = f"failed: {error}"
        torch.cuda.empty_cache()
        print(f"{name}: done after {time.monotonic() - began:.0f} s", flush=True)
        (out / "gpu.json").write_text(json.dumps(report, indent=1, default=_plain) + "\n")
    page = written(json.loads(json.dumps(report, default=_plain)))
    (out / "gpu.md").write_text(page, encoding="utf-8")
    print(page)
    failed = [name for name, part in report.items() if str(part).startswith("failed")]
    print("failed:", failed)
    return 0 if not asked.report or (report["tests"]["status"] == 0 and not failed) else 1


def _plain(thing: object) -> object:
    if isinstance(thing, Timed):
        return {"median": thing.median, "least": thing.least, "most": thing.most}
    raise TypeError(type(thing))


def machine() -> dict[str, Any]:
    """What the figures depend on beside the code."""
    facts = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "gpu": facts.name,
        "multiprocessors": facts.multi_processor_count,
        "driver": driver.stdout.strip(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.now(tz=UTC).strftime("%Y-%m-%d"),
    }


def tests() -> dict[str, Any]:
    """The tests of tests/gpu, on this device."""
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "gpu"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "--rootdir",
            str(ROOT),
            "-p",
            "no:cacheprovider",
            "-n",
            "6",
            "-W",
            "ignore::pytest.PytestUnknownMarkWarning",
            "-W",
            "ignore::DeprecationWarning",
            "--tb=short",
            "--durations=8",
            str(ROOT / "tests" / "gpu"),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    print(done.stdout[-6000:], done.stderr[-1000:], flush=True)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": done.returncode, "summary": lines[-1] if lines else "", "failed": failed}


def decode() -> dict[str, Any]:
    """Both layouts of every case, and what else an engine could do with the first."""
    found = {}
    for number, case in enumerate(CASES):
        times = gpu_decode.timed(case, extras=number == 0)
        found[case.name] = {"nbytes": case.nbytes, "times": times}
    return found


def others() -> dict[str, Any]:
    """Heads of other models."""
    return {case.name: {"nbytes": case.nbytes, "times": gpu_decode.timed(case)} for case in OTHERS}


def whole(part: Callable[[Any], Any]) -> Any:
    """A part that needs the model, which is made once."""
    if not MODEL:
        MODEL.append(big_model())
    found = part(MODEL[0])
    gpu_step.cleared()
    return found


def launches(model: Any) -> dict[str, Any]:
    """Kernels of a token."""
    found = {}
    for layers in gpu_step.LAYERS:
        cache = hybrid(model, 5000)
        graph = gpu_step.DecodeGraph(model, cache, layers=layers)
        graph.launched([17])
        found[layers] = gpu_others.launches(partial(graph.launched, [17]))
        cache.close()
    return found


def cut() -> Any:
    """The 8-layer cut in a process of its own, as far as it comes in 100 s."""
    MODEL.clear()
    gpu_step.cleared()
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / "bench" / "gpu_cut.py")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        told = done.stdout
    except subprocess.TimeoutExpired as late:
        told = (late.stdout or b"").decode()
    lines = [line for line in told.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else "left out: nothing came in 100 s"


LENGTHS = (100, 2047, 5000, 9000, 20_000, 32_768, 60_000, 100_000)
MODEL: list[Any] = []
WHOLE: dict[str, Callable[[Any], Any]] = {
    "peaks": gpu_memory.peaks,
    "steps": gpu_step.steps,
    "mixed": partial(gpu_step.mixed, lengths=LENGTHS),
    "headless": gpu_step.headless,
    "launches": launches,
}


def prefill() -> dict[str, Any]:
    """A chunk of 512."""
    found = {"over a wrapped ring of 2,048": gpu_prefill.ring(2048)}
    torch.cuda.empty_cache()
    found["over 32,768 rows"] = gpu_prefill.full(32768)
    return found


def written(report: dict[str, Any]) -> str:
    """The page."""
    facts = report["machine"]
    about = ", ".join(f"{name} {fact}" for name, fact in facts.items() if name != "date")
    lines = [
        "# On a GPU",
        "",
        " ".join(
            [
                f"Written by `{report['command']}` on {facts['date']}: {about}.",
                f"Table {report['table']} of sizes.",
                "Microseconds of one call inside a CUDA graph, medians of three rounds (least to",
                "most); planes of 256 MB and more are used in turn, so that none is in the cache.",
                "32 query heads, 2 key heads of 128, float16 unless said.",
                "The numbers are in `gpu.json`.",
            ]
        ),
    ]
    for note in report.get("notes", ()):
        lines += ["", note]
    if isinstance(report.get("tests"), dict):
        tested = report["tests"]
        lines += ["", f"Tests on this device: {tested['summary']}.", *tested["failed"]]
    roof = report.get("roofs", {})
    if isinstance(roof, dict) and roof:
        lines += ["", f"Copy (read plus written) {roof['copy']:.0f} GB/s, read {roof['read']:.0f}."]
    for name, title in (("decode", "Decode: store and attend"), ("others", "Other heads")):
        if isinstance(report.get(name), dict):
            lines += ["", f"## {title}", "", _decode_table(report[name], roof)]
    for name, title in (("prefill", "A chunk of 512"), ("stores", "Stores alone")):
        for case, times in _items(report.get(name)):
            rows = [[which, _text(taken)] for which, taken in times.items()]
            lines += ["", f"## {title}: {case}", "", table(["what", "us"], rows)]
    lines += gpu_page.priced_sections(report)
    lines += gpu_page.step_sections(report) + gpu_page.memory_sections(report)
    for case, times in _items(report.get("tune")):
        ranked = sorted(times.items(), key=lambda pair: pair[1])
        rows = [[which, f"{taken:.2f}"] for which, taken in ranked]
        lines += ["", f"## Sizes tried: {case}", "", table(["sizes", "us"], rows)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _items(part: object) -> list[tuple[str, Any]]:
    return list(part.items()) if isinstance(part, dict) else []


def _text(taken: dict[str, float]) -> str:
    return Timed(**taken).text()


def _decode_table(cases: dict[str, Any], roof: dict[str, float]) -> str:
    names = list(dict.fromkeys(which for case in cases.values() for which in case["times"]))
    rows = []
    for name, case in cases.items():
        floor = case["nbytes"] / roof["read"] / 1000 if roof else 0.0
        taken = [_text(case["times"][which]) if which in case["times"] else "" for which in names]
        rows.append([name, f"{floor:.2f}", *taken])
    return table(["case", "floor", *names], rows)


if __name__ == "__main__":
    sys.exit(main())
