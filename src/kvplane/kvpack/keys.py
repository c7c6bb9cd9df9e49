"""Keys: one root secret, and what every other is derived from it.

A root comes from a file or the environment, never from an argument that a list of processes shows.
Reading needs it even where nothing is encrypted: ids and the manifest's seal are keyed.
"""

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvplane.errors import ArgumentError
from kvplane.kvpack import limits
from kvplane.kvpack.wire import id32, reject, u32, u64

ROOT_NBYTES = 32
LIMIT_KEY_FILE = 4096
ENVIRONMENT = "KVPLANE_KVPACK_KEY"


def hkdf(secret: bytes, *, salt: bytes, info: bytes) -> bytes:
    """32 bytes by HKDF-SHA-256."""
    prk = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(prk, info + b"\x01", hashlib.sha256)


def keyed(key: bytes, domain: str, *parts: bytes) -> bytes:
    """HMAC-SHA-256 under a domain."""
    return hmac.digest(key, domain.encode() + b"\0" + b"".join(parts), hashlib.sha256)


def hashed(domain: str, *parts: bytes) -> bytes:
    """SHA-256 under a domain."""
    return hashlib.sha256(domain.encode() + b"\0" + b"".join(parts)).digest()


def same(one: bytes, other: bytes) -> bool:
    """Whether they are equal, in a time that does not say where they differ."""
    return hmac.compare_digest(one, other)


class Keys:
    """The keys of one tenant at one epoch. Its printed form holds no secret."""

    __slots__ = ("_epochs", "_root", "active_epoch", "tenant")

    def __init__(
        self,
        root: bytes,
        *,
        tenant: bytes,
        epoch: int = 1,
        epoch_roots: Mapping[int, bytes] | None = None,
    ) -> None:
        """Derived from `root`.

        Args:
            root: 32 secret bytes.
            tenant: the 32 bytes of the tenant's namespace.
            epoch: the one that is written now, from 1.
            epoch_roots: secrets of epochs that have their own; others use `root`.

        Raises:
            ArgumentError: a secret or tenant of another length, or an epoch below 1.
        """
        for argument, value in (("root", root), ("tenant", tenant)):
            if len(value) != ROOT_NBYTES:
                raise ArgumentError(argument=argument, expected="32 bytes", got=len(value))
        if not 1 <= epoch <= limits.U64:
            raise ArgumentError(argument="epoch", expected="a number from 1", got=epoch)
        self._root = bytes(root)
        self._epochs = dict(epoch_roots or {})
        for number, secret in self._epochs.items():
            if len(secret) != ROOT_NBYTES:
                raise ArgumentError(
                    argument=f"epoch_roots[{number}]", expected="32 bytes", got=len(secret)
                )
        self.tenant = bytes(tenant)
        self.active_epoch = epoch

    def stable(self, label: str) -> bytes:
        """A key that outlives epochs: namespace, prefix or chunk-identity."""
        info = f"kvpack/v1/stable/{label}".encode()
        return hkdf(self._root, salt=self.tenant, info=info)

    def epoch(self, label: str, epoch: int) -> bytes:
        """A key of an epoch: manifest-auth, manifest-encryption, object-identity, ...

        Raises:
            KvpackRejected: the epoch is 0, later than the active one or too long ago.
        """
        if not 1 <= epoch <= self.active_epoch:
            raise reject("bounds", f"epoch {epoch}, the active one is {self.active_epoch}")
        if self.active_epoch - epoch >= limits.EPOCH_WINDOW:
            raise reject("bounds", f"epoch {epoch} is {self.active_epoch - epoch} epochs ago")
        secret = self._epochs.get(epoch, self._root)
        info = f"kvpack/v1/epoch/{label}".encode()
        return hkdf(secret, salt=self.tenant + u64(epoch), info=info)

    def namespace_id(self, operator_tenant_id: str) -> bytes:
        """The namespace of what an operator calls a tenant."""
        name = operator_tenant_id.encode()
        return keyed(self.stable("namespace"), "kvpack/v1/namespace", u32(len(name)), name)

    def __repr__(self) -> str:
        return f"Keys(tenant={id32(self.tenant).hex()}, epoch={self.active_epoch})"


def read_root(path: str | os.PathLike[str] | None = None) -> bytes:
    """The 32 bytes of a root: hexadecimal, or 32 raw bytes, of a file or of the environment.

    Args:
        path: a file that only its owner may read; None takes KVPLANE_KVPACK_KEY's value (a root in
            hexadecimal) or, where that is unset, KVPLANE_KVPACK_KEY_FILE's path.

    Raises:
        ArgumentError: there is none, others may read it, or it is no root; what it holds is not
            repeated.
    """
    if path is None:
        value = os.environ.get(ENVIRONMENT)
        if value is not None:
            return _root(value.encode(errors="replace"), ENVIRONMENT)
        path = os.environ.get(f"{ENVIRONMENT}_FILE")
        if path is None:
            expected = f"{ENVIRONMENT} or {ENVIRONMENT}_FILE in the environment, or a file"
            raise ArgumentError(argument="key", expected=expected, got=None)
    shown = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_IMODE(found.st_mode) & 0o077:
                expected = f"a file that only its owner may read (chmod 600 {shown})"
                raise ArgumentError(
                    argument="key", expected=expected, got=oct(stat.S_IMODE(found.st_mode))
                )
            data = file.read(LIMIT_KEY_FILE)
    except OSError as error:
        raise ArgumentError(argument="key", expected="a file", got=str(error)) from error
    return _root(data, shown)


def _root(data: bytes, where: str) -> bytes:
    if len(data) == ROOT_NBYTES:
        return data
    try:
        root = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        root = b""
    if len(root) != ROOT_NBYTES:
        # a secret that is wrong is still a secret: it is not repeated
        expected = "64 hexadecimal digits, or 32 bytes"
        raise ArgumentError(argument=f"key in {where}", expected=expected, got="something else")
    return root
