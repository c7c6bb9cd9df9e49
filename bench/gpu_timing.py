"""Timing on a GPU: calls captured in graphs that walk over more memory than the cache holds."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# between two uses of a plane this much other memory is read: about four times the L2 cache
COLD_NBYTES = 256_000_000
ROUNDS = 3
ROUND_MS = 12.0


@dataclass(frozen=True)
class Timed:
    """Microseconds of one call inside a graph: median, least and most of the rounds."""

    median: float
    least: float
    most: float

    def text(self) -> str:
        """As in the tables."""
        return f"{self.median:.1f} ({self.least:.1f} to {self.most:.1f})"


def copies_needed(nbytes: int) -> int:
    """How many planes of this size to walk over; two at least."""
    return max(2, -(-COLD_NBYTES // nbytes))


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """All calls in one graph, compiled and run once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
        calls[-1]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def measured(
    variants: dict[str, Sequence[Callable[[], object]]], *, rounds: int = ROUNDS
) -> dict[str, Timed]:
    """Each variant's graph replayed in every round, in alternating order."""
    graphs = {}
    for name, calls in variants.items():
        try:
            graphs[name] = (captured(calls), len(calls))
        except (RuntimeError, TypeError, ValueError) as error:
            # a size that does not fit, a kernel that this torch lacks: said, and left out
            print(f"left out: {name}: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
    repeats = {}
    for name, (graph, _) in graphs.items():
        once = _replayed(graph, 3)
        repeats[name] = max(3, min(2000, int(ROUND_MS / max(once, 1e-3))))
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds):
        names = list(graphs) if number % 2 == 0 else list(graphs)[::-1]
        for name in names:
            graph, count = graphs[name]
            taken[name].append(_replayed(graph, repeats[name]) * 1000 / count)
    return {
        name: Timed(statistics.median(times), min(times), max(times))
        for name, times in taken.items()
    }


def _replayed(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Milliseconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def roofs() -> dict[str, float]:
    """GB/s of the device: a copy (read plus written), and a pure read."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float16)
    target = torch.empty_like(source)
    sums = torch.empty(1 << 14, device="cuda", dtype=torch.float32)
    read = _Read(source, sums)
    nbytes = source.numel() * 2
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    # not in a graph, where a copy is another engine's
    for _ in range(8):
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return {
        "copy": 2 * nbytes / statistics.median(taken) / 1e6,
        "read": nbytes / measured({"read": [read]})["read"].median / 1000,
    }


class _Read:
    def __init__(self, source: Tensor, sums: Tensor) -> None:
        self.source, self.sums = source, sums

    def __call__(self) -> None:
        turns = self.source.numel() // (self.sums.numel() * 4096)
        _read[(self.sums.numel(),)](self.source, self.sums, turns, BLOCK=4096, num_warps=8)


@triton.jit
def _read(source, sums, turns, BLOCK: tl.constexpr):  # noqa: N803 - Triton's capitals
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in range(turns):
        at = (program * turns + turn) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(source + at).to(tl.float32)
    tl.store(sums + program, tl.sum(total, 0))
