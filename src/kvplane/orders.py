"""The orders in which attention sums, by name, and what their bits depend on.

blocked     blocks of absolute positions: the same bits at any rotation, layout, chunking, batch
physical    rows in buffer order, as the chapter's engine: the same bits at one rotation only
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvplane.attention import blocked, physical

Attend = Callable[..., Tensor]

ORDERS: dict[str, Attend] = {"blocked": blocked.attend, "physical": physical.attend}
TABLES = {"blocked": blocked.TABLE, "physical": physical.TABLE}


def order_numerics(order: str) -> dict[str, Any]:
    """The part of a store's numerics that the order decides."""
    return {"attention": order, "table": TABLES[order], "kernel": "torch"}
