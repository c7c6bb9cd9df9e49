"""Packs on an object store, and packed by zstd: bytes and seconds beside what they rest on.

The object store is moto's S3 server on this machine, in a process of its own, over HTTP: its own
speed is measured in the same run, by uploading and downloading the same blobs with as many requests
at a time and nothing else. Ratios of `zstd-bytes` are of rows that glimmer-nano computed over its
held-out text.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import boto3
import torch
import zstandard
from measure import table, write
from packs import FINGERPRINT, GEOMETRY, Case, alternating, grow, seconds_of

from kvplane import KVStore
from kvplane.integrations.transformers import HybridCache
from kvplane.models.nano import encode, heldout_text, load_nano
from kvplane.pack import PrefixCache, load_session, open_root, save_session
from kvplane.pack.blob import row_blob
from kvplane.pack.source import RowSource
from kvplane.pack.zstd_bytes import packed, unpacked

SERVER = """
import logging, time
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
time.sleep(100_000)
"""


def serve():
    """An S3 server of its own process; the process and a client of another make."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    endpoint = f"http://127.0.0.1:{process.stdout.readline().strip()}"
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="bench")
    return process


def on_a_server(num_tokens, rounds):
    """Seconds of a save, a load and a checkpoint on S3, and of the blobs alone."""
    store = KVStore(GEOMETRY, max_context=num_tokens + 256, memory="heap")
    ids = list(range(num_tokens))
    session = grow(store.open(tokens=[]), ids)
    kept = open_root("s3://bench/kept", create=True)
    written = save_session(kept, "s", session, FINGERPRINT)
    blobs = {name: kept.read(name, limit=1 << 30) for name in kept.list("blobs")}
    number = iter(range(1000))

    def fresh():
        return open_root(f"s3://bench/new-{next(number)}", create=True)

    def save():
        session.ledger.spans.clear()
        return save_session(fresh(), "s", session, FINGERPRINT)

    def upload():
        root = fresh()
        with ThreadPoolExecutor(root.parallel) as pool:
            list(pool.map(lambda name: root._client.create(name, blobs[name]), blobs))  # noqa: SLF001

    def download():
        with ThreadPoolExecutor(kept.parallel) as pool:
            list(pool.map(lambda name: kept.read(name, limit=1 << 30), blobs))

    def load():
        return load_session(kept, "s", store, FINGERPRINT)[1].session

    taken = alternating(
        {
            "save": Case(save),
            "the blobs uploaded, nothing else": Case(upload),
            "load": Case(load, after=lambda made: made.close()),
            "the blobs downloaded, nothing else": Case(download),
        },
        rounds,
    )
    session.ledger.spans.clear()
    save_session(kept, "s", session, FINGERPRINT)
    grow(session, list(range(num_tokens, num_tokens + 256)))
    begin = time.perf_counter()
    _, more = PrefixCache(kept, FINGERPRINT).publish(session)
    seconds = time.perf_counter() - begin
    session.close()
    return {
        "tokens": num_tokens,
        "nbytes": written.nbytes_written,
        "blobs": written.blobs_written,
        "seconds": seconds_of(taken),
        "checkpoint": {"nbytes": more.nbytes_written, "seconds": seconds},
    }


def nano_rows(num_tokens, dtype):
    """A cache whose rows glimmer-nano computed over its held-out text."""
    model = load_nano().to(dtype)
    cache = HybridCache(model)
    ids = torch.tensor([encode(heldout_text())[:num_tokens]])
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def ratios(cache, rounds):
    """Bytes of the real rows raw, packed, and compressed whole; seconds of packing and back."""
    session = cache.session
    source = RowSource(session)
    raw = []
    for group in session.groups:
        first, stop = source.first_held(group), session.position
        for begin in range(first - first % 256, stop, 256):
            here = max(begin, first), min(begin + 256, stop)
            rows = {layer: source.rows(group, layer, *here) for layer in group.layers}
            raw.append(bytearray(row_blob(group, here[0], rows)))
    small = [packed(data) or data for data in raw]
    whole = [zstandard.ZstdCompressor(level=1).compress(data) for data in raw]
    taken = alternating(
        {
            "pack": Case(lambda: [packed(data) for data in raw]),
            "unpack": Case(lambda: [unpacked(data, "blob", limit=1 << 30) for data in small]),
            "zstd of whole blobs": Case(
                lambda: [zstandard.ZstdCompressor(level=1).compress(data) for data in raw]
            ),
        },
        rounds,
    )
    return {
        "tokens": session.position,
        "dtype": session.groups[0].dtype,
        "raw": sum(map(len, raw)),
        "zstd_bytes": sum(map(len, small)),
        "zstd_whole": sum(map(len, whole)),
        "seconds": seconds_of(taken),
    }


def pages(result):
    """The tables of the page."""
    parts = []
    if "server" in result:
        case = result["server"]
        lines = [
            [
                name,
                f"{seconds['median'] * 1e3:.0f}",
                f"{case['nbytes'] / seconds['median'] / 1e6:.0f}",
            ]
            for name, seconds in case["seconds"].items()
        ]
        more = case["checkpoint"]
        size = f"{case['blobs']:,} blobs, {case['nbytes']:,} bytes"
        cut = f"{more['nbytes']:,} bytes in {more['seconds'] * 1e3:.0f} ms"
        cut = f"A cut after 256 tokens more: {cut}.\n"
        parts += [
            f"## {case['tokens']:,} tokens on S3: {size}",
            table(["", "ms", "MB/s"], lines),
            cut,
        ]
    for case in result["ratios"]:
        lines = [
            [name, f"{case[key]:,}", f"{case['raw'] / case[key]:.3f}"]
            for name, key in (
                ("raw", "raw"),
                ("zstd-bytes", "zstd_bytes"),
                ("zstd of whole blobs", "zstd_whole"),
            )
        ]
        parts += [
            f"## {case['tokens']:,} tokens of glimmer-nano, {case['dtype']}",
            table(["", "bytes", "ratio"], lines),
            table(
                ["", "ms", "MB/s of raw bytes"],
                [
                    [
                        name,
                        f"{seconds['median'] * 1e3:.0f}",
                        f"{case['raw'] / seconds['median'] / 1e6:.0f}",
                    ]
                    for name, seconds in case["seconds"].items()
                ],
            ),
        ]
    return "\n".join(parts)


def main():
    """Measure, write the page, leave nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--nano-tokens", type=int, default=4096)
    parser.add_argument("--dry", action="store_true", help="print the tables, write no page")
    options = parser.parse_args()
    result = {
        "ratios": [
            ratios(nano_rows(options.nano_tokens, dtype), options.rounds)
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        ]
    }
    server = serve()
    try:
        result["server"] = on_a_server(options.tokens, options.rounds)
    finally:
        server.kill()
        server.wait()
    page = pages(result)
    print(page)
    if not options.dry:
        command = f"python bench/packs_large.py --rounds {options.rounds} --tokens {options.tokens}"
        write("packs_large", "Packs at large", command, result, page)


if __name__ == "__main__":
    main()
