"""Softmax attention in pieces: partial results of fixed shape, combined one after another.

    m   the largest score so far, for each query
    z   the sum of exp(score - m)
    o   the sum of exp(score - m) * value

Every matrix product has a shape that depends on the model alone. A library picks its kernel, and so
its order of summation, by shape: with the shape fixed, a row's bits depend on that row's operands.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Sums over some keys: m and z are [kv_heads, queries, 1], o is [kv_heads, queries, dim]."""

    m: Tensor
    z: Tensor
    o: Tensor


class Rule(NamedTuple):
    """What scores go through before the softmax."""

    scale: float
    softcap: float | None


def partial(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, rule: Rule) -> Partial:
    """The sums over one piece.

    Args:
        query: float32 [kv_heads, queries, head_dim].
        key: float32 [kv_heads, rows, head_dim].
        value: float32 [kv_heads, rows, value_dim]; zero where no query sees the row.
        seen: bool [queries, rows].
        rule: of the scores.
    """
    scores = torch.bmm(query, key.transpose(1, 2)) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    m = scores.amax(dim=2, keepdim=True)
    # a query that sees nothing here: exp(-inf - 0) is 0, and its m stays -inf for `combine`
    weights = torch.exp(scores - m.clamp(min=torch.finfo(m.dtype).min))
    return Partial(m, weights.sum(dim=2, keepdim=True), torch.bmm(weights, value))


def combine(first: Partial | None, second: Partial) -> Partial:
    """The sums over both; the order of pieces is the caller's."""
    if first is None:
        return second
    m = torch.maximum(first.m, second.m)
    floor = m.clamp(min=torch.finfo(m.dtype).min)
    a, b = torch.exp(first.m - floor), torch.exp(second.m - floor)
    return Partial(m, first.z * a + second.z * b, first.o * a + second.o * b)


def finish(sums: Partial, sinks: Tensor | None) -> Tensor:
    """The output, [kv_heads, queries, dim].

    Args:
        sums: over every piece.
        sinks: [kv_heads, queries, 1], a logit that joins the softmax and reads no value.
    """
    if sinks is None:
        return sums.o / sums.z
    m = torch.maximum(sums.m, sinks)
    share = torch.exp(sums.m - m)
    return sums.o * share / (sums.z * share + torch.exp(sinks - m))


def by_head(query: Tensor, num_kv_heads: int) -> Tensor:
    """[queries, heads, dim] as [kv_heads, group * queries, dim]: a kv head's queries together."""
    queries, heads, dim = query.shape
    grouped = query.reshape(queries, num_kv_heads, heads // num_kv_heads, dim)
    return grouped.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, dim)


def by_token(rows: Tensor, queries: int) -> Tensor:
    """The way back: [kv_heads, group * queries, dim] as [queries, heads, dim]."""
    num_kv_heads, rows_a_head, dim = rows.shape
    grouped = rows.reshape(num_kv_heads, rows_a_head // queries, queries, dim)
    return grouped.permute(2, 0, 1, 3).reshape(queries, -1, dim)
