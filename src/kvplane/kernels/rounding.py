"""Float32 to the planes' dtypes, to nearest even, the same bytes wherever it is done.

PyTorch on a CPU makes two different NaNs of one: a bfloat16 tensor's vectorised part gets 0xFFFF,
its tail 0x7FC0, so that the bytes would depend on where in a tensor an element lies. NaN becomes
0x7FFF here, which is what an NVIDIA GPU's conversion gives, in both 16-bit formats.
"""

import torch
from torch import Tensor

from kvplane.errors import Overflow, TensorMismatch

NAN_BITS = 0x7FFF
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows in `dtype`, those that have it already untouched, NaN payloads included.

    Float32 becomes a 16-bit format as the hardware does it: ties to even, subnormals kept, what
    is too large infinite, unchecked (a check would wait for the device).
    """
    if rows.dtype is dtype:
        return rows
    narrow = rows.to(dtype)
    if dtype.itemsize < rows.dtype.itemsize:
        narrow.view(torch.int16).masked_fill_(rows.isnan(), NAN_BITS)
    return narrow


def converted(rows: Tensor, dtype: torch.dtype, *, what: str) -> Tensor:
    """Rows of one plane dtype in another, by value: for doors, where rows come from elsewhere.

    Infinities and NaN stay what they are; what has more digits than `dtype` is rounded to nearest
    even.

    Args:
        rows: float16, bfloat16 or float32, any shape.
        dtype: one of the same three.
        what: the rows, as an error should call them.

    Raises:
        TensorMismatch: another dtype on either side.
        Overflow: a finite value does not fit. Nothing was converted.
    """
    for role, given in ((what, rows.dtype), (f"the target of {what}", dtype)):
        if given not in DTYPES:
            raise TensorMismatch(layer=None, what=role, expected=DTYPES, got=given)
    if rows.dtype is dtype:
        return rows
    # every value of the 16-bit formats is a float32, so that one rounding is all there is
    narrow = rounded(rows.float(), dtype)
    lost = narrow.isinf() & rows.isfinite()
    if lost.any():
        value = rows[lost][0].item()
        raise Overflow(value=value, dtype=str(dtype).removeprefix("torch."), what=what)
    return narrow
