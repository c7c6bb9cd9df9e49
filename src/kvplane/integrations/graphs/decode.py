"""One decode step of a model as one CUDA graph, for whatever sessions its tables point at.

begin    every cache is asked for one token more: a refusal refuses the step, nothing has run
point    the device tables say where those sessions are; mostly they do already
replay   the model's whole call, rows stored on the way; the tables move on by themselves
written  the caches hold the token, open to be taken back like any other call's
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvplane.attention.triton_launch import INTERPRETED
from kvplane.errors import ArgumentError
from kvplane.integrations.graphs.host import GraphCache
from kvplane.integrations.graphs.op import attending
from kvplane.integrations.graphs.tables import Tables, shape_of
from kvplane.integrations.transformers.cache import HybridCache
from kvplane.integrations.transformers.calls import cache_keyword, keeps_logits
from kvplane.session import Session

CAPTURED, COMPILED = "captured", "compiled"
# of one token a product is a sum that joins what stands around it; its sizes are searched for once
TUNED: dict[str, str | int | bool | Callable[..., Any]] = {"coordinate_descent_tuning": True}
Caches = HybridCache | Sequence[HybridCache]


class DecodeGraph:
    """A model's step of one token a sequence, captured at the first `step` and replayed after.

    Sequences are those of one cache (lockstep), or of several caches of any lengths.

    Args:
        model: a causal language model of transformers, on one CUDA device.
        cache: a `HybridCache(model, attention="kvplane")` that has read a prompt, or several.
        layers: "captured" runs the model's own kernels: the bits of a call without a graph.
            "compiled" has PyTorch compile each decoder layer around attention, which takes half a
            minute at the first step: other bits, equal with and without the graph, but not from
            one process to the next, since sizes are chosen by time.

    Raises:
        ArgumentError: caches that no graph can serve; names what is missing.
    """

    def __init__(self, model: Any, cache: Caches, *, layers: str = CAPTURED) -> None:  # noqa: ANN401 - any transformers model
        if layers not in {CAPTURED, COMPILED}:
            expected = f'"{CAPTURED}" or "{COMPILED}"'
            raise ArgumentError(argument="layers", expected=expected, got=layers)
        self._model = model
        caches = _several(cache)
        # not kept alive: a graph outlives the caches that it serves
        self._caches = [weakref.ref(each) for each in caches]
        sessions = [_served(each) for each in caches]
        self._shape = _shape_of(sessions)
        plan = sessions[0].plan
        self.num_sequences = sum(session.num_sequences for session in sessions)
        self._ids = torch.zeros((self.num_sequences, 1), dtype=torch.int64, device=plan.device)
        self._tables = Tables(plan, self.num_sequences)
        self._stand_in = GraphCache([each.sliding_window for each in plan.geometry.layers])
        self._decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        self._compiled: list[tuple[nn.Module, Callable[..., Any]]] = []
        if layers == COMPILED:
            self._compiled = [
                (layer, torch.compile(layer._call_impl, dynamic=False, options=TUNED))  # noqa: SLF001 - as Module.compile
                for layer in self._decoder.layers
            ]
        self._graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def step(self, ids: Tensor | Sequence[int], cache: Caches | None = None) -> Tensor:
        """Read one token a sequence and give its logits, `[sequences, vocabulary]`.

        Args:
            ids: one a sequence, `[sequences]` or `[sequences, 1]`.
            cache: other caches of the same shape: forks, restored ones; None: the graph's own.

        Returns:
            The graph's own memory: the next step overwrites it.

        Raises:
            ArgumentError: ids or caches of another shape.
            ContextFull, LimitReached, MemoryUnavailable, SessionClosed, SessionReadOnly: as in
                `Session.step`. Nothing has run, and no cache was changed.
        """
        return self._read(ids, cache, self._replayed)

    def launched(self, ids: Tensor | Sequence[int], cache: Caches | None = None) -> Tensor:
        """The same step kernel by kernel, without the graph: the same bits, in memory of its own.

        Raises:
            ArgumentError, ContextFull, ...: as in `step`.
        """
        return self._read(ids, cache, self._run)

    def _read(
        self,
        ids: Tensor | Sequence[int],
        cache: Caches | None,
        work: Callable[[Sequence[Session]], Tensor],
    ) -> Tensor:
        caches = self._own() if cache is None else _several(cache)
        sessions = [_served(each) for each in caches]
        if _shape_of(sessions) != self._shape:
            raise ArgumentError(argument="cache", expected="of the graph's shape", got="another")
        tokens = torch.as_tensor(ids, dtype=torch.int64).reshape(-1, 1)
        if len(tokens) != self.num_sequences:
            expected = str(self.num_sequences)
            raise ArgumentError(argument="ids", expected=expected, got=len(tokens))
        parts = torch.split(tokens, [session.num_sequences for session in sessions])
        begun: list[HybridCache] = []
        try:
            for each, part in zip(caches, parts, strict=True):
                each.begin_token(part)
                begun.append(each)
            self._tables.point(sessions)
            self._ids.copy_(tokens)
            logits = work(sessions)
        except BaseException:
            self._tables.forget()
            for each in begun:
                each.take_back_token()
            raise
        self._tables.advanced()
        return logits

    def _replayed(self, sessions: Sequence[Session]) -> Tensor:
        if self._ids.device.type != "cuda":
            return self._run(sessions)
        if self._graph is None:
            self._graph = self._captured(sessions)
        self._graph.replay()
        return self.logits  # type: ignore[return-value] # set where it was captured

    def _own(self) -> list[HybridCache]:
        caches = [each() for each in self._caches]
        if None in caches:
            raise ArgumentError(argument="cache", expected="one to go on with", got="a lost one")
        return caches  # type: ignore[return-value] # none is None

    def _captured(self, sessions: Sequence[Session]) -> torch.cuda.CUDAGraph:
        """The step as one launch; the tables are as before it."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # PyTorch's
        stream.wait_stream(torch.cuda.current_stream())
        outs = []
        with torch.cuda.stream(stream):
            # twice: kernels are compiled, and an output that follows the host's count is found
            for seen in (1, 1_000_003):
                self._stand_in.seen = seen
                outs.append(self._run(sessions).clone())
                self._tables.write(sessions)
        torch.cuda.current_stream().wait_stream(stream)
        if not torch.equal(*(out.view(torch.uint8) for out in outs)):
            raise ArgumentError(
                argument="model",
                expected="outputs that follow position ids alone",
                got="others for another number of tokens seen",
            )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.logits = self._run(sessions)
        return graph

    def _run(self, sessions: Sequence[Session]) -> Tensor:
        """The step launched kernel by kernel, as a graph holds it; the tables move on."""
        model = self._model
        facts: dict[str, Any] = {cache_keyword(model): self._stand_in, "use_cache": True}
        if keeps_logits(model):
            facts["logits_to_keep"] = 1
        with torch.no_grad(), attending(self._decoder, self._tables.calls(sessions[0])):
            with _fused(self._compiled):
                out = model(input_ids=self._ids, position_ids=self._tables.positions, **facts)
            self._tables.advance()
        last: Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
        return last[:, -1]


def _several(cache: Caches) -> list[HybridCache]:
    return [cache] if isinstance(cache, HybridCache) else list(cache)


def _served(cache: HybridCache) -> Session:
    """The session of a cache that a graph can serve: ArgumentError."""
    session = cache.session
    if session is None:
        raise ArgumentError(argument="cache", expected="one that has read a prompt", got="empty")
    where = session.plan.device
    if where.type != "cuda" and not INTERPRETED:
        raise ArgumentError(argument="cache", expected="rows on a CUDA device", got=where)
    order = session.store.numerics["attention"]
    if order != "blocked":
        raise ArgumentError(argument="cache", expected='attention="kvplane"', got=order)
    return session


def _shape_of(sessions: Sequence[Session]) -> tuple[object, ...]:
    shapes = [shape_of(session) for session in sessions]
    if len({shape[1:] for shape in shapes}) != 1 or len(set(map(id, sessions))) < len(sessions):
        raise ArgumentError(argument="cache", expected="distinct ones of one shape", got=shapes)
    return (*(shape[0] for shape in shapes), *shapes[0][1:])


@contextmanager
def _fused(compiled: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """The decoder layers run compiled until the block ends."""
    if not compiled:
        yield
        return
    import torch._dynamo  # noqa: PLC0415 - seconds, and only here

    # one entry a layer at most: they share their code
    room = 4 * len(compiled) + 8
    limits: dict[str, Any] = {"recompile_limit": room, "accumulated_recompile_limit": 8 * room}
    try:
        for layer, call in compiled:
            layer._compiled_call_impl = call  # noqa: SLF001 - as Module.compile
        with torch._dynamo.config.patch(limits):  # noqa: SLF001 - PyTorch's own name for it
            yield
    finally:
        for layer, _ in compiled:
            layer._compiled_call_impl = None  # noqa: SLF001
