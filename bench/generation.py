"""Generation on the store beside transformers' caches: tokens a second, memory, first tokens.

glimmer-nano, and a random model with Muse Glimmer's layer shapes (as many layers as fit here). One
process and alternating rounds for whatever is compared; medians; each figure only after the logits
were bitwise those of DynamicCache.
"""

import argparse
import statistics
import tempfile
import time
from typing import NamedTuple

import torch
from caches import DYNAMIC, ORDER, OURS, STATIC, UNCHECKED, filled, made, weighed
from measure import table, write
from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration, logging

from kvplane.integrations.transformers import HybridCache, prefill
from kvplane.integrations.transformers.calls import cache_keyword
from kvplane.integrations.transformers.conversation import converse
from kvplane.integrations.transformers.loading import SHIPPED, load_model
from kvplane.models.nano import BOS, encode, heldout_text
from kvplane.pack import PrefixCache
from kvplane.schedule import CHUNK, canonical

MEGA = 1e6
NOTES = """Tokens a second: behind a prompt of random rows. MB: Pss of the cache's rows alone, in a
process of its own, after the prompt and eight tokens, and the most seen meanwhile; the prompt in
chunks of 256, or in one call as `generate` reads it. A StaticCache's pages come as they are
written, as the others' do. It always has a mask: transformers then packs the query heads of a
group into one product. Without one DynamicCache and HybridCache get torch's own grouped attention,
bit for bit alike. Warm seconds include loading and verifying; those of the agent's turns also
writing the cuts of the next.
"""


class Plan(NamedTuple):
    """What is measured.

    Args:
        lengths: tokens of prompts.
        prefilled: those of them that each model really reads, by model.
        first: tokens of prompts whose first token is timed.
        rounds: of each comparison.
        decoded: tokens a round.
        turns: of the agent's conversation.
        layers: of the wide model.
    """

    lengths: tuple[int, ...] = (2048, 8192, 32_768)
    prefilled: tuple[tuple[int, ...], ...] = ((2048, 8192, 32_768), (2048,))
    first: tuple[int, ...] = (1024, 8192, 32_768)
    rounds: int = 5
    decoded: int = 8
    turns: int = 10
    layers: int = 8


QUICK = Plan((512,), ((512,), (512,)), (1024,), rounds=2, decoded=4, turns=3, layers=4)


def wide_model(layers):
    """Muse Glimmer's layer shapes (window 2,048, 32 heads, 2 KV heads of 128), random weights."""
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


def called(model, cache, ids):
    """The logits of one call's last token."""
    facts = {cache_keyword(model): cache, "use_cache": True, "logits_to_keep": 1}
    return model(input_ids=torch.tensor([ids]), **facts).logits[0, -1]


def check_equal(logits):
    """Refuse to report a figure of logits that are not the stock cache's."""
    for name in (OURS, UNCHECKED):
        if name in logits and not torch.equal(logits[name], logits[DYNAMIC]):
            message = f"{name}: other logits than DynamicCache's"
            raise SystemExit(message)


@torch.no_grad()
def decoding(model, length, plan):
    """Tokens a second of each cache behind a prompt, in alternating rounds."""
    caches, implementation = {}, model.config._attn_implementation  # noqa: SLF001 - its only name
    for name in (OURS, UNCHECKED, DYNAMIC, STATIC, ORDER):
        torch.manual_seed(length)
        caches[name] = filled(name, model, length)
        called(model, caches[name], [7])
    rates = {name: [] for name in caches}
    for number in range(plan.rounds):
        logits = {}
        for name in list(caches)[:: 1 if number % 2 == 0 else -1]:
            # the store's order takes the place of transformers' attention, in the model
            model.set_attn_implementation("kvplane" if name == ORDER else implementation)
            begin = time.perf_counter()
            for token in range(plan.decoded):
                logits[name] = called(model, caches[name], [token])
            rates[name].append(plan.decoded / (time.perf_counter() - begin))
        check_equal(logits)
    model.set_attn_implementation(implementation)
    return {name: statistics.median(found) for name, found in rates.items()}


@torch.no_grad()
def prefilling(model, text, length, rounds):
    """Seconds of each cache to read a prompt in chunks of 256."""
    taken = {name: [] for name in (OURS, DYNAMIC, STATIC)}
    for number in range(rounds):
        logits = {}
        for name in list(taken)[:: 1 if number % 2 == 0 else -1]:
            cache = made(name, model, length)
            begin = time.perf_counter()
            for part in canonical(0, length):
                logits[name] = called(model, cache, text[part.start : part.stop])
            taken[name].append(time.perf_counter() - begin)
            del cache
        check_equal(logits)
    return {name: statistics.median(found) for name, found in taken.items()}


def first_token(named, num_tokens, rounds):
    """Seconds to a first token: cold, and warm from a cut of all but the last chunk."""
    ids = [BOS, *encode(heldout_text())][:num_tokens]
    shared = num_tokens - CHUNK
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as folder:
        prefixes = PrefixCache(folder + "/root", named.fingerprint)
        for _ in range(rounds):
            cache = HybridCache(named.model)
            begin = time.perf_counter()
            prefill(named.model, cache, ids[:shared])
            read = time.perf_counter() - begin
            prefixes.publish(cache.session, ids[:shared])
            begin = time.perf_counter()
            expected = prefill(named.model, cache, ids)
            cold.append(read + time.perf_counter() - begin)
            cache.close()
        for _ in range(rounds):
            begin = time.perf_counter()
            talk = converse(named, prefixes=prefixes)
            talk.begin(ids, strict=True)
            logits = prefill(named.model, talk.cache, ids)
            warm.append(time.perf_counter() - begin)
            check_equal({OURS: logits, DYNAMIC: expected})
    return statistics.median(cold), statistics.median(warm)


def agent(named, num_turns):
    """An agent's turns: tokens sent and reused, seconds to a first token warm and cold.

    Every turn sends the whole history; in the middle one a message two turns before was edited.
    """
    text = encode(heldout_text())
    rules, asked = text[:4000], [text[first : first + 160] for first in range(4000, 9000, 160)]
    history, found = [], []
    with tempfile.TemporaryDirectory() as folder:
        prefixes = PrefixCache(folder + "/root", named.fingerprint)
        for turn in range(num_turns):
            edited = turn == num_turns // 2 + 1
            if edited:
                history[turn - 2] = (asked[20], history[turn - 2][1])
            sent = [BOS, *rules]
            for question, answer in [*history, (asked[turn], [])]:
                sent += [*question, *answer]
            begin = time.perf_counter()
            prefill(named.model, HybridCache(named.model), sent)
            cold = time.perf_counter() - begin
            begin = time.perf_counter()
            talk = converse(named, prefixes=prefixes)
            talk.begin(sent)
            talk.read(sent)
            warm = time.perf_counter() - begin
            history.append((asked[turn], list(talk.say(40))))
            talk.publish()
            origin = talk.origin
            facts = {"sent": len(sent), "reused": origin.tokens, "cold_s": cold, "warm_s": warm}
            found.append({**facts, "edited": edited, "reason": origin.reason})
            talk.cache.close()
    return found


def of_model(model, text, plan, prefilled, weights):
    """Every cache's figures at every length, and rows of a table."""
    found, rows = {}, []
    for length in plan.lengths:
        rates = decoding(model, length, plan)
        rounds = 3 if length <= min(plan.lengths) else 1
        seconds = prefilling(model, text, length, rounds) if length in prefilled else {}
        found[str(length)] = {
            name: {
                "tokens_per_s": rate,
                "prefill_s": seconds.get(name),
                "nbytes": weights.get((name, length)),
            }
            for name, rate in rates.items()
        }
        for name, facts in found[str(length)].items():
            memory = facts["nbytes"]
            cells = [
                f"{memory[way][what] / MEGA:.1f}" if memory else ""
                for way in ("chunks", "at once")
                for what in ("held", "peak")
            ]
            read = "" if facts["prefill_s"] is None else f"{facts['prefill_s']:.2f}"
            rate = facts["tokens_per_s"]
            ratio = f"{rate / rates[DYNAMIC]:.2f}"
            rows.append([f"{length:,}", name, f"{rate:.1f}", ratio, read, *cells])
    return found, rows


def weigh_all(model, plan):
    """Bytes of each cache at each length, its prompt read in chunks and at once."""
    return {
        (name, length): {
            "chunks": weighed(name, model, length, CHUNK),
            "at once": weighed(name, model, length, length),
        }
        for name in (OURS, DYNAMIC, STATIC)
        for length in plan.lengths
    }


def main():
    """Write docs/benchmarks/generation.json and .md; --quick prints a small one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small one, printed, not written")
    quick = parser.parse_args().quick
    plan = QUICK if quick else Plan()
    logging.set_verbosity_error()
    begin = time.perf_counter()
    torch.set_num_threads(1)
    named = load_model(SHIPPED)
    models = {
        "glimmer-nano, f32": (named.model, [BOS, *encode(heldout_text())]),
        f"window 2,048, {plan.layers} layers, bf16": (wide_model(plan.layers), [7] * 40_000),
    }
    # in forked processes: before anything here runs in several threads
    weights = {what: weigh_all(model, plan) for what, (model, _) in models.items()}
    torch.set_num_threads(2)
    found, pages = {}, []
    head = ["prompt", "cache", "tokens/s", "over DynamicCache", "prefill s"]
    head += ["MB held", "MB peak", "MB held, prompt at once", "MB peak, prompt at once"]
    for (what, (model, text)), prefilled in zip(models.items(), plan.prefilled, strict=True):
        found[what], rows = of_model(model, text, plan, prefilled, weights[what])
        pages.append(f"## {what}, batch 1, 2 threads\n\n" + table(head, rows))
    rows, found["first_token_s"] = [], {}
    for length in plan.first:
        cold, warm = first_token(named, length, 3 if length < max(plan.lengths) else 1)
        found["first_token_s"][str(length)] = {"cold": cold, "warm": warm}
        rows.append([f"{length:,}", f"{cold:.3f}", f"{warm:.3f}", f"{cold / warm:.1f}"])
    title = f"## First token, glimmer-nano, all but {CHUNK} tokens kept in a root of packs\n\n"
    pages.append(title + table(["prompt", "cold s", "warm s", "cold over warm"], rows))
    found["agent"] = agent(named, plan.turns)
    rows = [
        [
            f"{turn}{', a message edited' if facts['edited'] else ''}",
            f"{facts['sent']:,}",
            f"{facts['reused']:,}",
            f"{facts['cold_s']:.3f}",
            f"{facts['warm_s']:.3f}",
            f"{facts['cold_s'] / facts['warm_s']:.1f}",
        ]
        for turn, facts in enumerate(found["agent"])
    ]
    head = ["turn", "tokens sent", "reused", "cold s", "warm s", "cold over warm"]
    pages.append("## An agent that sends its history with every turn\n\n" + table(head, rows))
    found["seconds"] = time.perf_counter() - begin
    page = "\n".join([NOTES, f"{found['seconds']:.0f} s in all.\n", *pages])
    if quick:
        print(page)
    else:
        write("generation", "Generation beside transformers' caches", "make bench", found, page)


if __name__ == "__main__":
    main()
