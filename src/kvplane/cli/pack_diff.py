"""`kvplane pack diff`: whether two sessions are bitwise equal, and where they first differ."""

import json
from typing import Any

from kvplane.cli.output import console, print_table
from kvplane.cli.pack import AsJson
from kvplane.cli.where import where
from kvplane.pack import open_root, read_session
from kvplane.pack.compare import Comparison, FieldDifference, Side, compare

DIFFERENT = 1
SHOWN_LENGTH = 60


def diff(
    left: str,
    right: str,
    /,
    *,
    root: str | None = None,
    right_root: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Say whether two sessions are bitwise equal, and where they first differ.

    Model, ids, cursors and every row that both have are compared; names and dates are not. Who
    made the rows is reported and makes no difference. Exits with 1 when they differ.

    Example: kvplane pack diff notes notes-copy

    Args:
        left: A session, or the path of its file.
        right: Another.
        root: The root of both; by default what kvplane run keeps.
        right_root: The other's, when it lies elsewhere.
        as_json: Print JSON.
    """
    found = compare(_side(left, root), _side(right, root if right_root is None else right_root))
    if as_json:
        print(json.dumps(_facts(found)))  # noqa: T201
    else:
        _print(found, left, right)
    if not found.equal:
        raise SystemExit(DIFFERENT)


def _side(name: str, root: str | None) -> Side:
    place = where(name, root)
    storage = open_root(place.root)
    return Side(storage, read_session(storage, place.name))


def _print(found: Comparison, left: str, right: str) -> None:
    out = console()
    for title, fields in (("differs", found.fields), ("differs, no row by it", found.provenance)):
        if fields:
            rows = [[f.field, _shown(f.left), _shown(f.right)] for f in fields]
            print_table(out, title, ["", left, right], rows)
    if found.layers:
        rows = [
            [
                f"layer {d.layer} {d.what}",
                *(f"{n:,}" for n in (d.first.position, d.first.head, d.num_rows)),
            ]
            for d in found.layers
        ]
        print_table(out, "rows differ", ["", "first position", "head", "rows"], rows)
    for name in found.states:
        out.print(f"state {name} differs")
    place = found.first
    if place is not None:
        out.print(
            f"rows first differ at position {place.position:,}, layer {place.layer}, "
            f"{place.what}, head {place.head}"
        )
    elif found.num_rows:
        out.print(f"{found.num_rows:,} rows compared: all bits are equal")
    out.print("bitwise equal" if found.equal else "different")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 3] + "..."


def _facts(found: Comparison) -> dict[str, Any]:
    def fields(differences: tuple[FieldDifference, ...]) -> list[dict[str, Any]]:
        return [difference._asdict() for difference in differences]

    return {
        "equal": found.equal,
        "fields": fields(found.fields),
        "provenance": fields(found.provenance),
        "first": None if found.first is None else found.first._asdict(),
        "layers": [
            {
                "layer": layer.layer,
                "what": layer.what,
                "first": layer.first._asdict(),
                "num_rows": layer.num_rows,
            }
            for layer in found.layers
        ],
        "states": list(found.states),
        "num_rows": found.num_rows,
    }
