"""Canonical bytes: one JSON text for one value, and digests over framed parts.

A document is written in one way only, so that equal content has equal bytes and names in every
process; one whose bytes are not its own canonical form is refused.
"""

import json
import re
from typing import Any

from blake3 import blake3

from kvplane.errors import PackCorrupt, PackTooLarge, PackVersion
from kvplane.pack.limits import FORMAT, INTEGER_STOP, JSON_DEPTH

HEX_DIGITS = frozenset("0123456789abcdef")
DIGEST_LENGTH = 64
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


def digest(*parts: bytes | bytearray | memoryview) -> bytes:
    """D(parts): BLAKE3-256 over the parts, one after another."""
    state = blake3()
    for part in parts:
        state.update(part)
    return bytes(state.digest())


def framed(part: bytes) -> bytes:
    """F(part): its length as u64 LE, then the part."""
    return len(part).to_bytes(8, "little") + part


def is_hex(value: object, *, length: int = DIGEST_LENGTH) -> bool:
    """Whether a value is so many lower-case hexadecimal digits."""
    return isinstance(value, str) and len(value) == length and set(value) <= HEX_DIGITS


def canonical(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """The one JSON text of a value: sorted keys, no spaces, UTF-8."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def sealed(kind: str, document: dict[str, Any]) -> bytes:
    """A document's bytes with its `self` digest in it."""
    body = {name: value for name, value in document.items() if name != "self"}
    return canonical({**body, "self": self_digest(kind, body)})


def self_digest(kind: str, body: dict[str, Any]) -> str:
    """Hex D(F("kvplane/<kind>/1") F(JSON without self))."""
    label = f"kvplane/{kind}/{FORMAT}".encode()
    return digest(framed(label), framed(canonical(body))).hex()


def parsed(data: bytes, path: str) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        PackCorrupt: no canonical JSON object.
        PackTooLarge: nested too deeply.
        PackVersion: its "format" is another than 1; nothing else was looked at.
    """
    _check_depth(data, path)
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_unique,
            parse_float=_refused,
            parse_constant=_refused,
            parse_int=_integer,
        )
    except (ValueError, RecursionError) as error:
        raise PackCorrupt(path=path, what=f"no canonical JSON: {error}") from error
    if not isinstance(value, dict):
        raise PackCorrupt(path=path, what="no JSON object")
    if value.get("format") != FORMAT or isinstance(value.get("format"), bool):
        raise PackVersion(path=path, expected=FORMAT, got=value.get("format"))
    if canonical(value) != data:
        raise PackCorrupt(path=path, what="its bytes are not their canonical form")
    return value


def unsealed(kind: str, data: bytes, path: str) -> dict[str, Any]:
    """The document in `data`, once its `self` digest is right: as `parsed`."""
    document = parsed(data, path)
    body = {name: value for name, value in document.items() if name != "self"}
    if document.get("self") != self_digest(kind, body):
        raise PackCorrupt(path=path, what="its self digest is not that of its content")
    return document


def _check_depth(data: bytes, path: str) -> None:
    depth = deepest = 0
    for byte in _BRACKETS.findall(_STRINGS.sub(b"", data)):
        depth += 1 if byte in {b"[", b"{"} else -1
        deepest = max(deepest, depth)
    if deepest > JSON_DEPTH:
        raise PackTooLarge(what=f"{path}: JSON depth", limit=JSON_DEPTH, got=deepest)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        message = "a key stands twice"
        raise ValueError(message)
    return value


def _refused(text: str) -> None:
    message = f"{text[:40]} is no whole number"
    raise ValueError(message)


def _integer(text: str) -> int:
    # long digits are refused before they are converted
    number = int(text) if len(text) < 20 else INTEGER_STOP  # noqa: PLR2004 - digits of 2^53
    if not -INTEGER_STOP < number < INTEGER_STOP:
        message = f"{text[:40]} is outside 2^53"
        raise ValueError(message)
    return number
