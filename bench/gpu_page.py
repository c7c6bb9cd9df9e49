"""The parts of the GPU report's page that are about whole steps and memory."""

from typing import Any

from measure import table

MIB = 1 << 20


def priced_sections(report: dict[str, Any]) -> list[str]:
    """Sections of what else an engine could do."""
    lines: list[str] = []
    for name, title in (
        ("block_tables", "The same sums over a span, a ring, a block table"),
        ("free_splits", "Fixed order against free splits"),
        ("batches", "Sessions of other lengths"),
    ):
        for case, times in _cases(report.get(name)):
            rows = [[which, _us(taken)] for which, taken in times.items()]
            lines += ["", f"## {title}: {case}", "", table(["what", "us"], rows)]
    if isinstance(report.get("layouts"), dict):
        rows = [[pair, _us(taken)] for pair, taken in report["layouts"]["times"].items()]
        lines += ["", "## A token's attention in 52 layers, by layouts, 32,768 tokens", ""]
        lines += [table(["layouts", "us"], rows), ""]
        lines += [f"Multiplicative check: {report['layouts']['multiplicative']:.4f} (1 is exact)."]
    return lines


def _cases(part: object) -> list[tuple[str, Any]]:
    return list(part.items()) if isinstance(part, dict) else []


def _us(taken: dict[str, float]) -> str:
    return f"{taken['median']:.1f} ({taken['least']:.1f} to {taken['most']:.1f})"


def step_sections(report: dict[str, Any]) -> list[str]:
    """Sections of whole steps at the 30B shape."""
    lines: list[str] = []
    steps = report.get("steps")
    if isinstance(steps, dict):
        names = list(next(iter(steps.values())))
        rows = [
            [name, *(_ms(cases[name]) for cases in steps.values()), _ready(steps, name)]
            for name in names
        ]
        head = ["milliseconds a token", *(f"{context} tokens" for context in steps), "ready, s"]
        lines += ["", "## A whole step at the 30B shape, batch 1, the head included", ""]
        lines += [table(head, rows), "", _equal(steps)]
    for name, title in (
        ("headless", "The same without the head"),
        ("mixed", "Eight sessions of other lengths in one step"),
        ("cut", "An 8-layer cut, 2,047 tokens"),
    ):
        part = report.get(name)
        if isinstance(part, dict):
            flat = _flat(part) if name == "headless" else part
            rows = [[case, _ms(times)] for case, times in flat.items()]
            lines += ["", f"## {title}", "", table(["case", "ms a token"], rows)]
    if isinstance(report.get("launches"), dict):
        rows = [[mode, str(counts)] for mode, counts in report["launches"].items()]
        lines += ["", "## Launches of a token", "", table(["layers", "kernels"], rows)]
    return lines


def memory_sections(report: dict[str, Any]) -> list[str]:
    """Sections of memory."""
    part = report.get("memory")
    if not isinstance(part, dict):
        return []
    rows: list[list[str]] = []
    for name, facts in part["held"].items():
        rows.append([f"131,000 tokens: {name}", f"{facts:,} B"])
    rows.append(["one session of 100,000 tokens: full planes", f"{_bytes(part, 'one'):,} B"])
    for name, share in part["forks"].items():
        if name != "full planes of one":
            rows.append([f"with eight forks: {name}", f"{share:.3f} of it"])
    for name, times in part["fork_time"].items():
        rows.append([f"131,064 tokens: {name}", f"{_ms(times)} ms"])
    for name, number in part["growth"].items():
        unit = "" if name.startswith("above") else " us"
        rows.append(
            [f"the host's part of a token while planes grow: {name}", f"{number:.0f}{unit}"]
        )
    for name, number in part["moved"].items():
        shown = f"{number:,} B" if name == "nbytes" else f"{number:.1f} GB/s"
        rows.append([f"moved: {name}", shown])
    for name, number in part["pages"].items():
        rows.append([f"a page alone, with a wait: {name}", f"{number:.0f} us"])
    for name, peak in (report.get("peaks") or {}).items():
        rows.append([f"peak of a {name}", f"{peak['peak'] / MIB:.0f} MiB beyond what was held"])
    return ["", "## Memory", "", table(["what", "measured"], rows)]


def _bytes(part: dict[str, Any], word: str) -> int:
    return next(number for name, number in part["forks"].items() if word in name)


def _ms(times: dict[str, float]) -> str:
    return f"{times['median']:.1f} ({times['least']:.1f} to {times['most']:.1f})"


def _ready(steps: dict[str, Any], name: str) -> str:
    first = next(iter(steps.values()))[name].get("ready_s")
    return "" if first is None else f"{first:.1f}"


def _equal(steps: dict[str, Any]) -> str:
    told = [
        times["equal_bits_without_graph"]
        for cases in steps.values()
        for times in cases.values()
        if "equal_bits_without_graph" in times
    ]
    return f"Logits bitwise equal with and without the graph: {sum(told)} of {len(told)} cases."


def _flat(part: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{context} tokens, {layers}": times
        for context, cases in part.items()
        for layers, times in cases.items()
    }
