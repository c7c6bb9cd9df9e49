"""A plane of the least that kernels and attention need, in both layouts, poisoned at will."""

from dataclasses import dataclass

import torch

LAYOUTS = ("token_major", "head_major")


@dataclass
class RowPlane:
    """Strided views over one flat buffer: key and value of a row, or all keys then all values."""

    flat: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    unrolled: bool = False


def make_plane(layout, capacity, *, heads=2, dims=(4, 4), dtype=torch.float16, batch=1, fill=0.0):
    """A plane `[batch, capacity, heads, dim]` whose buffer holds `fill` everywhere."""
    key_dim, value_dim = dims
    if layout == "token_major":
        flat = torch.full((batch, capacity, heads * (key_dim + value_dim)), fill, dtype=dtype)
        key, value = flat.split([heads * key_dim, heads * value_dim], dim=2)
        return RowPlane(
            flat, key.unflatten(2, (heads, key_dim)), value.unflatten(2, (heads, value_dim))
        )
    sizes = [batch * heads * capacity * dim for dim in dims]
    flat = torch.full((sum(sizes),), fill, dtype=dtype)
    key, value = (
        part.view(batch, heads, capacity, dim).transpose(1, 2)
        for part, dim in zip(flat.split(sizes), dims, strict=True)
    )
    return RowPlane(flat, key, value)


def bits(tensor):
    """A tensor's bytes as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def same_bits(one, other):
    """Whether two tensors are equal to the last bit."""
    return one.dtype is other.dtype and torch.equal(bits(one), bits(other))
