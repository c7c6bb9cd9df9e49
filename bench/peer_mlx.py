"""One round of mlx-lm's caches, run by peers.py in their own environment: a line of JSON."""

import json
import sys
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache, save_prompt_cache

# as in peers.py
WINDOW, DEPTH, HEADS, DIM, RINGS, FULL, TOKENS, LAYERS = 2048, 8192, 2, 128, 6, 2, 100, 8


def filled(cache):
    """A cache after DEPTH tokens, in chunks of 256."""
    chunk = mx.random.normal((1, HEADS, 256, DIM)).astype(mx.float16)
    for _ in range(0, DEPTH, 256):
        mx.eval(cache.update_and_fetch(chunk, chunk))
    # a prompt's chunks leave a ring longer than its window; a token cuts it
    token = mx.random.normal((1, HEADS, 1, DIM)).astype(mx.float16)
    mx.eval(cache.update_and_fetch(token, token))
    return cache


def update(make):
    """Seconds of a token, a layer."""
    caches = [filled(make()) for _ in range(LAYERS)]
    token = mx.random.normal((1, HEADS, 1, DIM)).astype(mx.float16)
    mx.eval(token)
    begin = time.perf_counter()
    for _ in range(TOKENS):
        # as a model would: all layers are asked for at once
        mx.eval([cache.update_and_fetch(token, token) for cache in caches])
    return (time.perf_counter() - begin) / TOKENS / LAYERS


def main():
    """Every case, once."""
    file = str(Path(sys.argv[1]) / "session.safetensors")
    found = {"ring": update(lambda: RotatingKVCache(max_size=WINDOW))}
    found["full"] = update(KVCache)
    caches = [filled(RotatingKVCache(max_size=WINDOW)) for _ in range(RINGS)]
    caches += [filled(KVCache()) for _ in range(FULL)]
    begin = time.perf_counter()
    save_prompt_cache(file, caches)
    found["save"] = time.perf_counter() - begin
    begin = time.perf_counter()
    mx.eval([cache.state for cache in load_prompt_cache(file)])
    found["load"] = time.perf_counter() - begin
    print(json.dumps(found))


if __name__ == "__main__":
    main()
