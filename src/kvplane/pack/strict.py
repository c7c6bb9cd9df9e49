"""JSON from strangers: its size, depth and values are bounded, and every doubt is remembered.

The format's number is looked at before anything is refused for what this version does not know, so
that a file of a later version is called that.
"""

import json
import re
from typing import Any

from kvplane.errors import PackCorrupt, PackTooLarge
from kvplane.pack.limits import INTEGER_STOP, JSON_DEPTH, JSON_VALUES

# the unrolled form walks a megabyte of base64 at memory speed
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")
_INTEGER_DIGITS = 20


def loaded(data: bytes, path: str) -> tuple[Any, str | None]:
    """The JSON value in `data`, and the first thing in it that format 1 does not have.

    A fraction comes out as None, a number of 2^53 or more as 2^53, of two equal keys the last.

    Raises:
        PackCorrupt: no JSON in UTF-8.
        PackTooLarge: nested too deeply, or too many values.
    """
    _check_shape(data, path)
    doubts: list[str] = []
    try:
        value = json.loads(data.decode(), **_hooks(doubts))
    except (ValueError, RecursionError) as error:
        raise PackCorrupt(path=path, what=f"no JSON: {error}") from error
    return value, doubts[0] if doubts else None


def _check_shape(data: bytes, path: str) -> None:
    outside = _STRINGS.sub(b"", data)
    num_values = outside.count(b",") + outside.count(b"[") + outside.count(b"{")
    if num_values > JSON_VALUES:
        raise PackTooLarge(what=f"{path}: JSON values", limit=JSON_VALUES, got=num_values)
    depth = deepest = 0
    for bracket in _BRACKETS.findall(outside):
        depth += 1 if bracket in {b"[", b"{"} else -1
        deepest = max(deepest, depth)
    if deepest > JSON_DEPTH:
        raise PackTooLarge(what=f"{path}: JSON depth", limit=JSON_DEPTH, got=deepest)


def _hooks(doubts: list[str]) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) < len(items):
            doubts.append("a key stands twice")
        return value

    def fraction(text: str) -> None:
        doubts.append(f"{text[:40]} is no whole number")

    def integer(text: str) -> int:
        # long digits are refused before they are converted
        number = int(text) if len(text) < _INTEGER_DIGITS else INTEGER_STOP
        if not -INTEGER_STOP < number < INTEGER_STOP:
            doubts.append(f"{text[:40]} is outside 2^53")
            return INTEGER_STOP
        return number

    return {
        "object_pairs_hook": pairs,
        "parse_float": fraction,
        "parse_constant": fraction,
        "parse_int": integer,
    }
