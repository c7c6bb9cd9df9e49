"""The small frames beside openings and rows: what each says, and how it is read back.

HELLO     nonce                     both sides, first: 16 bytes drawn for this transfer
ACCEPT    cut, reason, have         the receiver holds [0, cut); why not more; HAVE follows
HAVE      numbers and digests       of segments that came before the connection was lost
CLOSE     digest                    over the digests of all segments
CONFIRM   tokens                    both sides: how many the receiver can use now
REFUSE    field, expected, got      one side does not take what the other states
ABORT     reason                    one side gives up
    REQUEST   ids                  before the hellos: a receiver asks to be sent these
"""

import secrets
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvplane.pack.encoding import canonical, digest, framed, is_hex, is_text
from kvplane.pack.limits import FORMAT
from kvplane.pack.state import is_count
from kvplane.transfer.errors import TransferAborted, TransferCorrupt, TransferRefused
from kvplane.transfer.frames import DIGEST_NBYTES, KEY_NBYTES, Frame, Header, Kind, digest_of
from kvplane.transfer.opening import document

NONCE_DIGITS = 32
TEXT_LENGTH = 2_000
# no body of a kind is longer; ids and rows have the length that was announced
LIMITS = {
    Kind.HELLO: 256,
    Kind.OPENING: 1 << 20,
    Kind.ACCEPT: 16 << 10,
    Kind.CLOSE: 256,
    Kind.CONFIRM: 256,
    Kind.REFUSE: 16 << 10,
    Kind.ABORT: 16 << 10,
}
FIRST_KEY = digest(framed(b"kvplane/transfer/1"))


class Keys(NamedTuple):
    """What the digests of each direction are keyed with, after the hellos."""

    sender: bytes
    receiver: bytes


def nonce() -> str:
    """A number that no other transfer has: 32 hex digits."""
    return secrets.token_hex(NONCE_DIGITS // 2)


def keys_of(sender_nonce: str, receiver_nonce: str) -> Keys:
    """The keys of one transfer."""
    said = b"kvplane/transfer/1", sender_nonce.encode(), receiver_nonce.encode()
    parts = [framed(part) for part in said]
    made = [digest(*parts, framed(role))[:KEY_NBYTES] for role in (b"sender", b"receiver")]
    return Keys(*made)


def hello(number: str) -> bytes:
    """The body of a HELLO."""
    return canonical({"format": FORMAT, "nonce": number})


def read_hello(frame: Frame) -> str:
    """The peer's nonce: TransferVersion, TransferCorrupt."""
    frame.check(FIRST_KEY)
    number = document(frame.data(), "hello", frozenset({"format", "nonce"}))["nonce"]
    if not is_hex(number, length=NONCE_DIGITS):
        raise TransferCorrupt(what="hello: the nonce is none")
    return str(number)


def rows_key(opening: bytes) -> bytes:
    """What the digests of segments are keyed with: the same for every try of one handoff."""
    return digest(framed(b"kvplane/transfer/rows/1"), framed(opening))[:KEY_NBYTES]


class Accept(NamedTuple):
    """What a receiver answers to an opening.

    Args:
        cut: it holds [0, cut).
        reason: why not more.
        num_have: segments that came before; a HAVE follows unless there are none.
    """

    cut: int
    reason: str
    num_have: int

    def packed(self) -> bytes:
        """The body."""
        return canonical(
            {
                "cut": self.cut,
                "format": FORMAT,
                "have": self.num_have,
                "reason": cropped(self.reason),
            }
        )


def read_accept(data: bytes) -> Accept:
    """What an ACCEPT says: TransferCorrupt."""
    fields = document(data, "accept", frozenset({"cut", "format", "have", "reason"}))
    counts = is_count(fields["cut"]) and is_count(fields["have"])
    if not counts or not is_text(fields["reason"]):
        raise TransferCorrupt(what="accept: no cut, reason and number of segments")
    return Accept(fields["cut"], fields["reason"], fields["have"])


_HAVE = struct.Struct(f"<I{DIGEST_NBYTES}s")
HAVE_NBYTES = _HAVE.size


def have(digests: Mapping[int, bytes]) -> bytes:
    """The body of a HAVE."""
    return b"".join(_HAVE.pack(number, digests[number]) for number in sorted(digests))


def read_have(data: bytes) -> dict[int, bytes]:
    """Digests of segments by number: a sender compares them with its own."""
    return dict(_HAVE.iter_unpack(data))


def whole_digest(key: bytes, digests: list[bytes]) -> str:
    """Hex digest over the digests of all segments, in their order."""
    return digest_of(key, Header(Kind.CLOSE, len(digests), 0), digests).hex()


def close(whole: str) -> bytes:
    """The body of a CLOSE."""
    return canonical({"digest": whole, "format": FORMAT})


def read_close(data: bytes) -> str:
    """The digest over the whole: TransferCorrupt."""
    whole = document(data, "close", frozenset({"digest", "format"}))["digest"]
    if not is_hex(whole, length=2 * DIGEST_NBYTES):
        raise TransferCorrupt(what="close: no digest")
    return str(whole)


def confirm(tokens: int) -> bytes:
    """The body of a CONFIRM."""
    return canonical({"format": FORMAT, "tokens": tokens})


def read_confirm(data: bytes) -> int:
    """How many tokens: TransferCorrupt."""
    tokens = document(data, "confirm", frozenset({"format", "tokens"}))["tokens"]
    if not is_count(tokens):
        raise TransferCorrupt(what="confirm: no number of tokens")
    return int(tokens)


def refuse(error: TransferRefused) -> bytes:
    """The body of a REFUSE."""
    said = {"expected": error.expected, "field": error.field, "got": error.got}
    return canonical({"format": FORMAT, **{name: _said(value) for name, value in said.items()}})


def abort(reason: str) -> bytes:
    """The body of an ABORT."""
    return canonical({"format": FORMAT, "reason": cropped(reason)})


def read_end(kind: Kind, data: bytes) -> TransferRefused | TransferAborted:
    """What a REFUSE or ABORT says, as the error to raise: TransferCorrupt when it is none."""
    if kind is Kind.ABORT:
        return TransferAborted(reason=_text(document(data, "abort", _ABORT)["reason"]))
    fields = document(data, "refuse", _REFUSE)
    return TransferRefused(
        field=_text(fields["field"]), expected=fields["expected"], got=fields["got"]
    )


_ABORT = frozenset({"format", "reason"})
_REFUSE = frozenset({"expected", "field", "format", "got"})


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return cropped(str(value))


def _said(value: object) -> str | int | None:
    """A value as JSON that every peer reads; what is neither text nor number, in words."""
    if value is None or (type(value) is int and abs(value) < 1 << 53):
        return value
    return cropped(str(value))


def cropped(text: str) -> str:
    """A text that is not too long, in UTF-8."""
    return text[:TEXT_LENGTH].encode("utf-8", "replace").decode()
