"""How many tests there are, by what they are about: written into the page that speaks of them.

python tools/count_tests.py          # docs/testing.md and docs/benchmarks/tests.json
"""

import json
import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "testing.md"
FACTS = ROOT / "docs" / "benchmarks" / "tests.json"
BLOCK = re.compile(r"(<!-- counts: begin -->\n).*?(<!-- counts: end -->)", re.DOTALL)
# the first that a file's path begins with
AREAS = (
    ("tests/gpu/", "a GPU (`make gpu`)"),
    ("tests/browser/", "a browser (`make browser`)"),
    ("tests/kvpack/", "the interchange format"),
    ("tests/transfer/", "sessions on their way to another machine"),
    ("tests/memory/", "memory"),
    ("tests/pack/", "packs"),
    ("tests/test_pack", "packs"),
    ("tests/test_format", "packs"),
    ("tests/test_golden", "packs"),
    ("tests/test_storage", "storage of packs"),
    ("tests/object/", "storage of packs"),
    ("tests/test_hybrid_cache", "transformers"),
    ("tests/test_nano", "transformers"),
    ("tests/test_zoo", "transformers"),
    ("tests/test_attention", "attention and kernels"),
    ("tests/test_kernels", "attention and kernels"),
    ("tests/test_triton", "attention and kernels"),
    ("tests/test_orders", "attention and kernels"),
    ("tests/test_exact", "exactness to the bit"),
    ("tests/test_exhaustive", "every short history"),
    ("tests/test_state_machine", "random histories against a model"),
    ("tests/test_defects", "defects reported of other stores"),
    ("tests/test_bad_input", "bad input"),
    ("tests/test_config", "geometry, plans and configurations"),
    ("tests/test_footprint", "geometry, plans and configurations"),
    ("tests/test_geometry", "geometry, plans and configurations"),
    ("tests/test_payload", "geometry, plans and configurations"),
    ("tests/test_presets", "geometry, plans and configurations"),
    ("tests/test_stock", "geometry, plans and configurations"),
    ("tests/test_cli", "commands"),
    ("tests/test_inspect", "commands"),
    ("tests/test_docs", "documents and examples"),
    ("tests/test_examples", "documents and examples"),
    ("tests/", "rings, steps, sessions, stores"),
)


def counted() -> Counter[str]:
    """Tests by area, as pytest collects them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "tests"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    counts: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        found = re.fullmatch(r"(\S+\.py): (\d+)", line)
        if found is not None:
            counts[next(area for start, area in AREAS if found[1].startswith(start))] += int(
                found[2]
            )
    return counts


def mutants() -> tuple[int, int]:
    """Mutants that were made and killed in the last run of `make mutants`."""
    text = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `[^|]*` \| ([\d,]+) \| ([\d,]+) \|", text, re.MULTILINE)
    made, killed = (sum(int(row[side].replace(",", "")) for row in rows) for side in (0, 1))
    return made, killed


def main() -> int:
    """Count, and write both files."""
    counts = counted()
    made, killed = mutants()
    day = datetime.now(tz=UTC).date().isoformat()
    facts = {"date": day, "tests": counts, "mutants": {"made": made, "killed": killed}}
    FACTS.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    rows = [f"| {area} | {number:,} |" for area, number in counts.most_common()]
    table = "\n".join(["| tests about | |", "|---|---|", *rows])
    words = (
        f"{counts.total():,} tests on {day}; of {made:,} mutants in the arithmetic modules "
        f"{killed:,} are killed."
    )
    text = PAGE.read_text(encoding="utf-8")
    written = BLOCK.sub(lambda found: f"{found[1]}{words}\n\n{table}\n{found[2]}", text)
    PAGE.write_text(written, encoding="utf-8")
    print(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
