"""Generation on the store beside transformers' caches: tokens a second, time to a first token.

glimmer-nano, and a random model with Muse Glimmer's layer shapes (as many layers as fit here).
One process; alternating rounds; medians.
"""

import statistics
import tempfile
import time

import torch
from measure import pss_nbytes, table, write
from transformers import (
    DynamicCache,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    StaticCache,
)

from kvplane.integrations.transformers import HybridCache
from kvplane.integrations.transformers.calls import cache_keyword, prefill
from kvplane.integrations.transformers.conversation import converse
from kvplane.integrations.transformers.loading import SHIPPED, load_model
from kvplane.models.nano import BOS, encode, heldout_text
from kvplane.pack import PrefixCache
from kvplane.schedule import canonical

ROUNDS = 3
DECODED = 32


def wide_model(layers=8):
    """Muse Glimmer's layer shapes (window 2,048, 2 KV heads of 128) with random weights."""
    config = MuseGlimmerConfig(
        text_config={
            "vocab_size": 512,
            "hidden_size": 512,
            "intermediate_size": 512,
            "num_hidden_layers": layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "sliding_window": 2048,
            "max_position_embeddings": 40_960,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    )
    torch.manual_seed(0)
    return MuseGlimmerForConditionalGeneration(config).to(torch.bfloat16).eval()


@torch.no_grad()
def decoded(model, cache, ids, num_tokens):
    """Prefill in chunks of 256, then so many tokens; seconds of each part."""
    keyword = cache_keyword(model)
    begin = time.perf_counter()
    for part in canonical(0, len(ids)):
        tokens = torch.tensor([ids[part.start : part.stop]])
        out = model(input_ids=tokens, **{keyword: cache}, use_cache=True, logits_to_keep=1)
    filled = time.perf_counter()
    for _ in range(num_tokens):
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        out = model(input_ids=token, **{keyword: cache}, use_cache=True, logits_to_keep=1)
    return filled - begin, time.perf_counter() - filled


def rates(model, prompt):
    """Tokens a second and memory of each cache, at one prompt length."""
    makers = {
        "kvplane HybridCache": lambda: HybridCache(model),
        "DynamicCache": lambda: DynamicCache(config=model.config),
        "StaticCache": lambda: StaticCache(
            config=model.config, max_cache_len=len(prompt) + DECODED + 1
        ),
    }
    taken = {name: [] for name in makers}
    held = dict.fromkeys(makers, 0)
    for number in range(ROUNDS):
        names = list(makers) if number % 2 == 0 else list(makers)[::-1]
        for name in names:
            before = pss_nbytes()
            cache = makers[name]()
            taken[name].append(decoded(model, cache, prompt, DECODED))
            held[name] = max(held[name], pss_nbytes() - before)
            if isinstance(cache, HybridCache):
                cache.close()
            del cache
    return {
        name: {
            "prefill_s": statistics.median(fill for fill, _ in runs),
            "tokens_per_s": DECODED / statistics.median(decode for _, decode in runs),
            "pss_nbytes": held[name],
        }
        for name, runs in taken.items()
    }


def first_token(named, num_tokens):
    """Seconds to a first token: cold, and warm from a cut of all but the last block."""
    ids = [BOS, *encode(heldout_text())][:num_tokens]
    shared = num_tokens - 256
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as folder:
        prefixes = PrefixCache(folder + "/root", named.fingerprint)
        talk = converse(named, prefixes=prefixes)
        talk.read(ids[:shared])
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            prefill(named.model, HybridCache(named.model), ids)
            cold.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            talk = converse(named, prefixes=prefixes)
            talk.begin(ids)
            talk.prefixes = None
            talk.read(ids)
            warm.append(time.perf_counter() - begin)
    return statistics.median(cold), statistics.median(warm)


def main():
    """Write docs/benchmarks/generation.json and .md."""
    torch.set_num_threads(2)
    named = load_model(SHIPPED)
    nano = [BOS, *encode(heldout_text())]
    found, pages = {}, []
    plans = [
        ("glimmer-nano, f32", named.model, nano, (2048, 8192, 32_768)),
        ("window 2,048, 8 layers, bf16", wide_model(), [7] * 40_000, (2048, 8192)),
    ]
    for what, model, text, lengths in plans:
        found[what] = {}
        rows = []
        for length in lengths:
            result = rates(model, text[:length])
            found[what][str(length)] = result
            stock = result["DynamicCache"]["tokens_per_s"]
            rows += [
                [
                    f"{length:,}",
                    name,
                    f"{facts['prefill_s']:.2f}",
                    f"{facts['tokens_per_s']:.1f}",
                    f"{facts['tokens_per_s'] / stock:.2f}",
                    f"{facts['pss_nbytes'] / 1e6:.1f}",
                ]
                for name, facts in result.items()
            ]
        head = ["prompt", "cache", "prefill s", "tokens/s", "over DynamicCache", "Pss MB"]
        pages.append(f"### {what}, batch 1, 2 threads\n\n" + table(head, rows))
    rows = []
    found["first_token_s"] = {}
    for length in (1024, 8192, 32_768):
        cold, warm = first_token(named, length)
        found["first_token_s"][str(length)] = {"cold": cold, "warm": warm}
        rows.append([f"{length:,}", f"{cold:.3f}", f"{warm:.3f}", f"{cold / warm:.1f}"])
    head = ["prompt", "cold s", "warm s", "cold over warm"]
    pages.append(
        "### Time to a first token, glimmer-nano, all but 256 tokens kept\n\n" + table(head, rows)
    )
    write(
        "generation",
        "Generation beside transformers' caches",
        "make bench",
        found,
        "\n".join(pages),
    )


if __name__ == "__main__":
    main()
