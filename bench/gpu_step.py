"""A whole decode step at Muse Glimmer's 30B shape: graphs, compiled layers, the stock caches."""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_model import called, dynamic, hybrid, static

from kvplane.integrations.graphs import DecodeGraph

CONTEXTS = (2047, 32_768, 131_000)
STEPS = 24
LAYERS = ("captured", "compiled")


def per_step(step: Callable[[], object], count: int = STEPS) -> dict[str, float]:
    """Milliseconds of a step on the device: median, least and most of three rounds."""
    step()
    taken = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count // 3):
            step()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / (count // 3))
    return {"median": statistics.median(taken), "least": min(taken), "most": max(taken)}


def steps(model: Any, contexts: tuple[int, ...] = CONTEXTS) -> dict[str, Any]:
    """Each way to make a step, at each context, the head included."""
    found: dict[str, Any] = {}
    ids = torch.tensor([[17]], device="cuda")
    for context in contexts:
        times: dict[str, Any] = {}
        for name, layers in (("graph", "captured"), ("graph, layers compiled", "compiled")):
            times[name] = graphed(model, context, layers)
            print(context, name, times[name], flush=True)
        part = hybrid(model, context)
        times["kvplane, no graph"] = per_step(partial(called, model, part, ids), 6)
        part.close()
        del part
        cleared()
        model.set_attn_implementation("sdpa")
        for name, make in (("DynamicCache", dynamic), ("StaticCache", static)):
            stock = make(model, context)
            times[name] = per_step(partial(called, model, stock, ids), 6)
            print(context, name, times[name], flush=True)
            del stock
            cleared()
        model.set_attn_implementation("kvplane")
        found[f"{context:,}"] = times
    return found


def graphed(model: Any, context: int, layers: str) -> dict[str, Any]:
    """A graph's step; how long the first took; whether its bits are those without a graph."""
    cache = hybrid(model, context)
    twin = cache.fork()
    begin = time.perf_counter()
    graph = DecodeGraph(model, cache, layers=layers)
    first = graph.step([17]).clone()
    torch.cuda.synchronize()
    ready = time.perf_counter() - begin
    # against the model's own call, or the compiled step without a graph
    ids = torch.tensor([[17]], device="cuda")
    wanted = called(model, twin, ids) if layers == "captured" else graph.launched([17], twin)
    equal = torch.equal(first.view(torch.uint8), wanted.view(torch.uint8))
    taken = per_step(partial(graph.step, [17]))
    del graph
    cache.close()
    twin.close()
    cleared()
    return {**taken, "ready_s": ready, "equal_bits_without_graph": equal}


def headless(model: Any, contexts: tuple[int, ...] = CONTEXTS) -> dict[str, Any]:
    """The same graphs of the text model alone, without the head."""
    text = model.model.language_model
    return {
        f"{context:,}": {layers: graphed(text, context, layers) for layers in LAYERS}
        for context in contexts
    }


def cleared() -> None:
    """Nothing of the last case is left."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def mixed(model: Any, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Sessions of other lengths in one step."""
    found = {}
    for layers in LAYERS:
        caches = [hybrid(model, length) for length in lengths]
        graph = DecodeGraph(model, caches, layers=layers)
        tokens = [17] * len(lengths)
        graph.step(tokens)
        found[layers] = per_step(partial(graph.step, tokens))
        print("mixed", layers, found[layers], flush=True)
        del graph, caches
        cleared()
    return found
