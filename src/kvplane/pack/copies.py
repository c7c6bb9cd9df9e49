"""Rows between planes and the bytes of blobs: whole words, by numpy where memory is the process's.

numpy's copies take no other thread along: two threads that copy with torch wait for each other.
"""

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words: TypeAlias = NDArray[Any]
Place: TypeAlias = Words | Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.int16))


def is_near(tensor: Tensor) -> bool:
    """Whether its bytes are in this process's memory."""
    return tensor.device.type == "cpu"


@lru_cache(maxsize=64)
def word(nbytes: int) -> np.dtype[Any]:
    """The widest integer that so many bytes are a whole number of; at least one byte."""
    return next((kind for kind in _WORDS if nbytes % kind.itemsize == 0), np.dtype(np.uint8))


def words_of(tensor: Tensor) -> Words:
    """A view of near memory as integers as wide as its last axis allows."""
    found: Words = tensor.detach().view(_INTEGERS[tensor.dtype.itemsize]).numpy()
    if found.ndim and found.strides[-1] == found.itemsize:
        return found.view(word(found.shape[-1] * found.itemsize))
    return found


def place_of(rows: Tensor) -> Place:
    """Where `copy_in` puts rows: words where that is near, else the tensor itself."""
    return words_of(rows) if is_near(rows) else rows


def copy_in(place: Place, source: Words) -> None:
    """Fill a place with words, bit for bit."""
    if isinstance(place, Tensor):
        place.copy_(torch.from_numpy(source).view(place.dtype))
    else:
        np.copyto(place, source)


def copy_out(source: Tensor, data: bytearray | memoryview, at: int) -> None:
    """Fill `data` from byte `at` on with a tensor's elements in their order, bit for bit."""
    if is_near(source):
        words = words_of(source)
        np.copyto(np.ndarray(words.shape, words.dtype, buffer=data, offset=at), words)
        return
    flat = torch.frombuffer(data, dtype=torch.uint8)[at : at + source.nbytes]
    flat.view(source.dtype).view(source.shape).copy_(source)
