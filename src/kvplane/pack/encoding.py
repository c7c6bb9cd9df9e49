"""Canonical bytes: one JSON text for one value, and digests over framed parts.

A document is written in one way only, so that equal content has equal bytes and names in every
process; one whose bytes are not its own canonical form is refused.
"""

import json
from typing import Any

from blake3 import blake3

from kvplane.errors import PackCorrupt, PackVersion
from kvplane.pack.limits import FORMAT
from kvplane.pack.strict import loaded

HEX_DIGITS = frozenset("0123456789abcdef")
DIGEST_LENGTH = 64


def hasher() -> blake3:
    """BLAKE3-256 over what it is given part by part."""
    return blake3()


def digest(*parts: bytes | bytearray | memoryview) -> bytes:
    """D(parts): BLAKE3-256 over the parts, one after another."""
    state = hasher()
    for part in parts:
        state.update(part)
    return bytes(state.digest())


def framed(part: bytes) -> bytes:
    """F(part): its length as u64 LE, then the part."""
    return len(part).to_bytes(8, "little") + part


def is_hex(value: object, *, length: int = DIGEST_LENGTH) -> bool:
    """Whether a value is so many lower-case hexadecimal digits."""
    return isinstance(value, str) and len(value) == length and set(value) <= HEX_DIGITS


def is_text(value: object) -> bool:
    """Whether a value is a string that UTF-8 has: none with half a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= mark <= "\udfff" for mark in value)


def json_text(value: Any, *, sort_keys: bool) -> bytes:  # noqa: ANN401 - any JSON value
    """A value's JSON without spaces, in UTF-8; keys sorted, or in the order they stand in.

    Raises:
        ValueError: half a surrogate pair, which UTF-8 does not have.
    """
    text = json.dumps(
        value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def canonical(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """The one JSON text of a value: sorted keys, no spaces, UTF-8; as `json_text`."""
    return json_text(value, sort_keys=True)


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
        PackTooLarge: nested too deeply, or too many values.
        PackVersion: its "format" is another than 1; nothing else was looked at.
    """
    value, doubt = loaded(data, path)
    if not isinstance(value, dict):
        raise PackCorrupt(path=path, what="no JSON object")
    check_format(value, path)
    if doubt is not None:
        raise PackCorrupt(path=path, what=f"no canonical JSON: {doubt}")
    check_same(data, value, path, sort_keys=True)
    return value


def check_format(fields: dict[str, Any], path: str) -> None:
    """Refuse fields of another format: PackVersion."""
    number = fields.get("format")
    if type(number) is not int or number != FORMAT:
        raise PackVersion(path=path, expected=FORMAT, got=number)


def check_same(data: bytes, value: Any, path: str, *, sort_keys: bool) -> None:  # noqa: ANN401
    """Refuse bytes that are not the one text of their value: PackCorrupt."""
    try:
        written = json_text(value, sort_keys=sort_keys)
    except ValueError as error:
        raise PackCorrupt(path=path, what=f"no text in UTF-8: {error}") from error
    if written != data:
        raise PackCorrupt(path=path, what="its bytes are not their canonical form")


def unsealed(kind: str, data: bytes, path: str) -> dict[str, Any]:
    """The document in `data`, once its `self` digest is right: as `parsed`."""
    document = parsed(data, path)
    body = {name: value for name, value in document.items() if name != "self"}
    if document.get("self") != self_digest(kind, body):
        raise PackCorrupt(path=path, what="its self digest is not that of its content")
    return document
