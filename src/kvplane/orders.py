"""The orders in which attention sums, by name, and what their bits depend on.

blocked     blocks of absolute positions: the same bits at any rotation, layout, chunking, batch
physical    rows in buffer order, as the chapter's engine: the same bits at one rotation only

On a GPU the blocked order is Triton's, imported when a store first needs it; its bits also depend
on the kind of call: one token, a few, more.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvplane.attention import blocked, physical
from kvplane.errors import ExtraMissing

Attend = Callable[..., Tensor]

ORDERS: dict[str, Attend] = {"blocked": blocked.attend, "physical": physical.attend}
TABLES = {"blocked": blocked.TABLE, "physical": physical.TABLE}


def order_of(order: str, device: torch.device) -> Attend:
    """The attention function of an order on a device.

    Raises:
        ExtraMissing: the device needs Triton, and it cannot be imported.
    """
    if _in_triton(order, device):
        return _triton("triton_blocked").attend  # type: ignore[no-any-return]
    return ORDERS[order]


def order_numerics(order: str, device: torch.device) -> dict[str, Any]:
    """The part of a store's numerics that the order decides.

    Raises:
        ExtraMissing: as `order_of`.
    """
    if _in_triton(order, device):
        return {"attention": order, "table": _triton("triton_table").TABLE, "kernel": "triton"}
    return {"attention": order, "table": TABLES[order], "kernel": "torch"}


def _in_triton(order: str, device: torch.device) -> bool:
    return device.type == "cuda" and order == "blocked"


def _triton(module: str) -> Any:  # noqa: ANN401 - a module
    try:
        return importlib.import_module(f"kvplane.attention.{module}")
    except ImportError as error:
        raise ExtraMissing(package="triton", extra="gpu") from error
