"""`kvplane bench`: every measurement of this machine, one after another, from a checkout."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from kvplane.errors import ArgumentError

FAILED = 1
# what `make bench` measures without a GPU; each writes docs/benchmarks/<name>.json and .md
REFERENCE = ("store", "mapped", "packs", "transfer", "generation", "peers")
GPU = ("gpu",)
OPTIONS = {"gpu": ["--report"]}


def bench(
    *names: str,
    gpu: Annotated[bool, Parameter(negative="")] = False,
    folder: Path | None = None,
) -> None:
    """Measure this machine: the store, packs, generation, and other stores beside them.

    Each measurement compares within one run, in alternating rounds, and writes JSON and a page
    with medians, spread and versions to docs/benchmarks. Leave the machine alone meanwhile. Exits
    with 1 when one fails; the others run all the same.

    Example: kvplane bench store packs

    Args:
        names: Which; by default all of the reference machine's.
        gpu: Those of a GPU machine instead.
        folder: Of the benches; by default the checkout's that kvplane is installed from.
    """
    place = folder or Path(__file__).parents[3] / "bench"
    chosen = names or (GPU if gpu else REFERENCE)
    scripts = [place / f"{name}.py" for name in chosen]
    missing = [script for script in scripts if not script.is_file()]
    if missing:
        known = ", ".join((*REFERENCE, *GPU))
        raise ArgumentError(
            argument="names", expected=f"benches of a checkout: {known}", got=str(missing[0])
        )
    notes = Console(stderr=True, highlight=False)
    failed = []
    for script in scripts:
        notes.print(f"{script.stem} ...")
        command = [sys.executable, str(script), *OPTIONS.get(script.stem, [])]
        if subprocess.run(command, check=False, cwd=place.parent).returncode:  # noqa: S603 - ours
            failed.append(script.stem)
    if failed:
        notes.print(f"failed: {', '.join(failed)}")
        raise SystemExit(FAILED)
