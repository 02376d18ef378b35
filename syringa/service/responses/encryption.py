"""Encryption of content that the client stores for the server, such as reasoning items of a stateless conversation.

The client returns the content with a later request and can neither read nor change it. The master key is in the store,
so that every process can decrypt it, also after a restart. Each organization has a key derived from it: content of one
organization cannot be decrypted for another.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os

from syringa.store import Store

_SECRET = "content_key"
_KEY_BYTES, _NONCE_BYTES = 32, 12
_VERSION = "s1."  # prefix of all encrypted content, so that the scheme can be changed


class ContentCipher:
    """Encrypts and decrypts the content of one organization, with AES-GCM."""

    def __init__(self, master: bytes, organization: str) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # imported late: rarely used

        self._cipher = AESGCM(hmac.digest(master, b"content\0" + organization.encode("utf-8", "replace"), "sha256"))

    def encrypt(self, text: str) -> str:
        nonce = os.urandom(_NONCE_BYTES)
        encrypted = nonce + self._cipher.encrypt(nonce, text.encode("utf-8", "replace"), _VERSION.encode())
        return _VERSION + base64.urlsafe_b64encode(encrypted).decode()

    def decrypt(self, encrypted: str) -> str | None:
        """Return the text, or None if it was changed, or encrypted elsewhere or for another organization."""
        from cryptography.exceptions import InvalidTag

        if not encrypted.startswith(_VERSION) or not encrypted.isascii():
            return None
        try:
            data = base64.b64decode(encrypted.removeprefix(_VERSION), altchars=b"-_", validate=True)
            if _VERSION + base64.urlsafe_b64encode(data).decode() != encrypted:
                return None  # the last character has bits that decoding ignores
            text = self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _VERSION.encode())
        except (binascii.Error, ValueError, InvalidTag):
            return None
        return text.decode()


class ContentCiphers:
    """The ciphers of all organizations. The master key is read or generated when it is first needed."""

    def __init__(self) -> None:
        self._master: bytes | None = None

    async def for_organization(self, organization: str, store: Store) -> ContentCipher:
        """Raises `StoreUnavailable` if the master key was not read yet and cannot be."""
        if self._master is None:
            secret = await store.get_or_create_secret(_SECRET, lambda: os.urandom(_KEY_BYTES).hex())
            self._master = bytes.fromhex(secret)
        return ContentCipher(self._master, organization)


class NullCipher:
    """The cipher of a request without encrypted content, which does not need the store for a key."""

    def encrypt(self, text: str) -> str:
        raise AssertionError("encryption for a request that did not ask for it")

    def decrypt(self, encrypted: str) -> str | None:
        return None
