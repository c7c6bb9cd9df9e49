"""The caches that generation is measured with: made, filled without running a model, weighed.

A cache's speed and memory do not depend on what the rows say: putting random ones into it takes
seconds where a model would take minutes to make them.
"""

import ctypes
import gc
import multiprocessing
import threading

import torch
from measure import pss_nbytes
from transformers import DynamicCache, StaticCache

from kvplane.integrations.transformers import HybridCache
from kvplane.schedule import canonical

OURS, UNCHECKED, ORDER, DYNAMIC, STATIC = (
    "kvplane HybridCache",
    "kvplane, made for the config: no checks",
    "kvplane, attention in the store's order",
    "DynamicCache",
    "StaticCache",
)
WATCHING = (OURS, ORDER)
ROOM = 128
# glibc's mallopt: blocks from this size on are pages of their own, and go back when they are freed
M_MMAP_THRESHOLD, OWN_PAGES = -3, 128 << 10


def made(name, model, length):
    """An empty cache with room for a prompt and `ROOM` tokens more."""
    if name in WATCHING:
        return HybridCache(model, attention="kvplane" if name == ORDER else "view")
    if name == UNCHECKED:
        return HybridCache(model.config)
    if name == DYNAMIC:
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=length + ROOM)


def shape_of(model):
    """Layers, KV heads and head dimension."""
    text = model.config.get_text_config(decoder=True)
    return text.num_hidden_layers, text.num_key_value_heads, text.head_dim


def drawn(model, num_tokens):
    """One call's rows, layer by layer: keys and values, `[1, kv_heads, tokens, dim]`."""
    layers, heads, dim = shape_of(model)
    for layer in range(layers):
        key, value = (
            torch.randn(1, heads, num_tokens, dim, dtype=model.dtype) for _ in ("key", "value")
        )
        yield layer, key, value


def put(cache, model, num_tokens):
    """One call's rows in every layer, as a model would hand them over."""
    for layer, key, value in drawn(model, num_tokens):
        cache.update(key, value, layer)


def filled(name, model, length):
    """A cache with random rows of so many tokens; the same ones from the same seed."""
    cache = made(name, model, length)
    if name not in WATCHING:
        for part in canonical(0, length):
            put(cache, model, len(part))
        return cache
    # a cache that watches its model takes rows from its calls only, or a whole session
    session = cache.made_store(model.dtype, "cpu").open([])
    for part in canonical(0, length):
        with session.step([7] * len(part)) as step:
            for layer, key, value in drawn(model, len(part)):
                step.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    cache.adopt(session)
    return cache


class Sampler(threading.Thread):
    """The largest Pss seen while it runs."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak = 0
        self._ended = threading.Event()

    def run(self):
        """Look again and again."""
        while not self._ended.is_set():
            self.peak = max(self.peak, pss_nbytes())

    def end(self):
        """Stop looking; the largest seen."""
        self._ended.set()
        self.join()
        return self.peak


def weighed(name, model, length, chunk):
    """Bytes a cache holds after a prompt and eight tokens, and at most meanwhile, by Pss.

    In a process of its own, whose allocator has no past. Nothing may have run in several threads
    before in this one.
    """
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def weigh():
        torch.set_num_threads(1)
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_PAGES)
        gc.collect()
        before = pss_nbytes()
        sampler = Sampler()
        sampler.start()
        cache = made(UNCHECKED if name == OURS else name, model, length)
        for part in canonical(0, length, chunk=chunk):
            put(cache, model, len(part))
        after_prompt = pss_nbytes() - before
        for _ in range(8):
            put(cache, model, 1)
        gc.collect()
        theirs.send((after_prompt, pss_nbytes() - before, sampler.end() - before))

    process = context.Process(target=weigh)
    process.start()
    found = mine.recv()
    process.join()
    return dict(zip(("after_prompt", "held", "peak"), found, strict=True))
