"""Mutation testing of the modules without tensors, by mutmut, in a copy of the tree.

    make mutants                     everything; about a quarter of an hour on two cores
    python tools/mutants.py NAME     mutants whose names contain NAME

Writes docs/mutants.md: how many mutants of each module the tests kill, and every survivor with its
reason from tools/mutants.json. Fails when a module is under 95 %, or a survivor has no reason.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
REASONS = ROOT / "tools" / "mutants.json"
REPORT = ROOT / "docs" / "mutants.md"
LEAST_SHARE = 0.95
MODULES = (
    "ring.py",
    "geometry.py",
    "footprint.py",
    "payload.py",
    "stock.py",
    "configs/fields.py",
    "configs/layers.py",
    "configs/rotary.py",
)
TESTS = (
    "test_ring.py",
    "test_ring_refusals.py",
    "test_geometry.py",
    "test_presets.py",
    "test_configs.py",
    "test_configs_layers.py",
    "test_configs_rotary.py",
    "test_footprint.py",
    "test_footprint_scratch.py",
    "test_payload.py",
    "test_stock.py",
)
# mutmut's exit codes of a mutant's test run that mean the tests noticed
KILLED = {1, 3, 24, 36, 152, 255, -24, -9, -11}
SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {modules}
pytest_add_cli_args_test_selection = {tests}
use_git_change_detection = false
"""


class Mutant(NamedTuple):
    """One mutant: mutmut's name, the file it is in, whether the tests noticed."""

    name: str
    module: str
    killed: bool


def main() -> int:
    """Run mutmut, write the report, and judge: 0 when every module stands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of mutants' names; all when left out")
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("JOBS", "2")))
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--report", action="store_true", help="only write the report again")
    arguments = parser.parse_args()
    if not arguments.report:
        if not arguments.resume:
            prepare()
        run(arguments.names, arguments.jobs)
    mutants = found()
    if arguments.names:
        mutants = [m for m in mutants if any(name in m.name for name in arguments.names)]
        for mutant in mutants:
            if not mutant.killed:
                print(mutant.name, *change(mutant.name), sep="\n    ")
        return 0
    return report(mutants)


def prepare() -> None:
    """A fresh copy of what mutmut needs; results of an earlier run are not kept."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, WORK / folder, ignore=shutil.ignore_patterns("__pycache__"))
    settings = SETTINGS.format(
        modules=[f"src/kvplane/{module}" for module in MODULES],
        tests=[f"tests/{test}" for test in TESTS],
    )
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (WORK / "pyproject.toml").write_text(text + settings, encoding="utf-8")


def run(names: list[str], jobs: int) -> None:
    """Every mutant, or those whose names contain one of `names`."""
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(jobs)]
    command += [f"*{name}*" for name in names]
    # mutmut draws spinners; what it says is of use only when it fails
    log = WORK / "mutmut.log"
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, cwd=WORK, check=False, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        said = log.read_text(encoding="utf-8")[-4000:]
        sys.exit(f"mutmut failed with {done.returncode}:\n{said}")


def found() -> list[Mutant]:
    """The mutants of the last run."""
    mutants = []
    for module in MODULES:
        path = WORK / "mutants" / "src" / "kvplane" / f"{module}.meta"
        codes = json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
        mutants += [Mutant(name, module, code in KILLED) for name, code in codes.items()]
    return mutants


def change(name: str) -> list[str]:
    """The lines that a mutant changes: removed ones with a minus, added ones with a plus."""
    shown = subprocess.run(
        [sys.executable, "-m", "mutmut", "show", name],
        cwd=WORK,
        check=True,
        capture_output=True,
        text=True,
    )
    return [
        f"{line[0]} {line[1:].strip()}"
        for line in shown.stdout.splitlines()
        if line[:1] in "+-" and line[:3] not in {"+++", "---"} and line[1:].strip()
    ]


def report(mutants: list[Mutant]) -> int:
    """Write docs/mutants.md; the exit code says whether it is good enough."""
    reasons = json.loads(REASONS.read_text(encoding="utf-8"))
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_module[mutant.module].append(mutant)
    table = ["| module | mutants | killed | share |", "|---|---|---|---|"]
    survivors = []
    enough = True
    for module, its in by_module.items():
        killed = sum(mutant.killed for mutant in its)
        enough = enough and killed >= LEAST_SHARE * len(its)
        table.append(f"| `{module}` | {len(its)} | {killed} | {100 * killed / len(its):.1f} % |")
        survivors += [mutant for mutant in its if not mutant.killed]
    listed = []
    for mutant in survivors:
        lines = change(mutant.name)
        where = mutant.name.rpartition("__mutmut_")[0]
        # keyed by what is changed: numbers move when code does
        reason = reasons.get(f"{where}: {' '.join(lines)}")
        enough = enough and reason is not None
        reason = reason or "NO REASON GIVEN"
        listed += [f"**{where}**: {reason}", "", "```diff", *lines, "```", ""]
        if reason == "NO REASON GIVEN":
            print(f"{where}: {' '.join(lines)}")
    text = [
        "# Mutants that the tests let live",
        "",
        "Written by `make mutants`; the reasons are kept in `tools/mutants.json`.",
        "",
        *table,
        "",
        *listed,
    ]
    REPORT.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    print("\n".join(table))
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
