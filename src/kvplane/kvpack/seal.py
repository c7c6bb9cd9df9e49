"""Encryption of pieces and manifests: ChaCha20-Poly1305, a fresh salt and nonce each."""

import secrets
from typing import NamedTuple, Self

from kvplane.errors import ExtraMissing
from kvplane.kvpack.wire import reject

SALT_NBYTES = 16
NONCE_NBYTES = 12


class Seal(NamedTuple):
    """What makes one encryption differ from every other; it is stored beside the result."""

    salt: bytes
    nonce: bytes

    @classmethod
    def fresh(cls) -> Self:
        """One that nobody had before."""
        return cls(secrets.token_bytes(SALT_NBYTES), secrets.token_bytes(NONCE_NBYTES))

    def check(self) -> None:
        """Nothing, when it has the lengths of one: KvpackRejected."""
        if (len(self.salt), len(self.nonce)) != (SALT_NBYTES, NONCE_NBYTES):
            raise reject("bounds", "a salt has 16 bytes and a nonce 12")


PLAIN = Seal(bytes(SALT_NBYTES), bytes(NONCE_NBYTES))


def encrypt(key: bytes, seal: Seal, data: bytes, *, header: bytes) -> bytes:
    """`data` encrypted, and 16 bytes that bind it to its header.

    Raises:
        ExtraMissing: cryptography is not installed.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import (  # noqa: PLC0415
            ChaCha20Poly1305,
        )
    except ImportError as error:
        raise ExtraMissing(package="cryptography", extra="kvpack") from error
    return ChaCha20Poly1305(key).encrypt(seal.nonce, data, header)


def decrypt(key: bytes, seal: Seal, data: bytes, *, header: bytes) -> bytes:
    """What was encrypted.

    Raises:
        KvpackRejected: it was not encrypted with this key, or a bit of it or its header changed.
        ExtraMissing: cryptography is not installed.
    """
    try:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415
        from cryptography.hazmat.primitives.ciphers.aead import (  # noqa: PLC0415
            ChaCha20Poly1305,
        )
    except ImportError as error:
        raise ExtraMissing(package="cryptography", extra="kvpack") from error
    try:
        return ChaCha20Poly1305(key).decrypt(seal.nonce, data, header)
    except InvalidTag:
        raise reject("authentication", "encrypted with another key, or changed since") from None
