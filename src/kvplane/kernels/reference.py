"""Rows one at a time and one head at a time: what the fast kernels are compared with.

Rounding is arithmetic on numbers here, apart from any library's conversion.
"""

import math

import torch
from torch import Tensor

from kvplane.kernels.checks import RowPlane, check_source, checked_rows
from kvplane.kernels.rounding import NAN_BITS

# digits after the first, exponent of the smallest normal number, largest finite number
FORMATS = {
    torch.float16: (10, -14, 65504.0),
    torch.bfloat16: (7, -126, 3.3895313892515355e38),
}


def store_rows(plane: RowPlane, rows: Tensor, key: Tensor, value: Tensor) -> None:
    """As `vectorized.store_rows`."""
    numbers = checked_rows(plane, rows)
    check_source(plane, len(numbers), key, value)
    for source, target in ((key.detach(), plane.key), (value.detach(), plane.value)):
        for sequence in range(source.shape[0]):
            for token, row in enumerate(numbers):
                for head in range(source.shape[2]):
                    _store(target[sequence, row, head], source[sequence, token, head])


def gather_rows(plane: RowPlane, rows: Tensor) -> tuple[Tensor, Tensor]:
    """As `vectorized.gather_rows`."""
    numbers = checked_rows(plane, rows)
    outs = []
    for source in (plane.key, plane.value):
        batch, _, heads, dim = source.shape
        out = source.new_zeros((batch, len(numbers), heads, dim))
        for sequence in range(batch):
            for token, row in enumerate(numbers):
                for head in range(heads):
                    out[sequence, token, head] = source[sequence, row, head]
        outs.append(out)
    return outs[0], outs[1]


def nearest(number: float, dtype: torch.dtype) -> float:
    """The value of `dtype` nearest to a float32 number, ties to the even one.

    What is not below the middle between the largest finite number and the next power of two is
    infinite. NaN stays NaN.
    """
    if not math.isfinite(number) or number == 0:
        return number
    digits, smallest, largest = FORMATS[dtype]
    _, exponent = math.frexp(number)
    unit = math.ldexp(1.0, max(exponent - 1, smallest) - digits)
    # exact: dividing a float32 by a power of two loses nothing in float64
    near = round(number / unit) * unit
    return math.copysign(near if abs(near) <= largest else math.inf, number)


def _store(target: Tensor, source: Tensor) -> None:
    if source.dtype is target.dtype:
        target.copy_(source)
        return
    for place, number in enumerate(source.tolist()):
        if math.isnan(number):
            target.view(torch.int16)[place] = NAN_BITS
        else:
            target[place] = nearest(number, target.dtype)
