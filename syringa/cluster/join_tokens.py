"""One-time tokens, with which machines join a cluster.

A token contains the fingerprint of the cluster's authority, by which the machine verifies the server before it sends
the rest of the token, a secret. The cluster's folder has a hash of the secret only.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from syringa.cluster.folder import ClusterFolder, replace_file
from syringa.errors import ConfigError, Unauthorized

TOKENS = "join_tokens.json"
DEFAULT_TTL = 3600.0
KEPT_SECONDS = 86400.0  # for which a token is listed after it has expired
MAX_TTL = 30 * 86400.0

_PREFIX = "syringa-join-"
_FINGERPRINT_BYTES, _SECRET_BYTES = 32, 24


class JoinToken(NamedTuple):
    """The parts of a token."""

    fingerprint: bytes  # SHA-256 of the authority's certificate
    secret: str

    def __str__(self) -> str:
        content = self.fingerprint + bytes.fromhex(self.secret)
        return _PREFIX + base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def parse_token(text: str) -> JoinToken:
    """Return the parts of a token. Raises `ConfigError`, which does not repeat the token."""
    body = text.strip().removeprefix(_PREFIX)
    content = b""
    with contextlib.suppress(binascii.Error, ValueError):
        content = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    if not text.strip().startswith(_PREFIX) or len(content) != _FINGERPRINT_BYTES + _SECRET_BYTES:
        raise ConfigError("the join token is incomplete or mistyped: expected a line of `syringa cluster token`")
    return JoinToken(content[:_FINGERPRINT_BYTES], content[_FINGERPRINT_BYTES:].hex())


class TokenRecord(msgspec.Struct, frozen=True):
    """A token as the server keeps it, without its secret."""

    id: str
    hash: str
    created_at: float  # Unix times
    expires_at: float
    node: str = ""  # the only node that it admits, also if it has joined before; empty: any new one
    used_at: float = 0.0
    used_by: str = ""

    def state(self, now: float) -> Literal["valid", "used", "expired"]:
        if self.used_at:
            return "used"
        return "valid" if now < self.expires_at else "expired"


class JoinTokens:
    """The tokens in a cluster's folder. Several processes may use it at the same time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock

    def create(self, ttl: float = DEFAULT_TTL, *, node: str = "") -> str:
        """Return a new token, valid for `ttl` seconds and one use. Raises `ConfigError`."""
        if not 0 < ttl <= MAX_TTL:
            raise ConfigError(f"a join token is valid for more than 0 s and at most {MAX_TTL / 86400:.0f} days")
        fingerprint = bytes.fromhex(ClusterFolder(self._folder).authority().fingerprint.replace(":", ""))
        token, now = JoinToken(fingerprint, secrets.token_hex(_SECRET_BYTES)), self._clock()
        hashed = _hash(token.secret)
        with self._locked() as records:
            records.append(TokenRecord(hashed[:8], hashed, now, now + ttl, node))
        return str(token)

    def records(self) -> list[TokenRecord]:
        """Return the tokens, the oldest first, also those that were used or have expired in the last day."""
        with self._locked() as records:
            return list(records)

    @contextlib.contextmanager
    def redeem(self, secret: str, node: str) -> Iterator[TokenRecord]:
        """Use a token up. It stays valid if the body raises. Others wait meanwhile.

        Raises `Unauthorized` for a token that is not known, has expired or was used.
        """
        hashed = _hash(secret)
        with self._locked() as records:
            index = next((index for index, each in enumerate(records) if each.hash == hashed), -1)
            if index < 0:
                raise Unauthorized("the join token is not one of this cluster", code="invalid_token")
            record, now = records[index], self._clock()
            if (state := record.state(now)) != "valid":
                reason = "has expired" if state == "expired" else f"was used before, by {record.used_by}"
                raise Unauthorized(
                    f"the join token {reason}: `syringa cluster token` makes another", code="invalid_token"
                )
            yield record
            records[index] = msgspec.structs.replace(record, used_at=now, used_by=node)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let others that use tokens wait meanwhile. Raises `ConfigError`."""
        with self._locked():
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[list[TokenRecord]]:
        """Lock the tokens, and store what the body has changed unless it raises. Raises `ConfigError`."""
        path = self._folder / TOKENS
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context((self._folder / f".{TOKENS}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                content = path.read_bytes() if path.exists() else b"[]"
                stored = msgspec.json.decode(content, type=list[TokenRecord])
            except OSError as error:
                raise ConfigError(f"{path}: {error.strerror}; `syringa cluster init` makes the folder") from None
            except msgspec.DecodeError:
                raise ConfigError(f"{path}: cannot be read; delete it to void all tokens") from None
            records = [each for each in stored if self._clock() < each.expires_at + KEPT_SECONDS]
            yield records
            if records != stored:
                try:
                    replace_file(path, msgspec.json.encode(records))
                except OSError as error:
                    raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
