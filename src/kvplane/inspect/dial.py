"""A ring as a dial: row 0 on top, rows clockwise, the oldest faint and the newest strong.

One drawing for the inspector and for the documentation. Colours are classes, so that a page's style
decides them in light and in dark.
"""

import math
from html import escape

SIZE = 220
CENTRE = SIZE / 2
OUTER, INNER = 92.0, 66.0
SEGMENTS = 96


def dial(
    *,
    capacity: int,
    length: int,
    origin_physical: int,
    label: str,
    lines: tuple[str, ...] = (),
    segments: int = SEGMENTS,
) -> str:
    """The drawing as SVG text.

    Args:
        capacity: rows of the ring.
        length: rows that are live.
        origin_physical: row of the oldest.
        label: what it says to who cannot see it.
        lines: text in its middle.
        segments: arcs that the live rows are drawn as, at most.
    """
    size = f'viewBox="0 0 {SIZE} {SIZE}" xmlns="http://www.w3.org/2000/svg"'
    parts = [
        f'<svg class="dial" role="img" aria-label="{escape(label)}" {size}>',
        f'<path class="track" d="{_arc(0, 1)}"/>',
    ]
    count = min(segments, length)
    for number in range(count):
        first = origin_physical + length * number / count
        stop = origin_physical + length * (number + 1) / count
        strength = 0.18 + 0.82 * (number + 1) / count
        path = _arc(first / capacity, stop / capacity)
        parts.append(f'<path class="live" fill-opacity="{strength:.3f}" d="{path}"/>')
    if length:
        parts.append(_mark("oldest", origin_physical / capacity, INNER - 10, OUTER + 3))
    parts.append(_mark("next", (origin_physical + length) / capacity, INNER - 3, OUTER + 10))
    parts.append(f'<path class="noon" d="M {CENTRE} {CENTRE - OUTER - 3} v -6"/>')
    top = CENTRE - 9 * (len(lines) - 1) + 4
    for number, line in enumerate(lines):
        weight = "strong" if number == 0 else "soft"
        parts.append(
            f'<text class="{weight}" x="{CENTRE}" y="{top + 18 * number:g}" '
            f'text-anchor="middle">{escape(line)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _at(turn: float, radius: float) -> str:
    angle = 2 * math.pi * turn
    x, y = CENTRE + radius * math.sin(angle), CENTRE - radius * math.cos(angle)
    return f"{x:.2f} {y:.2f}"


def _arc(first: float, stop: float) -> str:
    """A piece of the band, in turns; a whole turn is two halves."""
    if stop - first > 0.999:  # noqa: PLR2004 - an arc from a point to itself would be nothing
        middle = (first + stop) / 2
        return f"{_arc(first, middle)} {_arc(middle, first + 1)}"
    large = int(stop - first > 1 / 2)
    return (
        f"M {_at(first, OUTER)} A {OUTER:g} {OUTER:g} 0 {large} 1 {_at(stop, OUTER)} "
        f"L {_at(stop, INNER)} A {INNER:g} {INNER:g} 0 {large} 0 {_at(first, INNER)} Z"
    )


def _mark(kind: str, turn: float, inner: float, outer: float) -> str:
    return f'<path class="{kind}" d="M {_at(turn, inner)} L {_at(turn, outer)}"/>'
