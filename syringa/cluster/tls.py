"""Mutual TLS between the members of a cluster: TLS 1.3, and certificates of the cluster's own authority only."""

from __future__ import annotations

import os
import ssl
import time
from typing import Any

import msgspec

from syringa.cluster.authority import Role
from syringa.errors import ConfigError

RENEWAL_SECONDS = 0.02  # more than passes between the replacement of a certificate and that of its key

# Reasons of OpenSSL, of certificates that this process has refused.
_VERIFY_MESSAGES = {
    "certificate has expired": "its certificate has expired",
    "certificate is not yet valid": "its certificate is not valid yet: compare the clocks of both machines",
    "unsuitable certificate purpose": "its certificate has the wrong role",
    "self-signed certificate": "its certificate is not from the authority of this cluster",
    "self-signed certificate in certificate chain": "its certificate is not from the authority of this cluster",
    "unable to get local issuer certificate": "its certificate is not from the authority of this cluster",
    "unable to get issuer certificate": "its certificate is not from the authority of this cluster",
    "certificate signature failure": "its certificate is not from the authority of this cluster",
}
# Reasons of OpenSSL, of other failures. Alerts are what the peer says of this process.
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
    "HTTP_REQUEST": "it does not use TLS",
    "HTTPS_PROXY_REQUEST": "it does not use TLS",
    "WRONG_VERSION_NUMBER": "it does not use TLS",
    "RECORD_LAYER_FAILURE": "it does not use TLS",
    "PACKET_LENGTH_TOO_LONG": "it does not use TLS",
    "UNSUPPORTED_PROTOCOL": "it does not use TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not use TLS 1.3",
    "UNEXPECTED_EOF_WHILE_READING": "it ended the connection during the handshake",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that our certificate has expired",
    "TLSV1_ALERT_UNKNOWN_CA": "it says that our certificate is not from the authority of its cluster",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it says that our certificate has the wrong role",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses our certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "it refuses our certificate",
}


class TlsFiles(msgspec.Struct, frozen=True):
    """The files with which a process proves who it is. Only their paths are passed on, never a key."""

    ca: str  # the certificate of the cluster's authority
    certificate: str
    key: str

    def modified(self) -> tuple[int, ...]:
        """Return when the files were last changed. Raises `OSError`."""
        return tuple(os.stat(each).st_mtime_ns for each in (self.ca, self.certificate, self.key))


class WrongRole(OSError):
    """The certificate of a client is valid, and does not have the role that the server requires."""

    def __init__(self) -> None:
        super().__init__("its certificate has the wrong role")


def server_context(files: TlsFiles, *, anonymous: bool = False) -> ssl.SSLContext:
    """Return the context of a server, which refuses clients with a certificate that is not valid. Raises `ConfigError`.

    Clients without a certificate are refused too, unless `anonymous`. Both the certificates of API servers and those of
    nodes are valid here: the server has to `check_role`.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    context.verify_mode = ssl.CERT_OPTIONAL if anonymous else ssl.CERT_REQUIRED
    context.num_tickets = 0  # no connection continues an earlier one: each proves its certificate
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a client, which refuses servers with the name of another host. Raises `ConfigError`."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def check_role(certificate: dict[str, Any] | None, role: Role) -> str:
    """Return the name in the verified certificate of a client, as of `getpeercert`. Raises `WrongRole`."""
    subject = [pair for attributes in (certificate or {}).get("subject", ()) for pair in attributes]
    if ("organizationalUnitName", role) not in subject:
        raise WrongRole
    return next((str(value) for key, value in subject if key == "commonName"), "")


def describe_tls_error(error: BaseException) -> str:
    """Return in words why a peer was refused, or refused us."""
    if isinstance(error, ssl.SSLCertVerificationError):
        message = str(error.verify_message).rstrip(".")
        if "mismatch" in message:
            return f"its certificate is for another host: {message}"
        return _VERIFY_MESSAGES.get(message, f"its certificate is not valid: {message}")
    if isinstance(error, ssl.SSLError) and error.reason:
        return _REASONS.get(error.reason, error.reason.lower().replace("_", " "))
    if isinstance(error, TimeoutError):
        return str(error) or "it did not answer in time"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # asyncio puts other words into `strerror`
    return str(error) or type(error).__name__


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    file = files.ca
    try:
        context.load_verify_locations(file)
        file = files.key
        if os.stat(file).st_mode & 0o007:
            raise ConfigError(f"{file}: this key can be read by every user of the machine: chmod 600 {file}")
        file = files.certificate
        try:
            context.load_cert_chain(file, files.key, password=_refuse_password)
        except ssl.SSLError as error:
            if error.reason != "KEY_VALUES_MISMATCH":
                raise
            time.sleep(RENEWAL_SECONDS)  # they may be renewed just now
            context.load_cert_chain(file, files.key, password=_refuse_password)
    except ssl.SSLError as error:
        reason = "the key is that of another certificate" if error.reason == "KEY_VALUES_MISMATCH" else "no PEM file"
        raise ConfigError(f"{file}: cannot be used for TLS: {reason}") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; `syringa cluster init` makes the files for TLS") from None
    return context


def _refuse_password() -> str:
    raise ConfigError("the key of a cluster certificate must not have a password")
