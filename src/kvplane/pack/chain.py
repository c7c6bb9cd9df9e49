"""Digests of a prompt, block by block: two prompts share one exactly as far as they agree.

root        salt and fingerprint
chain[b]    root or chain[b-1], the block's number, its 256 ids, and every other input in it
tail        the same over fewer than 256 ids; "-" when there are none
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from kvplane.errors import ArgumentError
from kvplane.pack.encoding import digest, framed, is_hex
from kvplane.pack.limits import BLOCK

ID_STOP = 1 << 32
ID_NBYTES = 4
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
        ArgumentError: an id outside 32 bits.
    """
    return _digest_of(parent, block, packed_ids(ids), aux)


def _digest_of(parent: bytes, block: int, ids: bytes, aux: Sequence[Aux]) -> bytes:
    num_ids = len(ids) // ID_NBYTES
    first, stop = block * BLOCK, block * BLOCK + num_ids
    inside = sorted(item for item in aux if item.first < stop and item.stop > first)
    parts = [framed(b"kvplane/block/1"), framed(parent), _u64(block), _u64(num_ids), ids]
    parts.append(_u64(len(inside)))
    for item in inside:
        parts += [_u64(item.first), _u64(item.stop)]
        parts += [framed(item.type.encode()), framed(bytes.fromhex(item.digest))]
    return digest(b"".join(parts))


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def packed_ids(ids: Sequence[int]) -> bytes:
    """Ids as u32 LE: ArgumentError outside 32 bits."""
    if not len(ids):
        return b""
    # without a dtype: a fraction must not become a whole number, nor a huge one wrap
    numbers = np.array(ids)
    whole = numbers.dtype.kind in "iu" and numbers.ndim == 1
    if not whole or int(numbers.min()) < 0 or int(numbers.max()) >= ID_STOP:
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
        self._ids = packed_ids(tokens)
        self._aux = tuple(aux)
        self._digests = [chain_root(fingerprint, salt=salt)]

    @classmethod
    def packed(
        cls, fingerprint: str, ids: bytes, *, aux: Sequence[Aux] = (), salt: bytes = b""
    ) -> Self:
        """The chain of ids that are u32 LE already."""
        chain = cls(fingerprint, (), aux=aux, salt=salt)
        chain._ids = ids
        return chain

    def at(self, num_blocks: int) -> str:
        """Hex of the chain after so many whole blocks; 0 is the root.

        Raises:
            ArgumentError: there are not so many.
        """
        most = len(self._ids) // ID_NBYTES // BLOCK
        if not 0 <= num_blocks <= most:
            raise ArgumentError(
                argument="num_blocks", expected=f"within [0, {most}]", got=num_blocks
            )
        while len(self._digests) <= num_blocks:
            block = len(self._digests) - 1
            ids = self._ids[block * BLOCK * ID_NBYTES : (block + 1) * BLOCK * ID_NBYTES]
            self._digests.append(_digest_of(self._digests[-1], block, ids, self._aux))
        return self._digests[num_blocks].hex()

    def tail(self, position: int) -> str:
        """The first 16 digits of the tail's digest at a position; "-" on a block's edge."""
        block, rest = divmod(position, BLOCK)
        if rest == 0:
            return EMPTY_TAIL
        parent = bytes.fromhex(self.at(block))
        ids = self._ids[block * BLOCK * ID_NBYTES : position * ID_NBYTES]
        return _digest_of(parent, block, ids, self._aux).hex()[:TAIL_LENGTH]
