"""What commands print: tables for people, plain lines when piped."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kvplane.units import human

__all__ = ["Output", "both", "console", "human", "print_table"]

# a terminal narrower than this gets the human units on a line of their own
WIDE = 120
PIPED_WIDTH = 1000


class Output(Console):
    """A console that leaves a reader's going away to `main`."""

    def on_broken_pipe(self) -> None:
        """Go on as if nobody had caught it: rich would exit by itself."""
        raise BrokenPipeError


def console() -> Console:
    """Standard output; without colours, frames and wrapping unless it is a terminal."""
    out = Output(highlight=False)
    return out if out.is_terminal else Output(highlight=False, width=PIPED_WIDTH)


def both(nbytes: int, out: Console) -> str:
    """Bytes with separators, and in human units."""
    gap = "\n" if out.is_terminal and out.width < WIDE else "  "
    return f"{nbytes:,}{gap}{human(nbytes)}"


def print_table(
    out: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """A table of numbers, aligned on the right; a first column without a header names its rows."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if out.is_terminal else None,
        pad_edge=False,
    )
    for name in header:
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(*row)
    out.print(table)
    out.print()
