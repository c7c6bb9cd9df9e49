"""Who may connect: mutual TLS 1.3, or loopback only."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvplane.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """This side's certificate, and the authority that the other side's must be of.

    Args:
        certificate: PEM file, with the chain below the authority.
        key: PEM file of its private key.
        authority: PEM file of the certificates that are trusted; no other is.
    """

    certificate: Path
    key: Path
    authority: Path

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3 and nothing older; the other side must show a certificate of the authority.

        Raises:
            ArgumentError: a file is missing or no such thing.
        """
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.verify_mode = ssl.CERT_REQUIRED
        made.check_hostname = not server
        if server:
            # one handoff a connection: nothing to resume
            made.num_tickets = 0
        try:
            made.load_cert_chain(self.certificate, self.key)
            made.load_verify_locations(self.authority)
        except OSError as error:
            raise ArgumentError(
                argument="identity", expected="PEM files that belong together", got=str(error)
            ) from error
        return made
