"""How a cache is to be made, and what its bits then depend on."""

import importlib
from dataclasses import dataclass
from typing import Any

import transformers

from kvplane.errors import ArgumentError, ExtraMissing
from kvplane.integrations.transformers import attention
from kvplane.plan import check_count

VIEW = "view"
# by the name given here, the store's order of attention
ORDERS = {VIEW: "blocked", attention.NAME: "blocked", "physical": "physical"}
GRAPHS = (None, "captured", "compiled")
DEFAULT_KERNEL = "default"
DEFAULT_CONTEXT = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `HybridCache` was asked for.

    Args:
        attention: "view" (transformers' attention over the store's logical view), "kvplane" or
            "physical" (the store's own).
        max_context: positions end below it.
        memory: the store's memory backend.
        slack: rows of a ring beyond its window.
        limit: bytes of all sessions forked from one cache together; None for no limit.
        graphs: "captured" or "compiled": one token a sequence is a replayed graph; None: never.
    """

    attention: str
    max_context: int
    memory: str
    slack: int
    limit: int | None
    graphs: str | None = None

    def __post_init__(self) -> None:
        if self.attention not in ORDERS:
            expected = str(sorted(ORDERS))
            raise ArgumentError(argument="attention", expected=expected, got=self.attention)
        if self.graphs not in GRAPHS:
            raise ArgumentError(argument="graphs", expected=str(GRAPHS), got=self.graphs)
        if self.graphs and self.attention != attention.NAME:
            raise ArgumentError(
                argument="graphs", expected=f'attention="{attention.NAME}"', got=self.attention
            )
        check_count("max_context", self.max_context, 1)
        check_count("slack", self.slack, 0)

    @property
    def order(self) -> str:
        """The store's order of attention."""
        return ORDERS[self.attention]

    @property
    def in_store_order(self) -> bool:
        """Whether the store attends, not transformers."""
        return self.attention != VIEW


def context_of(config: Any) -> int:  # noqa: ANN401 - any transformers config
    """The longest context a text config names, or 131,072."""
    named = getattr(config, "max_position_embeddings", None)
    return named if type(named) is int and named > 0 else DEFAULT_CONTEXT


def check_one_device(model: Any) -> None:  # noqa: ANN401 - any transformers model
    """Refuse a model whose layers are spread over several devices.

    Raises:
        ArgumentError: names the devices.
    """
    spread = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(spread) > 1:
        raise ArgumentError(
            argument="model",
            expected="all layers on one device: a session's rows live on one",
            got=f"a device_map over {sorted(spread)}",
        )


def replay_graphs(model: Any) -> None:  # noqa: ANN401 - any transformers model
    """Have a model replay graphs: ArgumentError without one, on a CPU; ExtraMissing."""
    if getattr(getattr(model, "device", None), "type", None) != "cuda":
        got = getattr(model, "device", model)
        raise ArgumentError(argument="graphs", expected="a model on a CUDA device", got=got)
    try:
        # imported here: Triton, which the CPU does without
        graphs = importlib.import_module("kvplane.integrations.graphs.forward")
    except ImportError as error:
        raise ExtraMissing(package="triton", extra="gpu") from error
    graphs.graph_forward(model)


def numerics_of(options: Options, base: dict[str, Any], kernel: str | None) -> dict[str, Any]:
    """What the bits of a cache's rows depend on.

    Args:
        options: of the cache.
        base: the store's own numerics.
        kernel: transformers' attention implementation.
    """
    numerics = base | {"transformers": transformers.__version__}
    if options.attention == VIEW:
        numerics |= {"attention": VIEW, "table": 0, "kernel": kernel or DEFAULT_KERNEL}
    if options.graphs == "compiled":
        # PyTorch's compiler sums a layer's norms and products in another order
        numerics |= {"layers": options.graphs}
    return numerics
