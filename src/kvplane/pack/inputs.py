"""What a session was given, as documents hold it: token ids, and every other input.

ids     base64 of u32 LE
aux     [first, stop, type, digest] of each other input, ascending
"""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvplane.errors import ArgumentError, PackCorrupt, PackTooLarge
from kvplane.pack.chain import ID_NBYTES, Aux
from kvplane.pack.encoding import is_hex, is_text
from kvplane.pack.limits import INTEGER_STOP, TOKENS


def encoded_ids(ids: bytes) -> str:
    """Packed ids as a document holds them."""
    return base64.b64encode(ids).decode()


def decoded_ids(text: Any, path: str) -> bytes:  # noqa: ANN401 - any JSON value
    """Packed ids, u32 LE: PackCorrupt, PackTooLarge."""
    if not isinstance(text, str):
        raise PackCorrupt(path=path, what="tokens are no text")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise PackCorrupt(path=path, what=f"tokens are no base64: {error}") from error
    if len(data) // ID_NBYTES > TOKENS:
        raise PackTooLarge(what=f"{path}: tokens", limit=TOKENS, got=len(data) // ID_NBYTES)
    if len(data) % ID_NBYTES or encoded_ids(data) != text:
        raise PackCorrupt(path=path, what="tokens are not whole ids in canonical base64")
    return data


def unpacked(ids: bytes) -> tuple[int, ...]:
    """Packed ids as numbers."""
    return tuple(np.frombuffer(ids, dtype="<u4").tolist())


def ordered(aux: Iterable[Aux], *, below: int | None = None) -> tuple[Aux, ...]:
    """Other inputs as documents list them: ascending, those that begin below a position.

    Raises:
        ArgumentError: one that no document can hold, or one twice.
    """
    items = [Aux(*item) for item in aux]
    for item in items:
        if not _is_aux(list(item)):
            expected = "first < stop, a type, and a digest of 64 hex digits"
            raise ArgumentError(argument="aux", expected=expected, got=tuple(item))
    if len(set(items)) < len(items):
        raise ArgumentError(argument="aux", expected="distinct items", got="one twice")
    return tuple(sorted(item for item in items if below is None or item.first < below))


def aux_of(items: Any, path: str, *, below: int) -> tuple[Aux, ...]:  # noqa: ANN401
    """Other inputs in a document of that position: PackCorrupt."""
    if not isinstance(items, list) or not all(map(_is_aux, items)):
        raise PackCorrupt(path=path, what="aux is no list of first, stop, type, digest")
    read = tuple(Aux(*item) for item in items)
    if list(read) != sorted(set(read)) or any(item.first >= below for item in read):
        raise PackCorrupt(path=path, what="aux is not ascending and below the position")
    return read


def _is_aux(item: Sequence[Any]) -> bool:
    return (
        isinstance(item, list)
        and len(item) == len(Aux._fields)
        and type(item[0]) is int
        and type(item[1]) is int
        and 0 <= item[0] < item[1] < INTEGER_STOP
        and is_text(item[2])
        and item[2] != ""
        and is_hex(item[3])
    )
