"""The certificate of a driver, for applications that encrypt their traffic.

A driver creates a key and a self-signed certificate. The key stays in memory, except on systems where ``ssl``
can only read it from a file. Tasks get the certificate together with the driver's address and trust no other
certificate, so they need not check an authority, a host name or a date.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.extras import missing

_NAME = "Penstock driver"
_FIRST_DAY = datetime(2000, 1, 1, tzinfo=UTC)
_LAST_DAY = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""The certificate has no expiry (RFC 5280, 4.1.2.5), so that a wrong clock does not lock out a task."""


@dataclass(frozen=True)
class DriverTls:
    """The driver's TLS context, and its certificate in PEM."""

    context: ssl.SSLContext
    certificate: str


@lru_cache(maxsize=1)
def driver_tls() -> DriverTls:
    """Return this process's key and certificate.

    Raises
    ------
    MissingDependencyError
        When cryptography is not installed.
    """
    key, certificate = _create_self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A session ticket would make the socket readable without a message.
    context.num_tickets = 0
    _load_into(context, key + certificate)
    return DriverTls(context, certificate)


def _load_into(context: ssl.SSLContext, pem: str) -> None:
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("penstock driver"), "w") as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return
    with TemporaryDirectory() as folder:
        path = Path(folder, "driver.pem")
        path.write_text(pem)
        context.load_cert_chain(path)


def task_context(certificate: str) -> ssl.SSLContext:
    """Return the TLS context of a task, which trusts only its driver."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    return context


def _create_self_signed() -> tuple[str, str]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ModuleNotFoundError:
        raise missing(
            "cryptography", "on an application whose RPC is encrypted, the traffic between tasks and driver"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(_FIRST_DAY)
        .not_valid_after(_LAST_DAY)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return secret.decode(), certificate.public_bytes(pem).decode()
