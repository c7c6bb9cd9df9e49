"""One call for many names, as many at a time as a storage is worth.

A folder answers at once: its work is done by as many threads as the caller says. A server answers
after a while, and many at a time.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvplane.storage import Storage

T = TypeVar("T")
R = TypeVar("R")


def mapped(
    storage: Storage, call: Callable[[T], R], items: Iterable[T], *, least: int = 1
) -> list[R]:
    """What `call` gives for each item, in order; the first error ends it, when all have ended.

    Args:
        storage: that `call` asks.
        call: from any thread.
        items: what it is given.
        least: threads, whatever the storage.
    """
    every = list(items)
    workers = min(max(least, storage.parallel), len(every))
    if workers <= 1:
        return list(map(call, every))
    with ThreadPoolExecutor(workers) as pool:
        try:
            return list(pool.map(call, every))
        finally:
            # nobody is at work any more once this is left
            pool.shutdown(cancel_futures=True)
