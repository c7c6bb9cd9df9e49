"""An 8-layer cut of the 30B shape: StaticCache compiled whole, beside our graph; one JSON line."""

import json
import time
from functools import partial
from typing import Any

import torch
from gpu_model import big_model, cache_name, static
from gpu_step import graphed, per_step

CONTEXT = 2047
LAYERS = 8


def compiled_static(model: Any) -> dict[str, Any]:
    """Transformers' own way: a static cache, the forward compiled with reduced overhead."""
    model.set_attn_implementation("sdpa")
    cache = static(model, CONTEXT)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=False)
    ids = torch.tensor([[17]], device="cuda")
    name = cache_name(model)

    @torch.no_grad()
    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        forward(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache})

    begin = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    ready = time.perf_counter() - begin
    return {**per_step(step), "ready_s": ready}


def main() -> None:
    """Ours first: it must not wait for the other's compiler."""
    model = big_model(LAYERS)
    found = {
        "graph": graphed(model, CONTEXT, "captured"),
        "graph, layers compiled": graphed(model, CONTEXT, "compiled"),
    }
    print(json.dumps(found), flush=True)
    found["StaticCache, torch.compile"] = partial(compiled_static, model)()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
