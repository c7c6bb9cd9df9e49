"""The store beside transformers' own cache layers: time of an update, memory held, snapshots.

One process; each figure is the median of alternating rounds. `make bench` runs it twice: in the
default allocator, and with MALLOC_MMAP_THRESHOLD_ raised, which spares DynamicLayer its page
faults.
"""

import argparse
import gc
import json
import os
import subprocess
import sys

import torch
from measure import ROOT, micros, paired, pss_nbytes, table, write
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from kvplane import KVStore, ModelGeometry
from kvplane.kernels import vectorized

WINDOW = 2048
HEADS, DIM = 2, 128
DTYPE = torch.float16
DEPTHS = (2048, 32_768, 131_072)


def rows(num_tokens):
    """Keys or values of some tokens, token-major."""
    return torch.randn(num_tokens, HEADS, DIM).to(DTYPE)


def stock(cls, length, **facts):
    """One of transformers' layers, filled."""
    layer = cls(**facts)
    chunk = torch.randn(1, HEADS, 1024, DIM).to(DTYPE)
    for _ in range(length // 1024):
        layer.update(chunk, chunk)
    token = torch.randn(1, HEADS, 1, DIM).to(DTYPE)

    def update():
        layer.update(token, token)

    return layer, update


def filled(kinds, max_context, length, **facts):
    """A store's session with `length` tokens in it."""
    geometry = ModelGeometry.uniform(
        kinds, sliding_window=WINDOW, num_kv_heads=HEADS, head_dim=DIM, dtype="float16"
    )
    session = KVStore(geometry, max_context=max_context, **facts).open()
    chunk = rows(1024)
    for _ in range(length // 1024):
        with session.step(1024) as step:
            for layer in range(len(kinds)):
                step.write(layer, chunk, chunk)
    return session


def plane_update(session):
    """A row written to a plane by the kernel alone, and the window it gives."""
    plane = session.planes[0]
    cursor = session.cursors[session.geometry.groups[0].id].copy()
    cursor.max_context = None
    token = rows(1)[None]

    def update():
        plane.put(cursor.append(cursor.next_position), token, token)
        live = cursor.live
        return plane.only_spans(cursor.rows_of(live.start, live.stop))

    if session.geometry.layers[0].kind == "full_attention":
        position = session.position

        def rewrite():
            vectorized.store_run(plane, range(position, position + 1), token, token)
            return plane.only_spans([range(position + 1)])

        return rewrite
    return update


def step_update(session):
    """A token through the public step: checks, reserve, journal, commit. One layer's share."""
    token = rows(1)
    layers = range(len(session.geometry.layers))
    position = session.position

    def update():
        with session.step(1) as step:
            for layer in layers:
                step.write(layer, token, token)
                step.view(layer)
        if session.position == session.store.max_context:
            session.rewind(position)

    return update


def updates():
    """One-token updates, by layer kind and depth."""
    result = {}
    layers = 8
    sliding = ["sliding_attention"] * layers
    for memory in ("heap", "mapped"):
        session = filled(sliding, 1 << 40, 4096, memory=memory)
        result[f"kvplane ring, plane alone, {memory}"] = plane_update(session)
        result[f"kvplane ring, step of {layers}, {memory}"] = step_update(session)
    _, result["DynamicSlidingWindowLayer"] = stock(
        DynamicSlidingWindowLayer, 4096, sliding_window=WINDOW
    )
    _, result["StaticSlidingWindowLayer"] = stock(
        StaticSlidingWindowLayer, 4096, max_cache_len=1 << 20, sliding_window=WINDOW
    )
    timings = {f"window {WINDOW}": _per_layer(paired(result), layers)}
    for depth in DEPTHS:
        calls = {}
        full = ["full_attention"]
        session = filled(full, depth + 4096, depth)
        calls["kvplane full plane, plane alone"] = plane_update(session)
        calls["kvplane full plane, step of 1"] = step_update(session)
        _, calls["DynamicLayer"] = stock(DynamicLayer, depth)
        static, grow = stock(StaticLayer, depth, max_cache_len=depth + 200_000)
        calls["StaticLayer"] = grow
        timings[f"full, {depth} rows"] = paired(calls, seconds=0.1)
        del static, session
    return timings


def _per_layer(timings, layers):
    return {
        name: type(timing)(*(part / layers for part in timing)) if "step of 8" in name else timing
        for name, timing in timings.items()
    }


def memory_held():
    """Pss against the plan, each memory in a process of its own."""
    found = {}
    for memory in ("heap", "mapped"):
        done = subprocess.run(
            [sys.executable, __file__, "--held", memory], check=True, capture_output=True, cwd=ROOT
        )
        found[memory] = json.loads(done.stdout)
    return found


def held_by(memory):
    """What a Muse-Glimmer-shaped session of 4,096 tokens adds to this process."""
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 13
    # what the first session brings along stays: code, caches, the allocator's arenas
    filled(kinds, 131_072, 1024, memory=memory).close()
    gc.collect()
    before = pss_nbytes()
    session = filled(kinds, 131_072, 4096, memory=memory)
    gc.collect()
    held = pss_nbytes() - before
    report = session.store.memory()
    return {"planned": report.pages_held, "rows": report.total.rows_held, "pss": held}


def snapshots():
    """Snapshot and restore of a 4,096-token session against copies of as many bytes."""
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 13
    session = filled(kinds, 131_072, 4096)
    heap = KVStore(session.geometry, max_context=131_072, memory="heap")
    kept = session.snapshot()
    source = torch.randint(0, 255, (kept.nbytes,), dtype=torch.uint8)
    target = torch.empty_like(source)

    store = session.store
    on_heap, in_files = heap.restore(kept), store.restore(kept)

    def restore(store):
        store.restore(kept).close()

    timings = paired(
        {
            "memcpy into touched memory": lambda: target.copy_(source),
            "copy into fresh memory": source.clone,
            "snapshot": lambda: session.snapshot().nbytes,
            "restore into fresh heap, and closed": lambda: restore(heap),
            "restore into fresh memory files, and closed": lambda: restore(session.store),
            "restore into a session of the heap": lambda: heap.restore(kept, into=on_heap),
            "restore into a session of memory files": lambda: store.restore(kept, into=in_files),
        },
        rounds=3,
        seconds=0.5,
    )
    return kept.nbytes, timings


def appends():
    """131,072 single tokens into one full plane and one ring."""
    import time  # noqa: PLC0415

    session = filled(["sliding_attention", "full_attention"], 131_072, 0)
    token = rows(1)
    begin = time.perf_counter()
    for _ in range(131_072):
        with session.step(1) as step:
            step.write(0, token, token)
            step.write(1, token, token)
    return time.perf_counter() - begin


def run(threads):
    """Everything at one thread count, as plain data and as tables."""
    torch.set_num_threads(threads)
    timings = updates()
    pages = []
    for what, calls in timings.items():
        stock_name = next(name for name in calls if name.startswith("Dynamic"))
        pages.append(
            f"### {what}, {threads} thread{'s' * (threads > 1)}\n\n"
            + table(
                ["one-token update of one layer", "time", f"{stock_name} over it"],
                [
                    [name, micros(timing), f"{calls[stock_name].median / timing.median:.1f}"]
                    for name, timing in calls.items()
                ],
            )
        )
    data = {
        what: {name: timing._asdict() for name, timing in calls.items()}
        for what, calls in timings.items()
    }
    return data, "\n".join(pages)


def main():
    """Write docs/benchmarks/store*.json and .md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--once", action="store_true", help="only the allocator as it is set")
    parser.add_argument("--held", help="only what a session in this memory holds")
    options = parser.parse_args()
    if options.held:
        print(json.dumps(held_by(options.held)))
        return
    raised = "MALLOC_MMAP_THRESHOLD_" in os.environ
    name = "store-raised-mmap-threshold" if raised else "store"
    data, pages = {}, []
    for threads in (1, 2):
        data[f"threads_{threads}"], page = run(threads)
        pages.append(page)
    nbytes, timings = snapshots()
    pages.append(
        f"### Snapshot and restore of {nbytes:,} bytes\n\n"
        + table(
            ["what", "time", "GB/s"],
            [[what, micros(t), f"{nbytes / t.median / 1e9:.2f}"] for what, t in timings.items()],
        )
    )
    data["snapshot"] = {"nbytes": nbytes, **{what: t._asdict() for what, t in timings.items()}}
    held = memory_held()
    pages.append(
        "### Memory held by a session of 4,096 tokens, Muse Glimmer's shape\n\n"
        + table(
            ["memory", "rows", "pages planned", "Pss measured"],
            [
                [what, f"{h['rows']:,}", f"{h['planned']:,}", f"{h['pss']:,}"]
                for what, h in held.items()
            ],
        )
    )
    data["memory"] = held
    seconds = appends()
    pages.append(f"131,072 single-token steps over two layers took {seconds:.1f} s.\n")
    data["appends_s"] = seconds
    title = "The store beside transformers' cache layers"
    if raised:
        title += ", MALLOC_MMAP_THRESHOLD_ raised"
    write(name, title, "make bench", data, "\n".join(pages))
    if not raised and not options.once:
        large = str(4 * 10**9)
        env = {
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": large,
            "MALLOC_TRIM_THRESHOLD_": large,
        }
        subprocess.run([sys.executable, __file__], env=env, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
