"""Rows between packs and an engine's paged memory, bit for bit.

page of one head     [slot, key and value]           most attention kernels
                     whatever a kernel packs          on CPUs: found by writing numbers
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvplane.errors import TensorMismatch
from kvplane.integrations.vllm.planning import Part

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where the elements of a head's page lie, each an index into its flat memory.

    Args:
        key: `[slots, head_dim]`.
        value: `[slots, value_head_dim]`.
    """

    key: Tensor
    value: Tensor

    @classmethod
    def plain(cls, slots: int, head_dim: int, value_head_dim: int) -> "PageLayout":
        """Key and value side by side, slot after slot."""
        flat = torch.arange(slots * (head_dim + value_head_dim)).view(slots, -1)
        return cls(flat[:, :head_dim].contiguous(), flat[:, head_dim:].contiguous())

    @classmethod
    def probed(
        cls, write: Write, slots: int, head_dim: int, value_head_dim: int, dtype: torch.dtype
    ) -> "PageLayout":
        """What a kernel makes of a page: it is given numbers, and they are looked for.

        Args:
            write: stores keys and values `[slots, 1, dim]` into a cache `[1, 1, slots, dims]`, at
                slots.
            slots: of a page.
            head_dim: of keys.
            value_head_dim: of values.
            dtype: of the cache; numbers below 256 are exact in each.

        Raises:
            TensorMismatch: an element is nowhere, or in two places.
        """
        found = []
        dims = (head_dim, value_head_dim)
        size = slots * sum(dims)
        for which in (0, 1):
            index = torch.zeros(size, dtype=torch.int64)
            seen = torch.zeros(size, dtype=torch.bool)
            width = dims[which]
            # slot and element, one digit of base 128 at a time; zero is left for what is not ours
            numbers = torch.arange(slots * width).view(slots, width)
            for digit in range(3):
                rows = [torch.zeros(slots, 1, dim, dtype=dtype) for dim in dims]
                rows[which] = ((numbers >> (7 * digit)) % 128 + 1).to(dtype).unsqueeze(1)
                cache = torch.zeros(1, 1, slots, sum(dims), dtype=dtype)
                write(rows[0], rows[1], cache, torch.arange(slots))
                held = cache.reshape(-1).to(torch.int64)
                seen |= held > 0
                index += (held - 1).clamp(min=0) << (7 * digit)
            places = torch.full((slots * width,), -1, dtype=torch.int64)
            places[index[seen]] = torch.nonzero(seen).reshape(-1)
            if int(seen.sum()) != slots * width or int(places.min()) < 0:
                raise TensorMismatch(
                    layer=None,
                    what="a page of the engine's memory",
                    expected=f"one place for each of {slots} x {width} elements",
                    got=f"{int(seen.sum())} places",
                )
            found.append(places.view(slots, width))
        return cls(*found)


class PagedLayer:
    """One layer's paged memory.

    Args:
        cache: `[blocks, kv_heads, slots, dims]`, whatever its strides.
        layout: of a head's page; None: key and value side by side.
        head_dim: of keys.
        split: pages that a block of the engine's tables is made of.
    """

    def __init__(
        self, cache: Tensor, layout: PageLayout | None, head_dim: int, *, split: int = 1
    ) -> None:
        self._cache = cache
        self._layout = layout
        self._head_dim = head_dim
        self._split = split

    @property
    def device(self) -> torch.device:
        """Where its memory is."""
        return self._cache.device

    def read(self, parts: Iterable[Part]) -> tuple[Tensor, Tensor]:
        """Copies of key and value, `[rows, kv_heads, dim]`."""
        keys, values = [], []
        for page, slots in self._pages(parts):
            if self._layout is None:
                rows = page[:, slots].transpose(0, 1)
                keys.append(rows[..., : self._head_dim].clone())
                values.append(rows[..., self._head_dim :].clone())
                continue
            flat = page.reshape(page.shape[0], -1)
            keys.append(flat[:, self._layout.key[slots]].transpose(0, 1))
            values.append(flat[:, self._layout.value[slots]].transpose(0, 1))
        return torch.cat(keys).contiguous(), torch.cat(values).contiguous()

    def write(self, parts: Sequence[Part], first: int, key: Tensor, value: Tensor) -> None:
        """Fill slots with rows `[rows, kv_heads, dim]` whose oldest is position `first`."""
        at = parts[0].first - first if parts else 0
        for page, slots in self._pages(parts):
            count = slots.stop - slots.start
            keys, values = key[at : at + count], value[at : at + count]
            at += count
            if self._layout is None:
                page[:, slots, : self._head_dim] = keys.transpose(0, 1).to(page.device)
                page[:, slots, self._head_dim :] = values.transpose(0, 1).to(page.device)
                continue
            flat = page.view(page.shape[0], -1)
            flat[:, self._layout.key[slots]] = keys.transpose(0, 1).to(page.device)
            flat[:, self._layout.value[slots]] = values.transpose(0, 1).to(page.device)

    def _pages(self, parts: Iterable[Part]) -> Iterable[tuple[Tensor, slice]]:
        size = self._cache.shape[2]
        for part in parts:
            offset, left = part.offset, part.num_rows
            while left:
                number, begin = divmod(offset, size)
                count = min(size - begin, left)
                page = self._cache[part.block * self._split + number]
                yield page, slice(begin, begin + count)
                offset += count
                left -= count
