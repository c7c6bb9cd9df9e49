"""Digests of a prompt, block by block: two prompts share one exactly as far as they agree.

root        salt and fingerprint
chain[b]    root or chain[b-1], the block's number, its 256 ids, and every other input in it
tail        the same over fewer than 256 ids; "-" when there are none
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvplane.errors import ArgumentError
from kvplane.pack.encoding import digest, framed, is_hex
from kvplane.pack.limits import BLOCK

ID_STOP = 1 << 32
EMPTY_TAIL = "-"
TAIL_LENGTH = 16


class Aux(NamedTuple):
    """An input that is no token: what stands at positions [first, stop).

    Args:
        first: position.
        stop: position.
        type: "image", "audio", ...
        digest: hex of 32 bytes that identify the item and its processing.
    """

    first: int
    stop: int
    type: str
    digest: str


def chain_root(fingerprint: str, *, salt: bytes = b"") -> bytes:
    """The digest that every chain of a model and tenant begins with."""
    return digest(framed(b"kvplane/root/1"), framed(salt), framed(bytes.fromhex(fingerprint)))


def block_digest(parent: bytes, block: int, ids: Sequence[int], aux: Sequence[Aux] = ()) -> bytes:
    """The digest of a block, or of a tail, after `parent`.

    Raises:
        ArgumentError: an id outside 32 bits, or more than a block of them.
    """
    first, stop = block * BLOCK, block * BLOCK + len(ids)
    inside = sorted(item for item in aux if item.first < stop and item.stop > first)
    parts = [b"kvplane/block/1", parent]
    body = b"".join(framed(part) for part in parts)
    body += block.to_bytes(8, "little") + len(ids).to_bytes(8, "little") + packed_ids(ids)
    body += len(inside).to_bytes(8, "little")
    for item in inside:
        body += item.first.to_bytes(8, "little") + item.stop.to_bytes(8, "little")
        body += framed(item.type.encode()) + framed(bytes.fromhex(item.digest))
    return digest(body)


def packed_ids(ids: Sequence[int]) -> bytes:
    """Ids as u32 LE: ArgumentError outside 32 bits."""
    if not len(ids):
        return b""
    # without a dtype: a fraction must not become a whole number, nor a huge one wrap
    numbers = np.array(ids)
    whole = numbers.dtype.kind in "iu" and numbers.ndim == 1
    if not whole or not (0 <= int(numbers.min()) and int(numbers.max()) < ID_STOP):
        raise ArgumentError(argument="tokens", expected="ids within 32 bits", got="others")
    return numbers.astype("<u4").tobytes()


class Chain:
    """The chain of a token sequence.

    Args:
        fingerprint: hex.
        tokens: ids.
        aux: other inputs.
        salt: of the tenant.
    """

    def __init__(
        self,
        fingerprint: str,
        tokens: Sequence[int],
        *,
        aux: Sequence[Aux] = (),
        salt: bytes = b"",
    ) -> None:
        if not is_hex(fingerprint):
            raise ArgumentError(argument="fingerprint", expected="64 hex digits", got=fingerprint)
        self._tokens = tokens
        self._aux = tuple(aux)
        self._digests = [chain_root(fingerprint, salt=salt)]

    def at(self, num_blocks: int) -> str:
        """Hex of the chain after so many whole blocks; 0 is the root."""
        while len(self._digests) <= num_blocks:
            block = len(self._digests) - 1
            ids = self._tokens[block * BLOCK : (block + 1) * BLOCK]
            self._digests.append(block_digest(self._digests[-1], block, ids, self._aux))
        return self._digests[num_blocks].hex()

    def tail(self, position: int) -> str:
        """The first 16 digits of the tail's digest at a position; "-" on a block's edge."""
        block, rest = divmod(position, BLOCK)
        if rest == 0:
            return EMPTY_TAIL
        parent = bytes.fromhex(self.at(block))
        ids = self._tokens[block * BLOCK : position]
        return block_digest(parent, block, ids, self._aux).hex()[:TAIL_LENGTH]
