"""What a layer group's id says: "s2048.2x128x128.f16" is window, heads, dims and dtype."""

import re
from typing import NamedTuple

from kvplane.geometry import ITEMSIZES, SHORT_DTYPES

_COUNT = r"([1-9][0-9]{0,8})"
_ID = re.compile(rf"(?:f0|s{_COUNT})\.{_COUNT}x{_COUNT}x{_COUNT}\.(bf16|f16|f32)", re.ASCII)
_DTYPES = {short: name for name, short in SHORT_DTYPES.items()}


class GroupFacts(NamedTuple):
    """A layer group without its layers; the window is None for full layers."""

    sliding_window: int | None
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of one layer, key and value."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim) * ITEMSIZES[self.dtype]

    def needed_at(self, position: int) -> int:
        """The oldest position that a token at `position` sees beside itself."""
        if self.sliding_window is None:
            return 0
        return max(0, position - (self.sliding_window - 1))


def facts_of(group_id: object) -> GroupFacts | None:
    """What an id says; None when it is none."""
    found = _ID.fullmatch(group_id) if isinstance(group_id, str) else None
    if found is None:
        return None
    window, num_kv_heads, head_dim, value_head_dim, dtype = found.groups()
    return GroupFacts(
        sliding_window=None if window is None else int(window),
        num_kv_heads=int(num_kv_heads),
        head_dim=int(head_dim),
        value_head_dim=int(value_head_dim),
        dtype=_DTYPES[dtype],
    )
