"""Which memory backend a store uses, and why.

One asked for by name works or fails loudly; an automatic choice falls back and says so in
`describe()`.
"""

from typing import NamedTuple

import torch

from kvplane.errors import ArgumentError
from kvplane.memory.base import Backend
from kvplane.memory.heap import HeapBackend


class Choice(NamedTuple):
    """A backend, and why it was taken."""

    backend: Backend
    why: str


def choose(memory: str, device: torch.device) -> Choice:
    """The backend for `memory` ("auto" or a name) on `device`.

    Raises:
        ArgumentError: no backend has that name.
        BackendUnavailable: the one asked for by name does not work here.
    """
    if memory == "heap":
        return Choice(HeapBackend(device), "asked for")
    if memory == "auto":
        return Choice(HeapBackend(device), "the only backend for this device")
    raise ArgumentError(argument="memory", expected='"auto" or "heap"', got=memory)
