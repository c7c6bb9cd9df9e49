"""Token ids and positions as callers give them, checked once at the door."""

import numbers
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, strided

from kvplane.errors import ArgumentError

# ids travel as 32-bit unsigned integers in packs
ID_STOP = 2**32
COUNT_STOP = 2**31


class Tokens(NamedTuple):
    """What a step was asked to add: how many, and their ids by sequence when known."""

    num_tokens: int
    ids: list[list[int]] | None


def as_tokens(tokens: object, *, batch: int | None, remembers: bool) -> Tokens:
    """The tokens of a step, from ids `[T]` (or `[batch, T]`) or a count.

    Raises:
        ArgumentError: there are none, an id is outside 32 bits, the batch differs, or a count was
            given to a session that remembers ids.
    """
    count = whole(tokens)
    if count is not None:
        if remembers:
            raise ArgumentError(
                argument="tokens", expected="ids: this session remembers them", got=tokens
            )
        if not 1 <= count < COUNT_STOP:
            raise ArgumentError(argument="tokens", expected="at least one", got=tokens)
        return Tokens(count, None)
    rows = _rows(tokens, batch)
    count = len(rows[0])
    if any(len(row) != count for row in rows):
        lengths = [len(row) for row in rows]
        raise ArgumentError(argument="tokens", expected="rows of one length", got=lengths)
    if count == 0:
        raise ArgumentError(argument="tokens", expected="at least one", got=tokens)
    return Tokens(count, rows if remembers else None)


def checked_position(position: object) -> int:
    """The position as an int.

    Raises:
        ArgumentError: it is not a whole number.
    """
    number = whole(position)
    if number is None:
        raise ArgumentError(argument="position", expected="a whole number", got=position)
    return number


def checked_ids(ids: object, *, num_sequences: int, num_tokens: int) -> list[list[int]] | None:
    """The ids that come with rows from elsewhere, one list a sequence.

    Raises:
        ArgumentError: they are not that many of that many sequences, or outside 32 bits.
    """
    if ids is None:
        return None
    check_kind("tokens", ids, Sequence, f"{num_sequences} rows of ids")
    rows = _rows(ids, num_sequences)
    lengths = [len(row) for row in rows]
    if any(length != num_tokens for length in lengths):
        raise ArgumentError(argument="tokens", expected=f"{num_tokens} ids a row", got=lengths)
    return rows


def checked_cuts(cuts: Sequence[object]) -> tuple[int, ...]:
    """Positions inside a step, as ints.

    Raises:
        ArgumentError: they are no sequence, or one is not a whole number.
    """
    if type(cuts) is tuple and not cuts:
        return ()
    check_kind("capture", cuts, Sequence, "a sequence of positions")
    positions = [whole(cut) for cut in cuts]
    kept = tuple(position for position in positions if position is not None)
    if len(kept) < len(positions):
        raise ArgumentError(argument="capture", expected="whole numbers", got=cuts)
    return kept


def check_kind(argument: str, got: object, kind: type, expected: str) -> None:
    """Refuse what is not of a kind: ArgumentError. A text is no sequence here."""
    if not isinstance(got, kind) or (kind is Sequence and isinstance(got, (str, bytes))):
        raise ArgumentError(argument=argument, expected=expected, got=got)


def whole(number: object) -> int | None:
    """A whole number as an int; None for anything else, a bool too."""
    if type(number) is bool or not isinstance(number, numbers.Integral):
        return None
    return int(number)


def _rows(tokens: object, batch: int | None) -> list[list[int]]:
    if isinstance(tokens, Tensor):
        if tokens.is_floating_point() or tokens.is_complex():
            raise ArgumentError(argument="tokens", expected="whole numbers", got=tokens.dtype)
        if tokens.is_meta or tokens.layout is not strided:
            expected = "a tensor that has its numbers"
            raise ArgumentError(argument="tokens", expected=expected, got=tokens.layout)
        tokens = tokens.tolist()
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Sequence):
        raise ArgumentError(argument="tokens", expected="ids or a count", got=tokens)
    if batch is None:
        return [_ids(tokens)]
    if len(tokens) != batch or not all(isinstance(row, Sequence) for row in tokens):
        raise ArgumentError(argument="tokens", expected=f"{batch} rows of ids", got=tokens)
    return [_ids(row) for row in tokens]


def _ids(row: Sequence[object]) -> list[int]:
    ids = []
    for token in row:
        # most of them: asking what a number is takes longer than the rest
        number = token if type(token) is int else whole(token)
        if number is None or not 0 <= number < ID_STOP:
            raise ArgumentError(argument="tokens", expected="ids within 32 bits", got=token)
        ids.append(number)
    return ids
