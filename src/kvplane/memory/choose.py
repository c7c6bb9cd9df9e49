"""Which memory backend a store uses, and why.

One asked for by name works or fails loudly; an automatic choice falls back, says so once, and in
`describe()`.
"""

import logging
from typing import NamedTuple

import torch

from kvplane.errors import ArgumentError, BackendUnavailable
from kvplane.memory import mapped_cpu
from kvplane.memory.base import Backend
from kvplane.memory.heap import HeapBackend

_LOG = logging.getLogger("kvplane")
_SAID: set[str] = set()


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
    if memory not in {"auto", "mapped"}:
        expected = '"auto", "mapped" or "heap"'
        raise ArgumentError(argument="memory", expected=expected, got=memory)
    backend = _mapped(device)
    if not isinstance(backend, str):
        why = "asked for" if memory == "mapped" else "unrolls rings and shares pages"
        return Choice(backend, why)
    reason = backend
    if memory == "mapped":
        raise BackendUnavailable(backend=memory, reason=reason)
    if reason not in _SAID:
        _SAID.add(reason)
        _LOG.info("memory: heap, since mapped memory %s", reason)
    return Choice(HeapBackend(device), f"mapped memory {reason}")


def _mapped(device: torch.device) -> Backend | str:
    """The mapped backend of a device, or why there is none."""
    if device.type == "cuda":
        # nothing of a GPU is imported where there is none
        from kvplane.memory import mapped_cuda  # noqa: PLC0415

        reason = mapped_cuda.unavailable(device)
        return reason or mapped_cuda.CudaMappedBackend(device)
    reason = mapped_cpu.unavailable(device)
    return reason or mapped_cpu.MappedBackend()
