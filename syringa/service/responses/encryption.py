"""Sealed text: what a client keeps for us and hands back, and can neither read nor change.

A client that wants no state here still has to return the model's thoughts with the next request. They travel encrypted,
under a key that lies in the store, so that every process of this service opens them, after a restart too, and nobody
else does. Each organisation has a key of its own, made from that one: what was sealed for another does not open.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os

from syringa.store import Store

_SECRET = "seal"
_KEY_BYTES, _NONCE_BYTES = 32, 12
_VERSION = "s1."  # before every sealed text, so that another scheme may follow


class Seal:
    """Seals and opens the texts of one organisation."""

    def __init__(self, master: bytes, organisation: str) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # most processes never seal anything

        self._cipher = AESGCM(hmac.digest(master, b"seal\0" + organisation.encode("utf-8", "replace"), "sha256"))

    def seal(self, text: str) -> str:
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, text.encode("utf-8", "replace"), _VERSION.encode())
        return _VERSION + base64.urlsafe_b64encode(sealed).decode()

    def open(self, sealed: str) -> str | None:
        """The text, or None where it was not sealed here, or for another organisation, or was changed since."""
        from cryptography.exceptions import InvalidTag

        if not sealed.startswith(_VERSION) or not sealed.isascii():
            return None
        try:
            data = base64.b64decode(sealed.removeprefix(_VERSION), altchars=b"-_", validate=True)
            if _VERSION + base64.urlsafe_b64encode(data).decode() != sealed:
                return None  # the last character has bits that decoding ignores
            opened = self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _VERSION.encode())
        except (binascii.Error, ValueError, InvalidTag):
            return None
        return opened.decode()


class Seals:
    """The seals of all organisations. The key is read from the store, or drawn, when it is first needed."""

    def __init__(self) -> None:
        self._master: bytes | None = None

    async def of(self, organisation: str, store: Store) -> Seal:
        """Raises `StoreUnavailable` if the key was not read yet and cannot be."""
        if self._master is None:
            drawn = await store.secret(_SECRET, lambda: os.urandom(_KEY_BYTES).hex())
            self._master = bytes.fromhex(drawn)
        return Seal(self._master, organisation)


class NoSeal:
    """Stands where a request has nothing to seal or to open, so that it does not need the store for the key."""

    def seal(self, text: str) -> str:
        raise AssertionError("a text was to be sealed for a request that did not ask for it")

    def open(self, sealed: str) -> str | None:
        return None
