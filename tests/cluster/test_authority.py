from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from syringa.cluster.authority import CertificateAuthority, expiry, hosts_of
from syringa.cluster.tls import (
    TlsFiles,
    WrongRole,
    check_role,
    client_context,
    describe_tls_error,
    server_context,
)
from syringa.errors import ConfigError
from tests.cluster.certificates import Certificates

NOW = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def test_certificate_has_the_hosts_and_roles_it_was_issued_for() -> None:
    authority = CertificateAuthority.create(now=NOW)
    pair = authority.issue("node", roles={"server"}, hosts=["node.example", "10.0.0.7", "::1", "10.0.0.7"], now=NOW)
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert not constraints.ca
    assert hosts_of(pair.certificate) == ["node.example", "10.0.0.7", "::1"]
    both = authority.issue("node", roles={"server", "client"}, hosts=["node"], now=NOW)
    assert both.key != pair.key
    extensions = x509.load_pem_x509_certificate(both.certificate).extensions
    assert set(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == {
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    }


def test_certificate_names_its_roles_and_nothing_else_does() -> None:
    """The role comes from the authority: a node cannot put one into the name that it asks for."""
    authority = CertificateAuthority.create()
    pair = authority.issue("a,OU=client", roles={"node"})
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    units = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    assert [each.value for each in units] == ["node"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_role_is_checked_in_the_certificate_of_a_peer() -> None:
    peer = {"subject": ((("commonName", "a"),), (("organizationalUnitName", "node"),))}
    assert check_role(peer, "node") == "a"
    for certificate in (peer, None, {}, {"subject": ((("commonName", "client"),),)}):
        with pytest.raises(WrongRole):
            check_role(certificate, "client")


def test_certificate_does_not_outlive_its_authority() -> None:
    authority = CertificateAuthority.create(days=30, now=NOW)
    assert expiry(authority.issue("a", roles={"client"}, days=10, now=NOW).certificate) == NOW + timedelta(days=10)
    assert expiry(authority.issue("a", roles={"client"}, days=90, now=NOW).certificate) == authority.expires_at


@pytest.mark.parametrize(
    "wrong",
    [
        {"roles": set(), "hosts": ["a"]},
        {"roles": {"server"}},
        {"roles": {"server"}, "hosts": ["a b"]},
        {"roles": {"server"}, "hosts": [""]},
        {"roles": {"server"}, "hosts": ["a..b"]},
        {"roles": {"server"}, "hosts": ["ä"]},
        {"roles": {"server"}, "hosts": ["x" * 64]},
    ],
)
def test_authority_refuses_certificates_without_role_or_valid_host(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CertificateAuthority.create().issue("node", **wrong)


def test_loaded_authority_issues_certificates_of_the_same_cluster() -> None:
    authority = CertificateAuthority.create()
    loaded = CertificateAuthority.load(*authority.pem())
    assert loaded.fingerprint == authority.fingerprint
    assert len(loaded.fingerprint.split(":")) == 32
    with pytest.raises(ConfigError, match="does not belong"):
        CertificateAuthority.load(authority.pem().certificate, CertificateAuthority.create().pem().key)
    with pytest.raises(ConfigError, match="cluster init"):
        CertificateAuthority.load(b"text", authority.pem().key)


def test_contexts_require_certificates_of_both_sides_and_tls_1_3(certificates: Certificates) -> None:
    for context in (server_context(certificates.server), client_context(certificates.client)):
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert client_context(certificates.client).check_hostname


def test_context_refuses_unusable_files(certificates: Certificates, tmp_path: Path) -> None:
    good = certificates.server
    (tmp_path / "text.pem").write_text("no certificate")
    (tmp_path / "open.key").write_bytes(Path(good.key).read_bytes())
    (tmp_path / "open.key").chmod(0o644)
    missing, text = str(tmp_path / "missing.pem"), str(tmp_path / "text.pem")
    for files, reason in [
        (TlsFiles(missing, good.certificate, good.key), "missing.pem: No such file"),
        (TlsFiles(good.ca, good.certificate, missing), "missing.pem: No such file"),
        (TlsFiles(good.ca, missing, good.key), "missing.pem: No such file"),
        (TlsFiles(good.ca, text, good.key), "text.pem: cannot be used"),
        (TlsFiles(text, good.certificate, good.key), "text.pem: cannot be used"),
        (TlsFiles(good.ca, good.certificate, str(tmp_path / "open.key")), "can be read by every user"),
        (TlsFiles(good.ca, good.certificate, certificates.client.key), "the key is that of another certificate"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            server_context(files)


def test_context_refuses_a_key_with_a_password_without_asking(certificates: Certificates, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(certificates.server.key).read_bytes(), None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.touch(mode=0o600)
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="must not have a password"):
        server_context(TlsFiles(certificates.server.ca, certificates.server.certificate, str(encrypted)))


def test_errors_are_described_in_words() -> None:
    assert describe_tls_error(ConnectionResetError(104, "Connection reset by peer")) == "Connection reset by peer"
    assert describe_tls_error(TimeoutError()) == "it did not answer in time"
    assert describe_tls_error(ValueError()) == "ValueError"
