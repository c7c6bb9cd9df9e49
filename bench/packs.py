"""Packs beside one BLAKE3 pass, a copy of memory and torch.save, on Muse-Glimmer-shaped sessions.

Everything is timed in alternating rounds of one process; files are in the page cache when they are
read. A save waits for the disk (fsync), torch.save does not. A load is timed into planes whose
memory was touched before, as a server's is, and into memory that was never touched.
"""

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3
from measure import Timing, table, write

from kvplane import KVStore, ModelGeometry
from kvplane.pack import Fingerprint, PrefixCache, load_session, open_root, save_session
from kvplane.pack.blob import blob_name
from kvplane.pack.chain import Chain, packed_ids
from kvplane.pack.documents import Node
from kvplane.pack.limits import BLOCK
from kvplane.pack.match import node_file

KINDS = (["sliding_attention"] * 3 + ["full_attention"]) * 13
GEOMETRY = ModelGeometry.uniform(
    KINDS, sliding_window=2048, num_kv_heads=2, head_dim=128, dtype="float16"
)
FINGERPRINT = Fingerprint.of(GEOMETRY, weights="none: random rows")
CHUNK = 256

# what is asked for
LOAD_TO_BLAKE3 = 0.6
WITH_CUT_NBYTES = 14_000_000
WITHOUT_CUT_NBYTES = 3_500_000
MATCH_S = 0.05


class Prepared(KVStore):
    """A store whose next load goes into planes that were made, and touched, before."""

    prepared = None

    def builder(self, cursors, **facts):
        """The builder that was prepared."""
        made, self.prepared = self.prepared, None
        return made or super().builder(cursors, **facts)

    def prepare(self, saved):
        """Touch every live row of a saved session's planes before they are wanted."""
        made = super().builder(saved.cursors, tokens=[saved.tokens])
        for layer in made.planes:
            live = made.cursors[GEOMETRY.group_of(layer).id].live
            for key, value in made.rows(layer, live.start, live.stop):
                key.fill_(0)
                value.fill_(0)
        self.prepared = made


class Case(NamedTuple):
    """A call to time, with what comes before and after it untimed."""

    call: object
    before: object = lambda: None
    after: object = id


def alternating(cases, rounds):
    """Each case timed once in every round, after one round that is not counted."""
    taken = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name in list(cases) if number % 2 else list(cases)[::-1]:
            case = cases[name]
            gc.collect()
            case.before()
            begin = time.perf_counter()
            result = case.call()
            seconds = time.perf_counter() - begin
            case.after(result)
            del result
            if number:
                taken[name].append(seconds)
    return taken


def timing(times):
    """Median, least and most."""
    return Timing(statistics.median(times), min(times), max(times))


def seconds_of(taken):
    """The timings of every case, for the report."""
    return {name: timing(times)._asdict() for name, times in taken.items()}


def grow(session, ids):
    """Add tokens in chunks; rows are random, so that no two blobs are equal."""
    for first in range(0, len(ids), CHUNK):
        some = ids[first : first + CHUNK]
        noise = torch.randn(len(some) + 64, 2, 128).half()
        with session.step(some) as step:
            for layer in range(len(KINDS)):
                step.write(layer, noise[layer : layer + len(some)], noise[-len(some) :])
    return session


def rows_of(session):
    """Every live row, copied, as torch.save would be given it."""
    found = {}
    for layer in session.planes:
        live = session.live(layer)
        spans = session.spans(layer, live.start, live.stop)
        for what, parts in zip(("key", "value"), zip(*spans, strict=True), strict=True):
            found[f"{layer}.{what}"] = torch.cat(parts)
    return found


def saving_and_loading(folder, num_tokens, rounds):
    """Seconds of a save and of loads of a session of so many tokens, and of what they rest on."""
    store = Prepared(GEOMETRY, max_context=num_tokens, memory="heap")
    session = grow(store.open(tokens=[]), list(range(num_tokens)))
    kept = open_root(folder / "kept", create=True)
    written = save_session(kept, "s", session, FINGERPRINT)
    rows = rows_of(session)
    nbytes = sum(tensor.nbytes for tensor in rows.values())
    source = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    target = np.ones_like(source)
    whole = folder / "whole.pt"
    torch.save(rows, whole)
    saved, loaded = load_session(kept, "s", store, FINGERPRINT)
    for name, tensor in rows_of(loaded.session).items():
        if not torch.equal(tensor.view(torch.int16), rows[name].view(torch.int16)):
            message = f"{name} came back with other bits"
            raise ValueError(message)
    loaded.session.close()

    def save():
        session.ledger.spans.clear()
        return save_session(open_root(folder / "new", create=True), "s", session, FINGERPRINT)

    def load():
        return load_session(kept, "s", store, FINGERPRINT)[1].session

    taken = alternating(
        {
            "save": Case(save, after=lambda _: shutil.rmtree(folder / "new")),
            "load, touched": Case(load, lambda: store.prepare(saved), lambda made: made.close()),
            "load, untouched": Case(load, after=lambda made: made.close()),
            "BLAKE3": Case(lambda: blake3(source).digest()),
            "memcpy": Case(lambda: np.copyto(target, source)),
            "torch.save": Case(lambda: torch.save(rows, folder / "new.pt")),
            "torch.load": Case(lambda: torch.load(whole)),
        },
        rounds,
    )
    session.close()
    for path in (folder / "kept", folder / "whole.pt", folder / "new.pt"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {
        "tokens": num_tokens,
        "nbytes": nbytes,
        "blobs": written.blobs_written,
        "file_nbytes": written.nbytes_written,
        "seconds": seconds_of(taken),
        # of one round each, so that a machine that is slow for a while is slow for both
        "load_to_blake3": statistics.median(
            blake / load
            for blake, load in zip(taken["BLAKE3"], taken["load, touched"], strict=True)
        ),
    }


def further_tokens(folder):
    """Bytes that 256 further tokens add, where a cut is taken and where none is."""
    prefixes = PrefixCache(folder / "cuts", FINGERPRINT)
    store = KVStore(GEOMETRY, max_context=16_384, memory="heap")
    ids = list(range(4096))
    session = grow(store.open(tokens=[]), ids)
    cut, _ = prefixes.publish(session, ids)
    ids += range(4096, 4352)
    _, written = prefixes.publish(grow(session, ids[4096:]), ids)
    with_cut = written.nbytes_written
    before = prefixes.match([*ids, 0], store).cut.state.blobs | cut.state.blobs
    ids += range(4352, 8192)
    after, _ = prefixes.publish(grow(session, ids[4352:]), ids)
    full = next(group.id for group in GEOMETRY.groups if not group.is_sliding)
    new = {span.blob for span in after.state.groups[full].spans} - before
    without = sum(prefixes.storage.size(blob_name(blob)) for blob in new) / len(new)
    session.close()
    shutil.rmtree(folder / "cuts")
    return {"with_cut": with_cut, "without_cut": round(without)}


def matching(folder, rounds):
    """Seconds of a match of a long prompt among many nodes."""
    small = ModelGeometry.uniform(
        ["sliding_attention", "full_attention"],
        sliding_window=2048,
        num_kv_heads=1,
        head_dim=1,
        dtype="float16",
    )
    fingerprint = Fingerprint.of(small, weights="none: zeros")
    prefixes = PrefixCache(folder / "many", fingerprint)
    store = KVStore(small, max_context=1 << 18, memory="heap")
    ids = [(7 * position) % 150_000 for position in range(131_072)]
    session = store.open(tokens=[])
    depth = 98_304
    row = torch.zeros(CHUNK, 1, 1).half()
    for first in range(0, depth, CHUNK):
        with session.step(ids[first : first + CHUNK]) as step:
            for layer in range(2):
                step.write(layer, row, row)
    prefixes.publish(session, ids[:depth])
    made = len(prefixes.storage.list("nodes"))
    for text in range(1, (10_000 - made) // 64 + 2):
        packed = packed_ids([text, *ids[1 : 64 * BLOCK]])
        chain = Chain.packed(fingerprint.hex, packed)
        for block in range(64):
            node = Node(
                fingerprint=fingerprint.hex,
                chain=chain.at(block + 1),
                parent=chain.at(block),
                block=block,
                ids=packed[4 * BLOCK * block : 4 * BLOCK * (block + 1)],
            )
            file = node_file(node.fingerprint, node.chain)
            prefixes.storage.put(file, node.encoded(), durable=False)
    nodes = len(prefixes.storage.list("nodes"))
    cold = [text + 5_000_000 for text in ids]
    found = {}

    def match(name, prompt):
        found[name] = prefixes.match(prompt, store).position

    taken = alternating(
        {
            "a cut at 98,304": Case(lambda: match("a cut at 98,304", ids)),
            "nothing seen before": Case(lambda: match("nothing seen before", cold)),
        },
        rounds,
    )
    session.close()
    shutil.rmtree(folder / "many")
    return {
        "tokens": len(ids),
        "nodes": nodes,
        "positions": found,
        "seconds": seconds_of(taken),
    }


def targets(result):
    """What was asked for, and what came out."""
    lines = []
    for case in result.get("sessions", []):
        ratio = case["load_to_blake3"]
        what = f"loading {case['tokens']:,} tokens into touched memory, of one BLAKE3 pass"
        lines.append([what, "at least 0.60", f"{ratio:.2f}", ratio >= LOAD_TO_BLAKE3])
    if "further_256" in result:
        for where, name, limit in (
            ("at a cut", "with_cut", WITH_CUT_NBYTES),
            ("between cuts", "without_cut", WITHOUT_CUT_NBYTES),
        ):
            got = result["further_256"][name]
            what = f"256 tokens more, {where}, bytes"
            lines.append([what, f"at most {limit:,}", f"{got:,}", got <= limit])
    if "match" in result:
        for name, seconds in result["match"]["seconds"].items():
            got = seconds["median"]
            what = f"match of {result['match']['tokens']:,} tokens, {name}, ms"
            lines.append([what, "under 50", f"{got * 1e3:.1f}", got < MATCH_S])
    return [[*line[:3], "yes" if line[3] else "no"] for line in lines]


def pages(result):
    """The tables of the page."""
    parts = ["## Asked for", table(["", "asked", "got", "met"], targets(result))]
    for case in result.get("sessions", []):
        blake = case["seconds"]["BLAKE3"]["median"]
        lines = []
        for name, seconds in case["seconds"].items():
            gigabytes = case["nbytes"] / seconds["median"] / 1e9
            spread = f"{seconds['least'] * 1e3:.0f} to {seconds['most'] * 1e3:.0f}"
            lines.append(
                [
                    name,
                    f"{seconds['median'] * 1e3:.0f} ({spread})",
                    f"{gigabytes:.2f}",
                    f"{blake / seconds['median']:.2f}",
                ]
            )
        parts.append(f"## {case['tokens']:,} tokens, {case['nbytes']:,} bytes of rows")
        parts.append(table(["", "ms", "GB/s", "of one BLAKE3 pass"], lines))
    if "further_256" in result:
        more = result["further_256"]
        parts.append("## 256 tokens more")
        cost = [["at a cut", f"{more['with_cut']:,}"], ["between cuts", f"{more['without_cut']:,}"]]
        parts.append(table(["", "bytes written"], cost))
    if "match" in result:
        match = result["match"]
        parts.append(f"## A prompt of {match['tokens']:,} tokens among {match['nodes']:,} nodes")
        lines = [
            [name, f"{match['positions'][name]:,}", f"{seconds['median'] * 1e3:.1f}"]
            for name, seconds in match["seconds"].items()
        ]
        parts.append(table(["", "matched", "ms"], lines))
    return "\n".join(parts)


def main():
    """Measure, write the page, leave nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 32_768])
    parser.add_argument("--only", choices=["sessions", "further", "match"], help="implies --dry")
    parser.add_argument("--dry", action="store_true", help="print the tables, write no page")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvplane-bench-"))
    result = {}
    try:
        if options.only in {None, "sessions"}:
            result["sessions"] = [
                saving_and_loading(folder, num_tokens, options.rounds)
                for num_tokens in options.tokens
            ]
        if options.only in {None, "further"}:
            result["further_256"] = further_tokens(folder)
        if options.only in {None, "match"}:
            result["match"] = matching(folder, options.rounds)
    finally:
        shutil.rmtree(folder)
    if options.dry or options.only:
        print(pages(result))
    else:
        command = f"python bench/packs.py --rounds {options.rounds}"
        write("packs", "Packs", command, result, pages(result))


if __name__ == "__main__":
    main()
