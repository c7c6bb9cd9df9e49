"""Keys, values and queries of a sequence by position, and rings that hold a part of them."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from row_planes import make_plane


@dataclass
class History:
    """What a layer sees of one sequence: position p's are key[p], value[p], query[p]."""

    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor
    first: int = 0

    def rows(self, first, stop):
        """Keys and values of positions [first, stop), with a batch axis."""
        here = slice(first - self.first, stop - self.first)
        return self.key[None, here], self.value[None, here]

    def queries(self, first, stop):
        return self.query[None, first - self.first : stop - self.first]


def make_history(
    stop,
    *,
    first=0,
    heads=1,
    groups=2,
    dims=(16, 16),
    dtype=torch.float16,
    queries=torch.float32,
    seed=0,
):
    """A random one over positions [first, stop); float32 queries, so that no bit is rounded off."""
    generator = torch.Generator().manual_seed(seed)

    def draw(num_heads, dim):
        return torch.randn(stop - first, num_heads, dim, generator=generator)

    key, value = draw(heads, dims[0]).to(dtype), draw(heads, dims[1]).to(dtype)
    return History(key, value, draw(heads * groups, dims[0]).to(queries), first)


def ring_of(history, first, stop, *, capacity, rotation=0, layout="token_major", fill=torch.nan):
    """A plane with positions [first, stop), the first at row `rotation`, and their runs."""
    dims = history.key.shape[2], history.value.shape[2]
    heads, dtype = history.key.shape[1], history.key.dtype
    plane = make_plane(layout, capacity, heads=heads, dims=dims, dtype=dtype, fill=fill)
    rows = [(rotation + place) % capacity for place in range(stop - first)]
    plane.key[:, rows], plane.value[:, rows] = history.rows(first, stop)
    seam = min(capacity, rotation + stop - first)
    runs = [range(rotation, seam), range(rotation + stop - first - seam)]
    return plane, [run for run in runs if run]


def oldest(history, position, window):
    return history.first if window is None else max(history.first, position - (window - 1))


def decode(attend, history, position, *, window, rotation=0, layout="token_major", **rule):
    """The output for one query whose own row is stored, from a ring of just what it sees."""
    first = oldest(history, position, window)
    rule = {"scale": history.key.shape[2] ** -0.5} | rule
    capacity = max(rule.pop("capacity", 0), position + 1 - first)
    plane, runs = ring_of(
        history,
        first,
        position + 1,
        capacity=capacity,
        rotation=rotation % capacity,
        layout=layout,
    )
    query = history.queries(position, position + 1)
    placed = {"first_key": first, "first_query": position, "window": window}
    return attend(plane, runs, query, None, None, **placed, **rule)


def prefill(attend, history, first, stop, *, window, rotation=0, layout="token_major", **rule):
    """The outputs of a chunk that is not stored yet, after the window in a ring."""
    begin = oldest(history, first, window)
    rule = {"scale": history.key.shape[2] ** -0.5} | rule
    capacity = max(1, rule.pop("capacity", 0), first - begin)
    plane, runs = ring_of(
        history, begin, first, capacity=capacity, rotation=rotation % capacity, layout=layout
    )
    queries = history.queries(first, stop)
    placed = {"first_key": begin, "first_query": first, "window": window}
    return attend(plane, runs, queries, *history.rows(first, stop), **placed, **rule)


def in_chunks(attend, history, edges, *, window, **rule):
    """The outputs of chunks between neighbouring edges, joined."""
    parts = [
        prefill(attend, history, first, stop, window=window, **rule)
        for first, stop in pairwise(edges)
    ]
    return torch.cat(parts, dim=1)
