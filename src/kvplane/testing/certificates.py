"""Certificates for tests of links: an authority of one's own, and identities under it."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from kvplane.errors import ExtraMissing
from kvplane.transfer.links import Identity

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """Signs certificates for a day.

    Args:
        folder: where its files go; made where there is none.
        name: of the authority.

    Raises:
        ExtraMissing: cryptography is not installed.
    """

    def __init__(self, folder: Path, name: str = "tests") -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        except ImportError as error:
            raise ExtraMissing(package="cryptography", extra="dev") from error
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._signed(name, self._key, authority=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(_pem(self._certificate))

    def identity(
        self, name: str, *, hosts: tuple[str, ...] = ("localhost", "127.0.0.1"), days: int = 1
    ) -> Identity:
        """A certificate for hosts, its key, and this authority.

        Args:
            name: of the files, and of whom it is for.
            hosts: names and addresses.
            days: that it is valid from now on; below 0 it has expired.
        """
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._folder / f"{name}.crt"
        certificate.write_bytes(_pem(self._signed(name, key, hosts=hosts, days=days)))
        file = self._folder / f"{name}.key"
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        file.chmod(0o600)
        return Identity(certificate=certificate, key=file, authority=self.file)

    def _signed(
        self,
        name: str,
        key: "ec.EllipticCurvePrivateKey",
        *,
        hosts: tuple[str, ...] = (),
        authority: bool = False,
        days: int = 1,
    ) -> "x509.Certificate":
        from cryptography import x509  # noqa: PLC0415
        from cryptography.hazmat.primitives import hashes  # noqa: PLC0415

        now = datetime.now(tz=UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _named(name: str) -> "x509.Name":
    from cryptography import x509  # noqa: PLC0415

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _host(host: str) -> "x509.GeneralName":
    from cryptography import x509  # noqa: PLC0415

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    return certificate.public_bytes(serialization.Encoding.PEM)
