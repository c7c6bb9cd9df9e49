"""Mapped memory: one-token updates that return the window, forks, and what forks hold.

One process, with one and with two threads. Each update is first compared with transformers' layer,
row for row; figures are medians of alternating rounds.
"""

import argparse
import gc
import os
import time

import torch
from measure import Timing, micros, paired, table, write
from store import DIM, DTYPE, HEADS, WINDOW, filled, plane_update, rows, step_update, stock
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from kvplane import KVStore, ModelGeometry
from kvplane.footprint import footprint

PRESET = "muse-glimmer-30b"
TOKENS = 131_072
FORKS = 8
# a public step has one beginning and one end for all layers: their share is a layer's
LAYERS = (1, 8, 39)


def check():
    """Refuse to time windows that are not the stock layer's, bit for bit, over a whole turn."""
    layer = DynamicSlidingWindowLayer(sliding_window=WINDOW)
    sessions = {
        memory: filled(["sliding_attention"], 1 << 40, 0, memory=memory)
        for memory in ("heap", "mapped")
    }
    for _ in range(2 * WINDOW + 10):
        key, value = rows(1), rows(1)
        expected = layer.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None])
        for memory, session in sessions.items():
            with session.step(1) as step:
                step.write(0, key, value)
                got = step.view(0).gather()
            same = all(
                torch.equal(mine.transpose(0, 1)[None], theirs)
                for mine, theirs in zip(got, expected, strict=True)
            )
            if not same:
                message = f"{memory}: another window at position {session.position - 1}"
                raise ValueError(message)


def updates(threads):
    """One-token sliding updates that return the logical window, a layer's share each."""
    torch.set_num_threads(threads)
    calls, layers = {}, {}
    for memory in ("mapped", "heap"):
        session = filled(["sliding_attention"], 1 << 40, 2 * WINDOW, memory=memory)
        calls[f"plane alone, {memory}"] = plane_update(session)
        for count in LAYERS:
            name = f"public step of {count}, {memory}"
            session = filled(["sliding_attention"] * count, 1 << 40, 2 * WINDOW, memory=memory)
            calls[name], layers[name] = step_update(session), count
    _, calls["DynamicSlidingWindowLayer"] = stock(
        DynamicSlidingWindowLayer, 2 * WINDOW, sliding_window=WINDOW
    )
    _, calls["StaticSlidingWindowLayer"] = stock(
        StaticSlidingWindowLayer, 2 * WINDOW, max_cache_len=1 << 20, sliding_window=WINDOW
    )
    return {
        name: Timing(*(part / layers.get(name, 1) for part in timing))
        for name, timing in paired(calls).items()
    }


def long_session(tokens):
    """A session of the preset with so many tokens in it."""
    geometry = ModelGeometry.preset(PRESET)
    store = KVStore(geometry, max_context=tokens + 256, dtype="float16", memory="mapped")
    session = store.open()
    chunk = rows(1024)
    for _ in range(tokens // 1024):
        write_all(session, chunk)
    return session


def write_all(session, rows_of_all):
    """A step of the same rows in every layer."""
    with session.step(len(rows_of_all)) as step:
        for layer in range(len(session.geometry.layers)):
            step.write(layer, rows_of_all, rows_of_all)


def read_all(session):
    """Every live row, once."""
    total = 0.0
    for layer in range(len(session.geometry.layers)):
        live = session.live(layer)
        for key, value in session.spans(layer, live.start, live.stop):
            # a byte of each page is what makes it be there
            for part in (key, value):
                total += float(part[..., 0].sum(dtype=torch.float32))
    return total


def timed(call):
    """Seconds of one call."""
    gc.collect()
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def forks(session, *, rounds=9):
    """A fork, its first read and its second, its first token, and its end."""
    chunk = rows(1)
    taken = {what: [] for what in PARTS}
    for _ in range(rounds):
        seconds, fork = timed(session.fork)
        taken["fork"].append(seconds)
        taken["the fork's first read of every row"].append(timed(lambda f=fork: read_all(f))[0])
        taken["its second"].append(timed(lambda f=fork: read_all(f))[0])
        taken["its first token, written"].append(timed(lambda f=fork: write_all(f, chunk))[0])
        taken["its next"].append(timed(lambda f=fork: write_all(f, chunk))[0])
        taken["its close"].append(timed(fork.close)[0])
    middle = {}
    for what, times in taken.items():
        times.sort()
        middle[what] = Timing(times[len(times) // 2], times[0], times[-1])
    return middle


PARTS = (
    "fork",
    "the fork's first read of every row",
    "its second",
    "its first token, written",
    "its next",
    "its close",
)


def held(session):
    """Bytes that a session and eight forks hold when each fork has written a token."""
    store = session.store
    backend = store.memory_choice.backend
    plan = footprint(
        session.geometry,
        context=session.position,
        max_context=store.max_context,
        page_nbytes=backend.page_nbytes,
        ring_page_nbytes=backend.ring_page_nbytes,
    )
    chunk = rows(1)
    opened = [session.fork() for _ in range(FORKS)]
    shared = os.fstat(session.arena.held()[0]).st_blocks * 512
    for fork in opened:
        write_all(fork, chunk)
    found = {
        "one session, planned": plan.session.pages_held,
        f"and {FORKS} forks, planned": plan.forks_held(FORKS, shares_pages=True),
        f"and {FORKS} forks, the file's blocks": shared,
        f"and {FORKS} forks after a token each, planned": plan.forks_held(
            FORKS, shares_pages=True, written=1
        ),
        "the same, by the store": store.memory().pages_held,
        "the same, the file's blocks": os.fstat(session.arena.held()[0]).st_blocks * 512,
        "the same on the heap, planned": plan.forks_held(FORKS, shares_pages=False, written=1),
    }
    for fork in opened:
        fork.close()
    return found


def main():
    """Write docs/benchmarks/mapped.json and .md; with --tokens, only print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, help="of the session that is forked; only print")
    options = parser.parse_args()
    tokens = options.tokens or TOKENS
    torch.set_num_threads(1)
    check()
    data, pages = {}, []
    for threads in (1, 2):
        timings = updates(threads)
        base = timings["DynamicSlidingWindowLayer"].median
        data[f"update_threads_{threads}"] = {name: t._asdict() for name, t in timings.items()}
        pages.append(
            f"### One-token update at window {WINDOW:,} that returns the window, "
            f"{HEADS} KV heads x {DIM}, {DTYPE}, {threads} thread{'s' * (threads > 1)}\n\n"
            "A public step of n layers is entered and committed once; a layer's share is shown.\n\n"
            + table(
                ["update of one layer", "time", "DynamicSlidingWindowLayer over it"],
                [
                    [name, micros(timing), f"{base / timing.median:.1f}"]
                    for name, timing in timings.items()
                ],
            )
        )
    torch.set_num_threads(1)
    session = long_session(tokens)
    timings = forks(session)
    data["fork"] = {"tokens": tokens, **{what: t._asdict() for what, t in timings.items()}}
    pages.append(
        f"### Fork of a session of {tokens:,} tokens, {PRESET}, float16\n\n"
        + table(["what", "time"], [[what, micros(timing)] for what, timing in timings.items()])
    )
    data["held"] = held(session)
    pages.append(
        f"### Bytes held by that session and {FORKS} forks\n\n"
        + table(["what", "bytes"], [[what, f"{size:,}"] for what, size in data["held"].items()])
    )
    if options.tokens:
        print("\n".join(pages))
        return
    write("mapped", "Mapped memory", "make bench", data, "\n".join(pages))


if __name__ == "__main__":
    main()
