"""The drawings of the documentation, computed by the code that they are about.

python tools/draw_docs.py            # writes docs/images/*.svg
"""

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

import torch

from kvplane import KVStore, ModelGeometry
from kvplane.geometry import FULL
from kvplane.inspect.dial import dial
from kvplane.pack.ids import GroupFacts
from kvplane.plane import Layout, PlaneShape
from kvplane.ring import RingCursor

# of the planes that are drawn byte by byte
ROWS, HEADS, MARKED = 4, 2, 2
OUT = Path(__file__).parent.parent / "docs" / "images"
STYLE = (
    "text{font:14px system-ui,'DejaVu Sans',sans-serif;fill:#1d2329}"
    ".soft{fill:#5b6670;font-size:12px}"
    ".strong{font-weight:600}.mono{font-family:'DejaVu Sans Mono',monospace;font-size:12px}"
    ".card{fill:#fbfbf9;stroke:#d9dee2}.cell{stroke:#fbfbf9}.none{fill:#e4eaed}.a{fill:#1f6f8b}"
    ".b{fill:#7a5195}.c{fill:#b45309}.on{fill:#fff}.wire{stroke:#5b6670;fill:none;stroke-width:1.5}"
    ".bad{stroke:#b42318}.track{fill:#e4eaed}.live{fill:#1f6f8b}.oldest{stroke:#b45309;"
    "stroke-width:3}.next{stroke:#1d2329;stroke-width:3}.noon{stroke:#5b6670;stroke-width:2}"
)


class Drawing:
    """Shapes on a card, as SVG text."""

    def __init__(self, width: int, height: int, title: str) -> None:
        name = escape(title)
        size = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        self._parts = [
            f'<svg {size} role="img" aria-label="{name}">',
            f"<title>{name}</title><style>{STYLE}</style>",
            f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        ]

    def text(
        self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "start"
    ) -> None:
        """A line of text."""
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def cell(
        self, x: float, y: float, width: float, height: float, kind: str, words: str = ""
    ) -> None:
        """A filled box, with a word in it."""
        self._parts.append(
            f'<rect class="cell {kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
        )
        if words:
            ink = "mono" if kind == "none" else "mono on"
            self.text(x + width / 2, y + height / 2 + 4, words, ink, anchor="middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, kind: str = "") -> None:
        """A line with a head: straight down, up, or to a side."""
        back = 6 if to_x >= x else -6
        head = f"M {to_x - back:g} {to_y - 4:g} L {to_x:g} {to_y:g} L {to_x - back:g} {to_y + 4:g}"
        if to_x == x:
            back = 6 if to_y >= y else -6
            head = f"M {x - 4:g} {to_y - back:g} L {x:g} {to_y:g} L {x + 4:g} {to_y - back:g}"
        self._parts.append(
            f'<path class="wire {kind}" d="M {x:g} {y:g} L {to_x:g} {to_y:g} {head}"/>'
        )

    def inner(self, x: float, y: float, size: float, svg: str) -> None:
        """Another drawing."""
        place = f'<svg x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" '
        self._parts.append(svg.replace("<svg ", place, 1))

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def first_wrap() -> Drawing:
    """A ring of 8 rows before, at and after its first wrap."""
    drawing = Drawing(760, 250, "A ring of eight rows through its first wrap")
    ring = RingCursor(8, 0, 0, 0, max_context=64)
    place = 0
    for position in range(12):
        ring.append(position)
        if position + 1 not in (5, 8, 9, 12):
            continue
        capacity, length, origin_logical, origin_physical = ring.as_tuple()
        live = f"holds [{origin_logical}, {origin_logical + length})"
        picture = dial(
            capacity=capacity,
            length=length,
            origin_physical=origin_physical,
            label=f"after {position + 1} tokens",
            lines=(f"{position + 1} tokens", live, f"oldest in row {origin_physical}"),
        )
        drawing.inner(10 + 187 * place, 10, 180, picture)
        place += 1
    words = "row 0 on top; oldest faint, newest strong; the long mark is the row that comes next"
    drawing.text(380, 215, words, "soft", anchor="middle")
    words = "two numbers say where everything is: the oldest position, and the row that it is in"
    drawing.text(380, 235, words, "soft", anchor="middle")
    return drawing


def layouts() -> Drawing:
    """Where the bytes of one row lie in each layout: by the plane's own arithmetic."""
    drawing = Drawing(760, 210, "Token-major and head-major planes, and the bytes of one row")
    rows, heads, dim = ROWS, HEADS, 2
    for place, (layout, reader) in enumerate(
        (
            (Layout.TOKEN_MAJOR, "a token is one span: rings, which lose one and gain one"),
            (Layout.HEAD_MAJOR, "a head's history is one span: full planes, which are read whole"),
        )
    ):
        shape = PlaneShape(
            batch=1,
            capacity=rows,
            num_kv_heads=heads,
            head_dim=dim,
            value_head_dim=dim,
            dtype=torch.float16,
            layout=layout,
        )
        top = 20 + 95 * place
        name = layout.name.replace("_", "-").lower()
        drawing.text(20, top + 8, f"{name} ({layout.value})", "strong")
        drawing.text(210, top + 8, reader, "soft")
        # an element of a row is a head's key or value
        part = dim * shape.dtype.itemsize
        cells = ["none"] * (shape.nbytes // part)
        for found in shape.byte_ranges(range(MARKED, MARKED + 1)):
            for byte in range(found.start, found.stop, part):
                cells[byte // part] = "a"
        width = 720 / len(cells)
        for number, kind in enumerate(cells):
            drawing.cell(20 + width * number, top + 20, width, 34, kind, _element(layout, number))
        drawing.text(20, top + 70, f"memory, from left to right; row {MARKED} is marked", "soft")
    return drawing


def _element(layout: Layout, number: int) -> str:
    if layout is Layout.TOKEN_MAJOR:
        row, rest = divmod(number, 2 * HEADS)
        side, head = divmod(rest, HEADS)
    else:
        side, rest = divmod(number, HEADS * ROWS)
        head, row = divmod(rest, ROWS)
    return f"{'kv'[side]}{head}r{row}"


def unrolled() -> Drawing:
    """The same pages mapped twice: the window is one span at any rotation."""
    drawing = Drawing(760, 190, "A ring's pages mapped twice, back to back")
    ring = RingCursor(8, 0, 0, 0, max_context=64)
    ring.append_batch(0, 8)
    for position in range(8, 13):
        ring.append(position)
    held = {ring.row_of(position): position for position in ring.live}
    first = ring.origin_physical
    drawing.text(20, 30, "memory", "strong")
    for row in range(8):
        drawing.cell(120 + 38 * row, 14, 38, 26, "a", f"{held[row]}")
    drawing.text(20, 95, "addresses", "strong")
    for row in range(16):
        kind = "a" if first <= row < first + 8 else "none"
        drawing.cell(120 + 38 * row, 78, 38, 26, kind, f"{held[divmod(row, 8)[1]]}")
    drawing.arrow(272, 42, 272, 76)
    drawing.arrow(424, 42, 574, 76)
    drawing.text(600, 50, "the memory unit shows them twice", "soft", anchor="middle")
    left, right = 120 + 38 * first, 120 + 38 * (first + 8)
    drawing.arrow((left + right) / 2, 118, right, 118)
    drawing.arrow((left + right) / 2, 118, left, 118)
    words = f"positions [{ring.live.start}, {ring.live.stop}) in logical order: one span, no copy"
    drawing.text((left + right) / 2, 138, words, "", anchor="middle")
    words = f"a ring of 8 rows after 13 tokens; its oldest position is in row {first}"
    drawing.text(380, 172, words, "soft", anchor="middle")
    return drawing


def step() -> Drawing:
    """A step from reserve to commit, and every way out."""
    drawing = Drawing(760, 220, "A step from reserve to commit")
    stages = (
        ("reserve", "every layer is asked:", "rows, pages, limit"),
        ("write", "layer by layer; rows that", "would be missed are kept"),
        ("attend", "old window and new rows,", "in positions' order"),
        ("commit", "every origin advances", "at once"),
    )
    for number, (name, *lines) in enumerate(stages):
        x = 20 + 186 * number
        drawing.cell(x, 30, 150, 38, "a", name)
        for line, words in enumerate(lines):
            drawing.text(x + 75, 88 + 16 * line, words, "soft", anchor="middle")
        if number:
            drawing.arrow(x - 34, 49, x - 3, 49)
    outs = (
        ("refused", "nothing had changed"),
        ("an exception, Ctrl-C", "rows are put back"),
        ("a draft rejected", "the first n stay"),
    )
    for number, (name, words) in enumerate(outs):
        x = (95, 281, 653)[number]
        drawing.arrow(x, 120, x, 150, "bad")
        drawing.text(x, 170, name, "strong", anchor="middle")
        drawing.text(x, 188, words, "soft", anchor="middle")
    drawing.text(467, 170, "all layers, or none", "strong", anchor="middle")
    return drawing


def prefix() -> Drawing:
    """What resuming at a position needs, in each layer of Muse Glimmer's pattern."""
    cut, window, stop = 3072, 2048, 4096
    drawing = Drawing(760, 240, "What a prefix needs in every layer")
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    scale = 560 / stop
    for number, kind in enumerate(kinds * 2):
        y = 30 + 20 * number
        facts = GroupFacts(None if kind == FULL else window, 2, 128, 128, "float16")
        first = facts.needed_at(cut)
        drawing.text(20, y + 13, f"layer {number}", "soft")
        drawing.text(80, y + 13, "full" if kind == FULL else "sliding", "soft")
        drawing.cell(150, y, 560, 17, "none")
        drawing.cell(
            150 + first * scale, y, (cut - first) * scale, 17, "b" if kind == FULL else "a"
        )
    drawing.arrow(150 + cut * scale, 20, 150 + cut * scale, 198)
    drawing.text(150 + cut * scale, 16, f"the cut, position {cut:,}", "soft", anchor="middle")
    words = f"full layers: [0, {cut:,})"
    drawing.text(150, 214, words, "")
    words = f"sliding layers, window {window:,}: [{cut - window + 1:,}, {cut:,})"
    drawing.text(330, 214, words, "")
    words = "the rows of a ring exist only for a while: they are captured as a step crosses the cut"
    drawing.text(430, 232, words, "soft", anchor="middle")
    return drawing


def store_check() -> None:
    """Refuse to draw what the store does not do.

    Raises:
        RuntimeError: a session's ring is not where the drawings say.
    """
    shape = ModelGeometry.uniform(
        ["sliding_attention"], sliding_window=8, num_kv_heads=1, head_dim=2
    )
    session = KVStore(shape, max_context=64, memory="heap").open()
    for _ in range(13):
        with session.step(1) as now:
            now.write(0, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    if next(iter(session.cursors.values())).as_tuple() != (8, 8, 5, 5):
        message = "the store's ring is not the drawn one"
        raise RuntimeError(message)


def drawings() -> Iterator[tuple[str, str]]:
    """Every drawing's file name and text."""
    store_check()
    yield "first-wrap.svg", str(first_wrap())
    yield "layouts.svg", str(layouts())
    yield "unrolled.svg", str(unrolled())
    yield "step.svg", str(step())
    yield "prefix.svg", str(prefix())


def main() -> int:
    """Write them all."""
    for name, text in drawings():
        (OUT / name).write_text(text, encoding="utf-8")
        print(OUT / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
