"""The certificate authority of a cluster, and the certificates that it issues.

Keys are of the curve P-256. A certificate has one or more roles: "server" for workers, which accept connections,
"client" for API servers, which make them, and "node" for machines that fetch model files. The roles are in its subject,
as organizational units, because its key usage does not distinguish API servers from nodes: see `tls.check_role`.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, NamedTuple

from syringa.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

Role = Literal["server", "client", "node"]

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
CLOCK_SKEW = timedelta(minutes=5)  # the clock of another node may be behind


class KeyPair(NamedTuple):
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


class CertificateAuthority:
    """Issues certificates that the members of a cluster accept."""

    def __init__(self, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def create(cls, *, days: int = AUTHORITY_DAYS, now: datetime | None = None) -> CertificateAuthority:
        """Return a new authority, valid for `days` from `now` on."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        now = now or datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"syringa cluster {secrets.token_hex(4)}")
        builder = _builder(name, name, key, now, now + timedelta(days=days), key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
        return cls(_sign(builder, key), key)

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> CertificateAuthority:
        """Return the authority of two PEM files. Raises `ConfigError`."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            loaded, private = x509.load_pem_x509_certificate(certificate), load_pem_private_key(key, None)
        except (ValueError, TypeError):  # a TypeError: the key has a password
            raise ConfigError("expected the certificate and the key of `syringa cluster init`") from None
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != loaded.public_key():
            raise ConfigError("the key of the certificate authority does not belong to its certificate")
        return cls(loaded, private)

    def pem(self) -> KeyPair:
        """Return the authority's own certificate and key."""
        return _pem(self._certificate, self._key)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 fingerprint of the certificate, to compare between machines."""
        from cryptography.hazmat.primitives import hashes

        return self._certificate.fingerprint(hashes.SHA256()).hex(":").upper()

    @property
    def expires_at(self) -> datetime:
        return self._certificate.not_valid_after_utc

    def issue(
        self,
        name: str,
        *,
        roles: Collection[Role],
        hosts: Iterable[str] = (),
        days: int = CERTIFICATE_DAYS,
        now: datetime | None = None,
    ) -> KeyPair:
        """Issue a certificate with a new key for a node.

        Clients accept a server under its `hosts`, which are names and IP addresses. A certificate never outlives its
        authority. Raises `ConfigError` for a host that is neither, for a server without hosts and without any role.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        alternatives = [_host(each) for each in dict.fromkeys(hosts)]
        if not roles or ("server" in roles and not alternatives):
            raise ConfigError(f"the certificate of {name!r} needs a role, and that of a server needs a host")
        usages = {
            "server": ExtendedKeyUsageOID.SERVER_AUTH,
            "client": ExtendedKeyUsageOID.CLIENT_AUTH,
            "node": ExtendedKeyUsageOID.CLIENT_AUTH,
        }
        now = now or datetime.now(UTC)
        ends = min(now + timedelta(days=days), self.expires_at)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name, roles), self._certificate.subject, key, now, ends, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage(list(dict.fromkeys(usages[role] for role in sorted(roles)))), critical=False
        )
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return _pem(_sign(builder, self._key), key)


def expiry(certificate: bytes) -> datetime:
    """Return the end of the validity of a PEM certificate."""
    from cryptography import x509

    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def serial_of(certificate: bytes) -> str:
    """Return the serial number of a PEM certificate, as in Python's `getpeercert`."""
    from cryptography import x509

    text = f"{x509.load_pem_x509_certificate(certificate).serial_number:X}"
    return text if len(text) % 2 == 0 else f"0{text}"


def hosts_of(certificate: bytes) -> list[str]:
    """Return the names and IP addresses of a PEM certificate."""
    from cryptography import x509

    extensions = x509.load_pem_x509_certificate(certificate).extensions
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(each.value) for each in names]


def _host(text: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    labels = text.split(".")
    valid = len(text) <= 253 and all(
        0 < len(label) <= 63 and label.isascii() and label.replace("-", "").replace("_", "").isalnum()
        for label in labels
    )
    if not valid:
        raise ConfigError(f"{text!r}: expected the name of a host or an IP address")
    return x509.DNSName(text)


def _name(text: str, roles: Iterable[Role] = ()) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    units = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role) for role in sorted(roles)]
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64]), *units])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: EllipticCurvePrivateKey,
    starts: datetime,
    ends: datetime,
    issuer_key: EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(starts - CLOCK_SKEW)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _sign(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _pem(certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> KeyPair:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return KeyPair(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
