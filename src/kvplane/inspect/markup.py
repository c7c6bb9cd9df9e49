"""An inspection as one HTML file: no network, light and dark, from phone to desk.

Everything but the heat map is there without scripts. What a pack says is text on this page, never
markup: every word of it is escaped, and the page's own policy lets nothing be loaded.
"""

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from kvplane._version import __version__
from kvplane.inspect.dial import dial
from kvplane.inspect.facts import GroupFacts, Inspection
from kvplane.inspect.heat import SIDES
from kvplane.inspect.strips import blocks_of, shared_nbytes
from kvplane.inspect.words import (
    facts_of,
    kind_of,
    provenance_of,
    ring_of,
    state_of,
    title_of,
)
from kvplane.units import human

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
NO_ROW = 255


def page(found: Inspection) -> str:
    """The whole file's text."""
    good, verdict = state_of(found)
    title = escape(title_of(found))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{title} - kvplane inspect</title>",
            f"<style>\n{_asset('page.css')}</style>",
            f'<header><h1>{title}</h1><button id="theme" hidden>Dark</button></header>',
            f'<p class="verdict {"good" if good else "bad"}">{escape(verdict)}</p>',
            _problems(found),
            _list(facts_of(found)),
            '<h2 id="planes">Planes</h2>',
            '<div class="cards">',
            *(_card(part) for part in found.groups),
            "</div>",
            _plan(found),
            '<h2 id="blocks">Blocks</h2>',
            _blocks(found),
            '<h2 id="norms">Norms of keys and values</h2>',
            _heat(found),
            '<h2 id="provenance">Who made the rows</h2>',
            _provenance(found),
            _footer(found),
            f'<script type="application/json" id="facts">{_json(heat_facts(found))}</script>',
            f"<script>\n{_asset('page.js')}</script>",
            "</html>",
            "",
        ]
    )


def heat_facts(found: Inspection) -> dict[str, Any]:
    """The heat map as the page's script reads it: a byte a cell, 255 where no row is held."""
    kinds = {layer: part.group.kind for part in found.groups for layer in part.group.layers}
    layers = []
    for layer in found.heat.layers:
        parts = {what: _bytes(found.heat.cells(what, layer)) for what in SIDES}
        layers.append({"layer": layer, "kind": kinds[layer], **parts})
    return {
        "position": found.content.state.position,
        "width": found.heat.width,
        "columns": found.heat.num_columns,
        "layers": layers,
    }


def _bytes(cells: Sequence[float | None]) -> dict[str, Any]:
    known = [cell for cell in cells if cell is not None]
    if not known:
        return {"least": None, "most": None, "cells": _base64(bytes([NO_ROW] * len(cells)))}
    least, most = min(known), max(known)
    scale = (NO_ROW - 1) / (most - least) if most > least else 0.0
    data = bytes(NO_ROW if cell is None else round((cell - least) * scale) for cell in cells)
    return {"least": least, "most": most, "cells": _base64(data)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _json(facts: dict[str, Any]) -> str:
    # inside a script element only "</" could end it
    return json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("kvplane.inspect") / name).read_text(encoding="utf-8")


def _footer(found: Inspection) -> str:
    said = f"kvplane {__version__} inspect; {human(found.nbytes)} read and verified."
    care = "Rows and ids reveal what was said: treat this page as the session."
    return f"<footer>{escape(said)} {care}</footer>"


def _list(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"<dl>{rows}</dl>"


def _problems(found: Inspection) -> str:
    if not found.problems:
        return ""
    more = found.num_problems - len(found.problems)
    rows = "".join(f"<li>{escape(problem)}</li>" for problem in found.problems)
    end = f"<li>and {more:,} more</li>" if more else ""
    return (
        f'<details open><summary>What is wrong</summary><ul class="bad">{rows}{end}</ul></details>'
    )


def _card(part: GroupFacts) -> str:
    capacity, length, _, origin_physical = part.cursor
    if part.group.is_sliding:
        label = (
            f"A ring of {capacity:,} rows, {length:,} of them live, the oldest in row "
            f"{origin_physical:,}; it has wrapped {part.wraps:,} times"
        )
        wraps = "1 wrap" if part.wraps == 1 else f"{part.wraps:,} wraps"
        lines = (wraps, f"{length:,} of {capacity:,}", f"oldest in {origin_physical:,}")
        picture = dial(
            capacity=capacity,
            length=length,
            origin_physical=origin_physical,
            label=label,
            lines=lines,
        )
        picture += (
            '<p class="key">row 0 on top, clockwise; <b class="oldest">oldest</b> faint, '
            "newest strong; the long mark is where the next row goes</p>"
        )
    else:
        share = 100 * length / capacity if capacity else 0
        picture = (
            f'<div class="bar" role="img" aria-label="{length:,} of {capacity:,} rows are live">'
            f'<i style="width:{share:.3f}%"></i></div>'
            f'<p class="key">{length:,} of {capacity:,} rows: it grows, and never wraps</p>'
        )
    body = _list([*ring_of(part), ("layers", _layers(part.group.layers))])
    return f'<section class="card"><h3>{escape(kind_of(part))}</h3>{picture}{body}</section>'


def _layers(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers[:16]))
    return shown if len(layers) <= 16 else f"{shown}, ... {layers[-1]}"  # noqa: PLR2004 - a line


def _plan(found: Inspection) -> str:
    header = ["layer group", "reserved", "planned", "held", ""]
    rows = []
    for part in found.groups:
        same = "as planned" if part.held == part.planned else "differs"
        cells = [part.group.id, *(f"{n:,}" for n in (part.reserved, part.planned, part.held)), same]
        rows.append(cells)
    note = '<p class="soft">Bytes of rows. Fewer than planned: the session went back.</p>'
    return f"<h3>Fill against the plan</h3>{_table(header, rows)}{note}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _blocks(found: Inspection) -> str:
    parts = []
    for part in found.groups:
        shared = shared_nbytes(part, found)
        words = f"{len(part.spans):,} spans; {human(shared)} of {human(part.held)} shared"
        strip = "".join(
            f'<i class="{piece.kind}" style="width:{piece.percent:.4f}%"></i>'
            for piece in blocks_of(part, found)
        )
        parts.append(
            f'<p>{escape(part.group.id)} <span class="soft">{escape(words)}</span></p>'
            f'<div class="blocks" role="img" aria-label="{escape(words)}">{strip}</div>'
        )
    parts.append(
        '<p class="key"><b class="own">its own</b>, <b class="shared">shared</b>, not held; '
        "positions from left to right</p>"
    )
    who = found.sharing
    if not who.num_sharers:
        parts.append('<p class="soft">Nothing else in this root names these blobs.</p>')
    else:
        rows = [
            [f"{sharer.kind} {sharer.name}", f"{sharer.num_blobs:,}", human(sharer.nbytes)]
            for sharer in who.sharers
        ]
        parts.append("<h3>Shared with</h3>" + _table(["", "blobs", "bytes"], rows))
        if who.num_sharers > len(rows):
            parts.append(f'<p class="soft">and {who.num_sharers - len(rows):,} more</p>')
    return "".join(parts)


def _heat(found: Inspection) -> str:
    if not found.heat.num_columns or not found.heat.layers:
        return '<p class="soft">No rows are held.</p>'
    words = (
        f"Mean Euclidean norm over heads and {found.heat.width:,} positions a column; one line a "
        "layer, layer 0 on top. Empty: no row is held there."
    )
    return f"""<p class="soft">{escape(words)}</p>
<div class="controls">
<fieldset><legend>Norms of</legend>
<label><input type="radio" name="what" value="key" checked> keys</label>
<label><input type="radio" name="what" value="value"> values</label></fieldset>
<fieldset><legend>Colours by</legend>
<label><input type="radio" name="scale" value="layer" checked> layer</label>
<label><input type="radio" name="scale" value="all"> all layers</label></fieldset>
</div>
<canvas id="heat" tabindex="0" role="img" aria-describedby="readout"
 aria-label="Norms by layer and position; arrow keys move, with shift by ten"></canvas>
<p class="key axis"><span>position 0</span><span>{found.content.state.position:,}</span></p>
<p id="readout" aria-live="polite" class="soft">Point at a cell, or move with the arrow keys.</p>
<p class="bad" id="scriptless">The heat map needs scripts; all else is here without.</p>"""


def _provenance(found: Inspection) -> str:
    runs = [
        f"<details><summary>{escape(where)}</summary>{_list(facts)}</details>"
        for where, facts in provenance_of(found)
    ]
    config = found.parts.get("config")
    if config:
        text = escape(json.dumps(config, indent=1, sort_keys=True))
        runs.append(
            f"<details><summary>the model's configuration</summary><pre>{text}</pre></details>"
        )
    return "".join(runs) or '<p class="soft">It holds no rows.</p>'
