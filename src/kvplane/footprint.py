"""What a store of a given geometry takes, as arithmetic; no tensors."""

from math import gcd

from kvplane.geometry import LayerGroup


def capacity_of(
    group: LayerGroup,
    *,
    max_context: int,
    slack: int = 0,
    row_floor: int = 1,
    page_nbytes: int = 1,
) -> int:
    """Rows of each of the group's planes.

    A full plane has one for every position, a ring its window and slack, neither more than
    max_context nor fewer than the kernel's floor. A ring is rounded up to whole pages, so that it
    can be unrolled, when that costs less than an eighth.

    Args:
        group: whose planes.
        max_context: positions end below it.
        slack: rows of a ring beyond its window.
        row_floor: fewest rows the kernel in use takes.
        page_nbytes: of the memory that unrolls rings; 1 where none does.
    """
    if group.sliding_window is None:
        return max(row_floor, max_context)
    rows = max(row_floor, min(max_context, group.sliding_window + slack))
    page_rows = page_nbytes // gcd(page_nbytes, group.row_nbytes)
    surplus = -rows % page_rows
    return rows + surplus if 8 * surplus < rows else rows
