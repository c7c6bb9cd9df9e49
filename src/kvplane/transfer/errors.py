"""Every way a handoff refuses or fails; after each, the receiver's store is as it was.

* TransferError              (in `kvplane.errors`)
  x TransferRefused          one side does not take what the other states; names the field
  x TransferVersion          the peer speaks another version, or something else
  x TransferCorrupt          bytes that are not what they claim
  x TransferTooLarge         a length passes what was announced or is allowed
  x TransferIncomplete       closed before every segment was there
  x TransferUnconfirmed      the receiver can use another number of tokens than was sent
  x TransferAborted          the peer gave up, and said why
  x LinkLost                 the connection ended (also a ConnectionError)
  x LinkTimeout              nothing moved in time, or not enough (also a TimeoutError)
"""

from kvplane.errors import TransferError


class TransferRefused(TransferError):
    """One side does not take what the other states; nothing was sent or made."""

    def __init__(self, *, field: str, expected: object, got: object) -> None:
        super().__init__(f"{field}: the receiver has {expected!r}, the sender {got!r}")
        self.field = field
        self.expected = expected
        self.got = got


class TransferVersion(TransferError):
    """The peer speaks another version of the wire, or something else altogether."""

    def __init__(self, *, expected: object, got: object) -> None:
        super().__init__(f"this side speaks {expected}, the peer {got}")
        self.expected = expected
        self.got = got


class TransferCorrupt(TransferError):
    """Bytes that are not what they claim to be."""

    def __init__(self, *, what: str) -> None:
        super().__init__(what)
        self.what = what


class TransferTooLarge(TransferError):
    """A length passes what was announced or is allowed; no memory was taken for it."""

    def __init__(self, *, what: str, limit: int, got: int) -> None:
        super().__init__(f"{what} is {got}, the limit is {limit}")
        self.what = what
        self.limit = limit
        self.got = got


class TransferIncomplete(TransferError):
    """The sender closed before every segment was there."""

    def __init__(self, *, missing: int, num_segments: int) -> None:
        super().__init__(f"{missing} of {num_segments} segments are missing")
        self.missing = missing
        self.num_segments = num_segments


class TransferUnconfirmed(TransferError):
    """The two sides do not agree on how many tokens the receiver can use."""

    def __init__(self, *, expected: int, got: int) -> None:
        super().__init__(f"{expected} tokens were sent, the receiver can use {got}")
        self.expected = expected
        self.got = got


class TransferAborted(TransferError):
    """The peer gave up, and said why."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(f"the peer gave up: {reason}")
        self.reason = reason


class LinkLost(TransferError, ConnectionError):
    """The connection ended before the handoff did."""

    def __init__(self, *, link: str, what: str) -> None:
        super().__init__(f"{link}: {what}")
        self.link = link
        self.what = what


class LinkTimeout(TransferError, TimeoutError):
    """Nothing moved in time, or the whole took too long."""

    def __init__(self, *, link: str, what: str, timeout_s: float) -> None:
        super().__init__(f"{link}: {what} within {timeout_s:g} s")
        self.link = link
        self.what = what
        self.timeout_s = timeout_s
