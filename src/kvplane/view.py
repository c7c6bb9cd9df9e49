"""What a step shows of a layer to any attention kernel."""

from typing import NamedTuple

import torch

from kvplane.journal import KeyValue


class View(NamedTuple):
    """Keys and values of positions [first, stop) in logical order.

    Each span is `[rows, kv_heads, dim]`, with a batch axis in front when the session has one; there
    is one, or two where the rows do not lie in one piece. The content is promised until the next
    `write` or the end of the step. A tensor that is kept longer stays readable for as long as it
    lives: it shows what later steps leave in its rows; after a reset, zeros; once its session is
    closed or collected, zeros in mapped memory, on the heap what was there last. It is for
    reading: written to while its session lives, it changes rows, also those that forks share.
    """

    first: int
    stop: int
    spans: tuple[KeyValue, ...]

    def gather(self) -> KeyValue:
        """One key and one value tensor: the span itself when there is one, else a copy."""
        if len(self.spans) == 1:
            return self.spans[0]
        keys = torch.cat([key for key, _ in self.spans], dim=-3)
        return keys, torch.cat([value for _, value in self.spans], dim=-3)
