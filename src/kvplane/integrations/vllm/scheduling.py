"""The scheduler's side: which requests begin with a cut, and where cuts are taken.

asked            looked for in a thread; the engine asks again until there is an answer
loading          blocks are allocated, the worker fills them, nobody attends to them
reading          each step that reaches a wished cut has it captured
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvplane.errors import KVPlaneError
from kvplane.integrations.vllm.jobs import LoadJob, StoreJob, Tables
from kvplane.integrations.vllm.options import ConnectorOptions, Once, Root
from kvplane.integrations.vllm.planning import PagedGroup, half_filled, wished_cuts
from kvplane.pack import Fingerprint, Match
from kvplane.pack.chain import packed_ids
from kvplane.pack.match import Matcher

THREADS = 4


@dataclass(slots=True)
class Asked:
    """One request.

    Args:
        ids: of its prompt.
        salt: of the tenant.
        cuts: that are wished.
        match: under way.
        deadline: of the match.
        chosen: to be loaded; None: nothing.
        local: positions below were found in the engine's own memory.
        settled: whether what is loaded was decided, once and for all.
        shut: blocks of a load that nobody may find by prefix.
    """

    ids: list[int]
    salt: bytes
    cuts: list[int]
    match: Future[Match] | None = None
    deadline: float = 0.0
    chosen: Match | None = None
    local: int = 0
    settled: bool = False
    shut: set[int] = field(default_factory=set)


class SchedulerSide:
    """Plans loads and stores.

    Args:
        options: of the connector.
        fingerprint: of the model.
        groups: the engine's, in its order.
    """

    def __init__(
        self, options: ConnectorOptions, fingerprint: Fingerprint, groups: Sequence[PagedGroup]
    ) -> None:
        self._options = options
        self._fingerprint = fingerprint
        self._groups = tuple(groups)
        self._root = Root(options.root)
        self._once = Once()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvplane-match")
        self._asked: dict[str, Asked] = {}
        self._loads: list[LoadJob] = []
        self._loading: dict[str, str] = {}
        self._bad: set[str] = set()

    def matched(
        self, request: str, ids: Sequence[int], local: int, *, salt: str | None
    ) -> int | None:
        """Tokens beyond `local` that can be loaded; None: not known yet.

        Args:
            request: id.
            ids: of its prompt.
            local: tokens that the engine holds itself.
            salt: the request's own.
        """
        asked = self._asked.get(request)
        if asked is None:
            asked = self._asked[request] = self._new(ids, salt)
        if asked.settled:
            # a load that failed is not tried again: the engine computes
            asked.local = local
            return 0
        if asked.match is None:
            asked.deadline = time.monotonic() + self._options.match_timeout_s
            asked.match = self._pool.submit(self._match, asked)
        if not asked.match.done() and time.monotonic() < asked.deadline:
            # a folder answers at once: the engine need not ask again
            time.sleep(0.001)
            if not asked.match.done():
                return None
        found = self._answer(asked)
        asked.local = local
        asked.chosen = None
        if found is None or found.position <= local:
            return 0
        asked.chosen = found
        return found.position - local

    def _new(self, ids: Sequence[int], salt: str | None) -> Asked:
        cuts = wished_cuts(
            len(ids),
            [group.sliding_window for group in self._groups],
            [group.block_size for group in self._groups],
            step=self._options.every,
        )
        return Asked(list(ids), self._options.salt_of(salt), cuts)

    def _answer(self, asked: Asked) -> Match | None:
        if asked.match is None:
            return None
        if not asked.match.done():
            seconds = self._options.match_timeout_s
            self._once.say("the root is slow", f"no answer within {seconds} s")
            asked.settled = True
            return None
        try:
            return asked.match.result()
        except (KVPlaneError, OSError) as error:
            self._once.say("the root cannot be read", error)
            asked.settled = True
            return None

    def _match(self, asked: Asked) -> Match:
        matcher = Matcher(self._root.storage(), self._fingerprint, numerics=None, salt=asked.salt)
        found = Match(position=0, seen=0, reason="")
        for found in matcher.matches(asked.ids):
            if found.file not in self._bad:
                break
        return found

    def allocated(self, request: str, num_external: int, tables: Tables) -> set[int]:
        """Blocks are there; those given back are to be taken out of the engine's prefixes."""
        asked = self._asked.get(request)
        if asked is None:
            return set()
        if num_external == 0:
            asked.settled = True
            return asked.shut
        found = asked.chosen
        if found is None or found.cut is None or found.file is None:
            return set()
        asked.settled = True
        job = LoadJob(
            request=request,
            cut=found.cut,
            file=found.file,
            local=asked.local,
            tables=tables,
        )
        self._loads.append(job)
        self._loading[request] = found.file
        position = found.position
        for group, table in zip(self._groups, tables, strict=True):
            block = half_filled(group, table, asked.local, position)
            if block is not None:
                asked.shut.add(block)
        return set()

    def failed(self, requests: set[str]) -> None:
        """Note which loads failed: their cuts are no use to others either."""
        for request in requests:
            file = self._loading.pop(request, None)
            if file is not None:
                self._bad.add(file)

    def loads(self) -> list[LoadJob]:
        """Those that were planned since this was last asked."""
        planned, self._loads = self._loads, []
        return planned

    def store(self, request: str, first: int, stop: int, tables: Any) -> StoreJob | None:  # noqa: ANN401 - read only where a cut is reached
        """What is to be captured after a step over positions [first, stop).

        Args:
            request: id.
            first: position.
            stop: position.
            tables: gives the block ids.
        """
        asked = self._asked.get(request)
        if asked is None:
            return None
        cuts = tuple(cut for cut in asked.cuts if first < cut <= stop)
        if not cuts:
            return None
        return StoreJob(
            request=request,
            ids=packed_ids(asked.ids[: cuts[-1]]),
            cuts=cuts,
            local=asked.local,
            salt=asked.salt,
            tables=tuple(map(tuple, tables())),
        )

    def shut_blocks(self, requests: Sequence[str]) -> set[int]:
        """Blocks of running loads that nobody may find by prefix."""
        found: set[int] = set()
        for request in requests:
            asked = self._asked.get(request)
            if asked is not None:
                found |= asked.shut
        return found

    @property
    def requests(self) -> list[str]:
        """Ids of those that were asked for and have not ended."""
        return list(self._asked)

    def ended(self, request: str) -> None:
        """Forget a request."""
        self._asked.pop(request, None)
        self._loading.pop(request, None)

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
