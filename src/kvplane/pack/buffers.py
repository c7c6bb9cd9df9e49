"""Memory that a thread fills again and again: fresh pages cost as much as hashing them."""

import threading

import numpy as np


class ThreadBuffer:
    """Gives each thread so many writable bytes, valid until that thread asks again."""

    def __init__(self) -> None:
        self._kept = threading.local()

    def __call__(self, nbytes: int) -> memoryview:
        """Writable bytes of undefined content: whoever asks fills all of them."""
        held = getattr(self._kept, "held", None)
        if held is None or held.size < nbytes:
            held = self._kept.held = np.empty(nbytes, dtype=np.uint8)
        return memoryview(held.data)[:nbytes]
