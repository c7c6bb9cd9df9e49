"""Memory of sessions of Muse Glimmer's shape on a GPU: held, forked, grown, moved."""

import gc
import statistics
import time
from functools import partial
from typing import Any

import torch
from gpu_model import CONTEXT, called, hybrid

from kvplane import KVStore, ModelGeometry
from kvplane.geometry import LayerGeometry
from kvplane.integrations.graphs import DecodeGraph
from kvplane.memory.driver_cuda import CudaDriver

PAGE = 2 << 20


def muse() -> ModelGeometry:
    """52 layers, every fourth full."""
    kinds = {"sliding_attention": 2048, "full_attention": None}
    names = ["sliding_attention"] * 3 + ["full_attention"]
    layers = [
        LayerGeometry(
            kind=name,
            num_kv_heads=2,
            head_dim=128,
            value_head_dim=128,
            sliding_window=kinds[name],
        )
        for name in names * 13
    ]
    return ModelGeometry(layers=layers, dtype="bfloat16")


def filled(store: KVStore, position: int) -> Any:
    """A session at a position, full of random rows."""
    cursors = {}
    for group in store.geometry.groups:
        capacity = store.plan.capacities[group.id]
        length = min(position, capacity)
        origin = position - length
        cursors[group.id] = (capacity, length, origin, divmod(origin, capacity)[1])
    builder = store.builder(cursors)
    for layer in builder.planes:
        live = builder.cursors[store.plan.group_ids[layer]].live
        for key, value in builder.rows(layer, live.start, live.stop):
            key.normal_()
            value.normal_()
        builder.filled(layer, live.start, live.stop)
    return builder.finish()


def used() -> int:
    """Bytes that the device has given out, PyTorch's idle ones returned."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def store_of(memory: str = "mapped") -> KVStore:
    """A store of that shape for full contexts."""
    return KVStore(muse(), max_context=CONTEXT, device="cuda", memory=memory)


def held() -> dict[str, Any]:
    """A session of 131,000 tokens: the plan, the report and the driver; then all of it returned."""
    store = store_of()
    before = used()
    session = filled(store, 131_000)
    plan = 39 * PAGE + 13 * -(-131_000 // 2048) * PAGE
    found = {
        "plan": plan,
        "pages_held": store.memory().pages_held,
        "driver": used() - before,
        "rows_held": store.memory().total.rows_held,
    }
    session.close()
    del session
    found["left after close"] = used() - before
    return found


def forks() -> dict[str, Any]:
    """Eight forks of one session of 100,000 tokens, before and after each wrote a token."""
    store = store_of()
    session = filled(store, 100_000)
    rings = 39 * PAGE
    one = store.memory().pages_held - rings
    twins = [session.fork() for _ in range(8)]
    before = store.memory().pages_held - 9 * rings
    for each in twins:
        token(each)
    after = store.memory().pages_held - 9 * rings
    return {"full planes of one": one, "forks before": before / one, "after a token": after / one}


def token(session: Any) -> None:
    """A step of one token in every layer."""
    row = torch.randn(1, 2, 128, device="cuda", dtype=torch.bfloat16)
    with session.step(1) as step:
        for layer in session.planes:
            step.write(layer, row, row)


def fork_time() -> dict[str, Any]:
    """Milliseconds of a fork at 131,071 tokens, of its first token, and of closing it."""
    store = store_of()
    session = filled(store, CONTEXT - 8)
    taken: dict[str, list[float]] = {"fork": [], "first token": [], "next token": [], "close": []}
    for _ in range(5):
        twin = _clocked(taken["fork"], session.fork)
        _clocked(taken["first token"], lambda twin=twin: token(twin))
        _clocked(taken["next token"], lambda twin=twin: token(twin))
        _clocked(taken["close"], twin.close)
    return {name: _three(times) for name, times in taken.items()}


def _clocked(times: list[float], work: Any) -> Any:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    out = work()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - begin) * 1000)
    return out


def _three(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def growth() -> dict[str, Any]:
    """Microseconds of the host's part of a token, over 6,000 tokens that take 3 pages a plane."""
    session = store_of().open()
    taken = []
    for _ in range(6000):
        begin = time.perf_counter()
        with session.step(1) as step:
            step.written_on_device()
        taken.append((time.perf_counter() - begin) * 1e6)
    ordered = sorted(taken[100:])
    return {
        "median": statistics.median(ordered),
        "p99": ordered[int(len(ordered) * 0.99)],
        "most": ordered[-1],
        "above 1 ms": sum(number > 1000 for number in ordered),
    }


def moved() -> dict[str, Any]:
    """GB/s of a snapshot and a restore, beside a pinned copy of as many bytes."""
    found: dict[str, Any] = {}
    size = 1 << 30
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    for name, target, source in (("pinned out", pinned, there), ("pinned in", there, pinned)):
        times: list[float] = []
        for _ in range(4):
            _clocked(times, lambda t=target, s=source: t.copy_(s, non_blocking=True))
        found[name] = size / min(times[1:]) / 1e6
    del pinned, there
    store = store_of()
    session = filled(store, CONTEXT - 8)
    times = []
    for _ in range(4):
        snapshot = None
        snapshot = _clocked(times, session.snapshot)
    nbytes = snapshot.nbytes
    found |= {
        "nbytes": nbytes,
        "first snapshot": nbytes / times[0] / 1e6,
        "snapshot": nbytes / statistics.median(times[1:]) / 1e6,
    }
    session.close()
    times = []
    for _ in range(4):
        again = _clocked(times, lambda: store.restore(snapshot))
        again.close()
    found["restore"] = nbytes / statistics.median(times[1:]) / 1e6
    for layer, (key, value) in snapshot.rows.items():
        snapshot.rows[layer] = (key.clone(), value.clone())
    times = []
    for _ in range(2):
        again = _clocked(times, lambda: store.restore(snapshot))
        again.close()
    found["restore, not pinned"] = nbytes / times[-1] / 1e6
    return found


def pages() -> dict[str, Any]:
    """Microseconds of the driver's calls on one page."""
    driver = CudaDriver(torch.device("cuda"))
    span = driver.reserve(65 * PAGE)
    times: dict[str, list[float]] = {"take": [], "map": [], "unmap": [], "give back": []}
    for number in range(64):
        page = _clocked(times["take"], partial(driver.create, 1))
        _clocked(times["map"], lambda page=page, n=number: span.map(n * PAGE, [(page, 1)]))
        _clocked(times["unmap"], lambda n=number: span.unmap(n * PAGE, PAGE))
        _clocked(times["give back"], lambda page=page: driver.release(page))
    return {name: statistics.median(taken) * 1000 for name, taken in times.items()}


def peaks(model: Any) -> dict[str, Any]:
    """Bytes beyond what was held that a step and a chunk of 512 take at their peak."""
    found = {}
    graph = None
    for position in (600, 131_000 - 600):
        cache = hybrid(model, position)
        ids = torch.full((1, 512), 17, device="cuda")
        graph = DecodeGraph(model, cache) if graph is None else graph
        graph.step([17], cache)
        for name, work in (
            ("token in a graph", partial(graph.step, [17], cache)),
            ("token", partial(called, model, cache, ids[:, :1])),
            ("chunk of 512", partial(called, model, cache, ids)),
        ):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, pages_before = torch.cuda.memory_allocated(), used_pages(cache)
            work()
            torch.cuda.synchronize()
            found[f"{name} at {position:,}"] = {
                "peak": torch.cuda.max_memory_allocated() - before,
                "pages": used_pages(cache) - pages_before,
            }
        cache.close()
        del cache
    return found


def used_pages(cache: Any) -> int:
    """Bytes of a cache's pages."""
    return cache.store.memory().pages_held


def memory() -> dict[str, Any]:
    """Everything that needs no model."""
    found = {}
    for part in (held, forks, fork_time, growth, moved, pages):
        found[part.__name__] = part()
        print(part.__name__, found[part.__name__], flush=True)
        used()
    return found
