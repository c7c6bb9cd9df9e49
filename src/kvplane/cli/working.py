"""A sign of life for what takes a while, on a terminal only."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say what is being done until it is done; nothing where nobody looks."""
    notes = Console(stderr=True)
    if not notes.is_terminal:
        yield
        return
    with notes.status(what):
        yield
