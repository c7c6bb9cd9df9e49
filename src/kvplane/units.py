"""Bytes as people say them."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human(nbytes: int) -> str:
    """Bytes in the largest unit that leaves at least one of it: "78.0 MiB", "1.70 GiB"."""
    size = float(nbytes)
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:  # noqa: PLR2004 - a KiB
        size /= 1024
        unit += 1
    return f"{nbytes} B" if unit == 0 else f"{size:.{max(1, unit - 1)}f} {UNITS[unit]}"
