"""A handoff over loopback, verified end to end, beside the same bytes raw over the same socket.

Two processes; whoever receives puts the whole payload into memory that was touched before, as a
server's is. Every round runs each case once, in alternating order. Seconds are the sender's, until
the receiver has said that it has everything: connections stand before, TLS handshakes included.
CPU seconds are of both processes and all their threads: what two cores cannot do in less than half.
"""

import argparse
import contextlib
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from measure import table, write

from kvplane import KVStore, ModelGeometry
from kvplane.testing.certificates import Authority
from kvplane.transfer import Listener, connect, plan_of, receive, send

GEOMETRY = ModelGeometry.preset("muse-glimmer-30b")
TOKENS = 130_814
CHUNK = 256
BUFFER = 1 << 20
RAW = ("raw sendfile", "raw TCP", "raw TLS", "raw Unix")
OURS = {"TCP": "raw TCP", "TLS": "raw TLS", "Unix": "raw Unix"}


class Prepared(KVStore):
    """A store whose next session goes into planes that were made, and touched, before."""

    prepared = None

    def builder(self, cursors, **facts):
        """The builder that was prepared; its ids and ledger are of no account here."""
        made, self.prepared = self.prepared, None
        return made or super().builder(cursors, **facts)

    def prepare(self, cursors):
        """Touch every live row of planes before they are wanted."""
        made = super().builder(cursors)
        for layer in made.planes:
            live = made.cursors[GEOMETRY.group_of(layer).id].live
            for key, value in made.rows(layer, live.start, live.stop):
                key.fill_(0)
                value.fill_(0)
        self.prepared = made


def grown(store, num_tokens):
    """A session of so many tokens with random rows, none of them equal to another layer's."""
    session = store.open([])
    for first in range(0, num_tokens, CHUNK):
        count = min(CHUNK, num_tokens - first)
        noise = torch.randn(count + 64, 2, 128).half()
        with session.step(list(range(first, first + count))) as step:
            for layer in range(52):
                step.write(layer, noise[layer : layer + count], noise[-count:])
    return session


def digest_of(session):
    """A digest over every live row."""
    state = blake3()
    for layer in session.planes:
        live = session.live(layer)
        for key, value in session.spans(layer, live.start, live.stop):
            for part in (key, value):
                state.update(part.contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def listener_of(case, folder, identity):
    """Where a case's receiver listens."""
    if "Unix" in case:
        return Listener(f"unix:{folder}/{case.replace(' ', '-')}")
    return Listener("127.0.0.1:0", identity=identity if "TLS" in case else None)


def serve(orders, folder, identity):
    """The receiver's process: one case an order."""
    torch.set_num_threads(1)
    store = Prepared(GEOMETRY, max_context=1 << 17)
    memory = np.zeros(0, dtype=np.uint8)
    listeners = {case: listener_of(case, folder, identity) for case in (*RAW, *OURS)}
    orders.send({case: made.address for case, made in listeners.items()})
    while (order := orders.recv()) is not None:
        case, nbytes, cursors, check = order
        if case in OURS:
            store.prepare(cursors)
        elif memory.nbytes < nbytes:
            memory = np.ones(nbytes, dtype=np.uint8)
        orders.send("ready")
        link = listeners[case].accept()
        if case in OURS:
            begin = time.process_time()
            received = receive(store, link)
            cpu = time.process_time() - begin
            orders.send((cpu, digest_of(received.session) if check else None))
            received.session.close()
        else:
            link._socket.settimeout(None)  # noqa: SLF001 - raw
            begin, done = time.process_time(), 0
            while done < nbytes:
                part = memory.data[done : min(nbytes, done + BUFFER)]
                done += link._socket.recv_into(part)  # noqa: SLF001
            link._socket.sendall(b"!")  # noqa: SLF001
            orders.send((time.process_time() - begin, None))
        link.close()
        gc.collect()
    for made in listeners.values():
        made.close()


class Bench:
    """The sender's process."""

    def __init__(self, folder, num_tokens):
        authority = Authority(folder / "certificates")
        self.identity = authority.identity("sender")
        self.session = grown(KVStore(GEOMETRY, max_context=1 << 17), num_tokens)
        self.cursors = {name: cursor.as_tuple() for name, cursor in self.session.cursors.items()}
        self.digest = digest_of(self.session)
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, folder, authority.identity("receiver"))
        )
        self.process.start()
        self.addresses = self.orders.recv()
        self.nbytes = plan_of(self.session).payload.total
        self.source = np.random.default_rng(0).integers(0, 256, self.nbytes, dtype=np.uint8)
        self.file = os.memfd_create("source")
        os.write(self.file, b"")
        with os.fdopen(os.dup(self.file), "wb") as file:
            file.write(self.source.data)

    def run(self, case, *, check=False):
        """Seconds of one case, and of the CPU; rows are compared after it when asked."""
        self.orders.send((case, self.nbytes, self.cursors, check))
        self.orders.recv()
        identity = self.identity if "TLS" in case else None
        link = connect(self.addresses[case], identity=identity)
        link._socket.settimeout(None)  # noqa: SLF001 - as raw cases are
        gc.collect()
        begin, cpu = time.perf_counter(), time.process_time()
        if case in OURS:
            send(self.session, link)
        else:
            self._raw(case, link._socket)  # noqa: SLF001
        seconds = time.perf_counter() - begin
        cpu = time.process_time() - cpu
        theirs, answer = self.orders.recv()
        link.close()
        if check and case in OURS and answer != self.digest:
            raise ValueError(f"{case}: the rows came with other bits")
        return seconds, cpu + theirs

    def _raw(self, case, plain):
        if case == "raw sendfile":
            done = 0
            while done < self.nbytes:
                done += os.sendfile(plain.fileno(), self.file, done, self.nbytes - done)
        else:
            for first in range(0, self.nbytes, BUFFER):
                plain.sendall(self.source.data[first : first + BUFFER])
        plain.recv(1)

    def close(self):
        """End the receiver."""
        self.orders.send(None)
        self.process.join()
        os.close(self.file)


def measured(num_tokens, rounds):
    """Seconds of every case by round, wall and CPU."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as last:
        bench = Bench(Path(name), num_tokens)
        last.callback(bench.close)
        cases = [*RAW, *OURS]
        for case in cases:
            bench.run(case, check=True)
        taken = {case: [] for case in cases}
        for number in range(rounds):
            for case in cases if number % 2 else cases[::-1]:
                taken[case].append(bench.run(case))
        begin = time.process_time()
        blake3(bench.source).digest()
        hashing = time.process_time() - begin
        return bench.nbytes, taken, hashing


def ratio(case, raw, taken):
    """A case's rate over another's, by pairs of one round, so that drift meets both alike."""
    pairs = zip(taken[case], taken[raw], strict=True)
    return statistics.median(theirs[0] / mine[0] for mine, theirs in pairs)


def line(case, taken, nbytes):
    """A case's line of the table."""
    seconds, cpu = zip(*taken[case], strict=True)
    median = statistics.median(seconds)
    return [
        case,
        f"{median:.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
        f"{nbytes / median / 1e9:.2f}",
        f"{statistics.median(cpu):.3f}",
        f"{ratio(case, OURS[case], taken):.2f}" if case in OURS else "",
        f"{ratio(case, RAW[0], taken):.2f}" if case in OURS else "",
    ]


def limits(taken, hashing):
    """What each case spends most CPU seconds on: its own link, both digests, or the rest."""
    said = []
    for case, raw in OURS.items():
        whole = statistics.median(cpu for _, cpu in taken[case])
        parts = {"the link": statistics.median(cpu for _, cpu in taken[raw])}
        parts["BLAKE3 on both sides"] = 2 * hashing
        parts["everything else"] = max(0.0, whole - sum(parts.values()))
        most = max(parts, key=parts.get)
        said.append(f"{case} is limited by {most} ({parts[most]:.3f} of {whole:.3f} CPU seconds)")
    return "; ".join(said) + "."


def main():
    """Measure, and write the report when asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    nbytes, taken, hashing = measured(arguments.tokens, arguments.rounds)
    page = f"{nbytes:,} bytes of rows, {arguments.tokens:,} tokens.\n\n"
    page += table(
        ["", "seconds", "GB/s", "CPU seconds", "of raw", "of raw sendfile"],
        [line(case, taken, nbytes) for case in taken],
    )
    page += (
        f"\nOne BLAKE3 pass over the payload by one thread takes {hashing:.3f} CPU seconds; each "
        "side makes one, beside the transfer. The first ratio is to the same socket raw: sendall "
        f"from memory, received into memory.\n{limits(taken, hashing)}\n"
    )
    print(page)
    if not arguments.dry:
        result = {
            "tokens": arguments.tokens,
            "nbytes": nbytes,
            "seconds and CPU seconds": taken,
            "blake3_seconds": hashing,
        }
        write("transfer", "Handoff over loopback", "python bench/transfer.py", result, page)


if __name__ == "__main__":
    main()
