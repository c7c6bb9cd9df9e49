"""A worker's side: rows out of packs into blocks, and out of blocks into packs, in threads.

load     read and verify everything, then copy: a load that fails has touched nothing
store    copy at the step's end, before the blocks are anybody else's; write later
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvplane.errors import KVPlaneError
from kvplane.geometry import LayerGroup
from kvplane.integrations.vllm.copying import PagedLayer
from kvplane.integrations.vllm.jobs import LoadJob, StoreJob
from kvplane.integrations.vllm.options import ConnectorOptions, Once, Root
from kvplane.integrations.vllm.planning import PagedGroup, local_heads, parts
from kvplane.integrations.vllm.rows import Captured, CutWriter, Known, read_rows
from kvplane.ledger import Numerics, Span

READERS = 2
Gather = Callable[[Tensor], Tensor | None]


class Workers(NamedTuple):
    """One of several tensor-parallel workers.

    Args:
        rank: its own.
        size: how many.
        gather: all workers' heads of a tensor `[rows, kv_heads, dim]`, the model's in their order,
            for the worker that writes; None for the others.
    """

    rank: int = 0
    size: int = 1
    gather: Gather = lambda rows: rows


@dataclass(slots=True)
class _Load:
    job: LoadJob
    deadline: float
    future: Future[None] | None = None
    given_up: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)


class WorkerSide:
    """Loads and stores for one worker.

    Args:
        options: of the connector.
        fingerprint: hex of the model's.
        groups: the model's layer groups.
        paged: the engine's groups, in its order.
        numerics: who makes this engine's rows.
        workers: of the engine.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        fingerprint: str,
        groups: Sequence[LayerGroup],
        paged: Sequence[PagedGroup],
        numerics: Numerics,
        workers: Workers,
    ) -> None:
        self._options = options
        self._groups = {group.id: group for group in groups}
        self._paged = tuple(paged)
        self._table_of = {layer: at for at, group in enumerate(paged) for layer in group.layers}
        self._numerics = numerics
        # found in the engine's own memory: who put them there is not known
        self._shared = {**numerics, "rows": "engine cache"}
        self._workers = workers
        self._fingerprint = fingerprint
        self._root = Root(options.root)
        self._once = Once()
        self._layers: dict[int, PagedLayer] = {}
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kvplane-load")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvplane-store")
        self._cuts: CutWriter | None = None
        self._loads: list[_Load] = []
        self._known: dict[str, Known] = {}
        self._captured: dict[str, int] = {}
        self._failed_files: set[str] = set()
        self._waiting = 0
        self._stores: set[Future[None]] = set()
        self._guard = threading.Lock()

    def register(self, layers: Mapping[int, PagedLayer]) -> None:
        """The paged memory of every layer that owns rows."""
        self._layers = dict(layers)

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Begin loads."""
        for job in jobs:
            load = _Load(job, time.monotonic() + self._options.load_timeout_s)
            load.future = self._readers.submit(self._run, load)
            self._loads.append(load)

    def _run(self, load: _Load) -> None:
        job = load.job
        if load.given_up:
            return
        rows = read_rows(self._root.storage(), job.cut, self._groups, job.local, f"cut {job.file}")
        with load.guard:
            if not load.given_up:
                self._fill(job, rows)

    def _fill(self, job: LoadJob, rows: Mapping[str, Captured]) -> None:
        position = job.cut.state.position
        devices = set()
        for captured in rows.values():
            group = captured.group
            heads = local_heads(group.num_kv_heads, self._workers.rank, self._workers.size)
            here = slice(heads.start, heads.stop)
            for layer, (key, value) in captured.rows.items():
                at = self._table_of[layer]
                table, block_size = job.tables[at], self._paged[at].block_size
                where = list(parts(table, block_size, captured.first, position))
                paged = self._layers[layer]
                paged.write(where, captured.first, key[:, here], value[:, here])
                devices.add(paged.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        if self._workers.rank == 0:
            with self._guard:
                self._learned(job)

    def _learned(self, job: LoadJob) -> None:
        known = Known()
        if job.local:
            known.made(job.local, self._shared)
        for stop, numerics in job.cut.state.numerics:
            known.made(stop, numerics)
        for name, rows in job.cut.state.groups.items():
            known.spans[name] = [
                Span(max(span.first, job.local), span.stop, span.blob)
                for span in rows.spans
                if span.stop > job.local
            ]
        self._known[job.request] = known
        self._captured[job.request] = 0 if job.local else job.cut.state.position

    def finished(self) -> tuple[set[str], set[str]]:
        """Ids of loads that have ended, and of those among them that failed."""
        ended, failed, going = set(), set(), []
        for load in self._loads:
            future = load.future
            if future is None or not (future.done() or time.monotonic() > load.deadline):
                going.append(load)
                continue
            ended.add(load.job.request)
            with load.guard:
                error = self._error(future)
                load.given_up = True
            if error is not None:
                self._once.say("a load failed", error)
                failed.add(load.job.request)
                self._failed_files.add(load.job.file)
        self._loads = going
        return ended, failed

    def _error(self, future: "Future[None]") -> BaseException | None:
        if future.done():
            return future.exception()
        return TimeoutError(f"no rows within {self._options.load_timeout_s} s")

    def store(self, jobs: Sequence[StoreJob]) -> None:
        """Copy the rows of cuts; they are written later."""
        for job in jobs:
            for cut in job.cuts:
                try:
                    captured = self._capture(job, cut)
                except KVPlaneError as error:
                    self._once.say("a cut could not be taken", error)
                    break
                self._captured[job.request] = cut
                if self._workers.rank == 0:
                    self._queue(job, cut, captured)

    def _capture(self, job: StoreJob, cut: int) -> list[Captured]:
        done = self._captured.get(job.request, 0)
        found = []
        for group in self._groups.values():
            window = group.sliding_window
            first = done if window is None else max(0, cut - (window - 1))
            rows = {}
            for layer in group.layers:
                at = self._table_of[layer]
                where = list(parts(job.tables[at], self._paged[at].block_size, first, cut))
                if not where:
                    continue
                key, value = map(self._workers.gather, self._layers[layer].read(where))
                if key is not None and value is not None:
                    rows[layer] = (key.cpu(), value.cpu())
            found.append(Captured(group=group, first=first, rows=rows))
        return found

    def _queue(self, job: StoreJob, cut: int, captured: list[Captured]) -> None:
        nbytes = sum(
            key.nbytes + value.nbytes for item in captured for key, value in item.rows.values()
        )
        with self._guard:
            if self._waiting + nbytes > self._options.backlog_nbytes:
                full = True
            else:
                full = False
                self._waiting += nbytes
        if full:
            limit = self._options.backlog_nbytes
            self._once.say("cuts are left out", f"{limit} bytes wait to be written")
            return
        future = self._writer.submit(self._write, job, cut, captured, nbytes)
        self._stores.add(future)
        future.add_done_callback(self._stores.discard)

    def _write(self, job: StoreJob, cut: int, captured: list[Captured], nbytes: int) -> None:
        try:
            if self._cuts is None:
                self._cuts = CutWriter(self._root.storage(), self._fingerprint)
            self._cuts.failed |= self._failed_files
            with self._guard:
                known = self._known.setdefault(job.request, Known())
            if job.local and not known.numerics:
                known.made(job.local, self._shared)
            known.made(cut, self._numerics)
            self._cuts.write(cut, job.ids, captured, known, salt=job.salt)
        except (KVPlaneError, OSError) as error:
            self._once.say("a cut could not be written", error)
        finally:
            with self._guard:
                self._waiting -= nbytes

    def ended(self, requests: set[str]) -> None:
        """Forget requests, once what is queued of them is written."""
        for request in requests:
            self._captured.pop(request, None)
            if request in self._known or self._stores:
                self._writer.submit(self._forget, request)

    def _forget(self, request: str) -> None:
        with self._guard:
            self._known.pop(request, None)

    def close(self) -> None:
        """Write what waits, within the time that the options give."""
        deadline = time.monotonic() + self._options.flush_timeout_s
        for future in list(self._stores):
            try:
                future.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                self._once.say("cuts were not written before the engine ended", error)
                break
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)
