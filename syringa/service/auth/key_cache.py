"""Authentication: the API keys that a process accepts, and the caller of a request."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from syringa.errors import StoreError, StoreUnavailable, SyringaError, Unauthorized
from syringa.service.auth.keys import ANONYMOUS, KEY_LENGTH, PREFIX, Caller, RateLimits, digest
from syringa.service.store_poller import StoreRevisions
from syringa.store import ApiKey, KeySnapshot, Organization, Store

logger = logging.getLogger("syringa.service")

UNKNOWN_KEY_SECONDS = 0.2  # between two refreshes because of unknown keys
UNKNOWN_KEY_WAIT_SECONDS = 2.0  # for such a refresh, before the key is refused
LAST_USED_SECONDS = 10.0  # between two writes of when keys were last used
CLOSE_SECONDS = 5.0  # for the last of these writes
MAX_KEY_LENGTH = 512

_HOW = "send it as `Authorization: Bearer <key>`, or in the header `X-Api-Key`"
_UNAVAILABLE = "keys cannot be checked at the moment; try again in a few seconds"


async def has_valid_key(store: Store) -> bool:
    """Return whether the store has a valid key. A database that does not exist is not created."""
    return not store.location.is_empty() and await store.read(lambda session: session.keys.has_valid_key())


class UnknownKey(Unauthorized):
    """The key is well formed, but not in the cache."""


class _CachedKey(msgspec.Struct, frozen=True):
    digest: str
    caller: Caller
    expires_at: int | None = None
    stored: bool = True


class ApiKeyCache:
    """The keys that this process accepts: those of the configuration, and a copy of the stored ones.

    The copy is as old as the last call of `refresh`. It stays in use while the store is unavailable, so that a failing
    database does not lock out every client; before the store was read once, a key that might be stored is not accepted.
    Once there was a key, one is required: revoking the last key or deleting the database does not open the server.
    """

    def __init__(
        self,
        store: Store,
        static: Sequence[str] = (),
        defaults: RateLimits = RateLimits(),
        clock: Callable[[], float] = time.time,
        *,
        assume_empty: bool = False,
    ) -> None:
        """`static`: the setting `api_key`; `defaults`: the limits of an organization without its own.

        `assume_empty`: until `start`, assume that no keys are stored.
        """
        self._store, self._defaults, self._clock = store, defaults, clock
        self._static = {known.digest: known for known in (_static_key(key, defaults) for key in static)}
        self._static_ids = {known.caller.key for known in self._static.values()}
        self._max_length = max((MAX_KEY_LENGTH, *map(len, static)))
        self._stored: dict[str, _CachedKey] | None = {} if assume_empty else None  # by digest; None: not known
        self._stored_by_id: dict[str, _CachedKey] = {}
        self._organizations: frozenset[str] = frozenset()  # all that are stored, with valid keys or without
        self._revision: int | None = None  # None: the store was never read
        self._any_ever_created = False
        self._next_refresh: asyncio.Task[None] | None = None  # because of an unknown key; not begun
        self._refreshed_at = -math.inf
        self._last_used: dict[str, float] = {}
        self._last_used_written = time.monotonic()
        self._logged_problem = ""

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._static) or self._any_ever_created or self._stored is None

    @property
    def single_organization(self) -> bool:
        """Whether all callers belong to the same organization."""
        return len(self._organizations.union(key.caller.organization for key in self._static.values())) <= 1

    async def start(self) -> None:
        """Read the store. Raises `StartupError` for a database of a newer Syringa."""
        with contextlib.suppress(StoreError):
            self._log_problem(await self._reload(StoreRevisions(self._store)))

    async def close(self) -> None:
        """Write when keys were last used. To be called before the store is closed."""
        if self._next_refresh is not None:
            self._next_refresh.cancel()
        with contextlib.suppress(SyringaError, TimeoutError):
            await asyncio.wait_for(self._write_last_used(), CLOSE_SECONDS)

    def authenticate(self, header: str | bytes | None) -> Caller:
        """Return the caller with this `Authorization` header.

        Raises `Unauthorized`, or `StoreUnavailable` if the key might be stored and the store was never read. The lookup
        is by hash, so that its duration tells nothing about any key.
        """
        if not self.required:
            return ANONYMOUS
        if not self._static and self._stored is None:
            raise StoreUnavailable(_UNAVAILABLE)
        key = self._parse(header)
        given = digest(key)
        known = self._static.get(given) or (self._stored or {}).get(given)
        if known is None and self._stored is None:
            raise StoreUnavailable(_UNAVAILABLE)
        if known is None or not hmac.compare_digest(known.digest, given):
            kind = UnknownKey if len(key) == KEY_LENGTH and key.startswith(PREFIX.encode()) else Unauthorized
            raise kind("The API key is not valid: it is unknown, or it was revoked.")
        now = self._clock()
        if known.expires_at is not None and now >= known.expires_at:
            raise _expired()
        if known.stored:
            self._last_used[known.caller.key] = now
        return known.caller

    async def authenticate_new(self, header: str | bytes | None) -> Caller:
        """Like `authenticate`, for a key that was unknown: it may have been created since the last refresh.

        All unknown keys share a refresh that begins after they have arrived, at most one every `UNKNOWN_KEY_SECONDS`.
        """
        if self._next_refresh is None:
            self._next_refresh = asyncio.create_task(self._refresh_later())
        await asyncio.wait({self._next_refresh}, timeout=UNKNOWN_KEY_WAIT_SECONDS)
        return self.authenticate(header)

    async def _refresh_later(self) -> None:
        await asyncio.sleep(self._refreshed_at + UNKNOWN_KEY_SECONDS - time.monotonic())
        self._next_refresh, self._refreshed_at = None, time.monotonic()
        await self.refresh(StoreRevisions(self._store))

    def check(self, caller: Caller) -> Unauthorized | None:
        """Return the error of a caller whose key was revoked, deleted or has expired since it was authenticated."""
        if self._revision is None or not caller.key or caller.key in self._static_ids:
            return None
        known = self._stored_by_id.get(caller.key)
        if known is None:
            return Unauthorized("The API key was revoked.")
        return _expired() if known.expires_at is not None and self._clock() >= known.expires_at else None

    def find(self, id: str) -> Caller | None:
        """Return the caller with the key of that id, an empty one where no key is required; None if it is not valid.

        Raises `StoreUnavailable` if the key might be stored and the store was never read.
        """
        if self._stored is None and id not in self._static_ids:
            raise StoreUnavailable(_UNAVAILABLE)
        if not id:
            return None if self.required else ANONYMOUS
        static = (known for known in self._static.values() if known.caller.key == id)
        known = self._stored_by_id.get(id) or next(static, None)
        if known is None or (known.expires_at is not None and self._clock() >= known.expires_at):
            return None
        return known.caller

    def _parse(self, header: str | bytes | None) -> bytes:
        """Return the key in a header. Error messages do not quote it: it may contain most of a key."""
        if isinstance(header, str):
            header = header.encode("utf-8", "surrogatepass")
        if not header or header.isspace():
            raise Unauthorized(f"An API key is needed: {_HOW}.")
        scheme, _, key = header.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized(f"The Authorization header has another form than expected: {_HOW}.")
        key = key.strip()
        if not key or len(key) > self._max_length or not key.isascii():
            raise Unauthorized(f"The API key is malformed: {_HOW}.")
        return key

    async def refresh(self, revisions: StoreRevisions) -> None:
        """Reload the keys if they have changed, and write from time to time when keys were last used."""
        try:
            self._log_problem(await self._reload(revisions))
        except SyringaError as error:
            self._log_problem(error.message)
        except Exception:  # polling must go on, or a revoked key would stay valid
            logger.exception("API keys: refresh failed")
        if time.monotonic() - self._last_used_written >= LAST_USED_SECONDS:
            with contextlib.suppress(SyringaError):
                await self._write_last_used()

    async def _reload(self, revisions: StoreRevisions) -> str:
        """Reload the keys if they have changed. Return why the copy may be stale, or an empty string."""
        location = self._store.location
        if location.is_empty():
            if self._revision is not None:
                return f"{location.display} is gone"
            self._stored = {}
            return "" if location.can_be_created() else f"{location.display} cannot be created"
        try:
            if await revisions.get("keys") == self._revision:
                return ""
            snapshot = await self._store.poll(lambda session: session.keys.snapshot())
        except SyringaError:
            if self._revision is None:
                self._stored = None  # even if there was no file before: there is one now, and it may hold keys
            raise
        if self._any_ever_created and not snapshot.any_ever_created:
            return f"{location.display} was replaced by a database without keys"
        self._stored = _by_digest(snapshot, self._defaults)
        self._stored_by_id = {known.caller.key: known for known in self._stored.values()}
        self._organizations = frozenset(snapshot.organizations)
        self._revision, self._any_ever_created = snapshot.revision, snapshot.any_ever_created
        return ""

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, not at each poll."""
        if problem and problem != self._logged_problem:
            state = "cannot be checked" if self._stored is None else "are not updated"
            logger.warning("API keys: stored keys %s: %s", state, problem)
        self._logged_problem = problem

    async def _write_last_used(self) -> None:
        self._last_used_written = time.monotonic()
        used, self._last_used = self._last_used, {}
        try:
            if used:
                await self._store.write(lambda session: session.keys.touch(used))
        except BaseException:
            self._last_used = used | self._last_used  # entries added meanwhile are later
            raise


def _expired() -> Unauthorized:
    return Unauthorized("The API key has expired.")


def _by_digest(snapshot: KeySnapshot, defaults: RateLimits) -> dict[str, _CachedKey]:
    known = {}
    for key in snapshot.keys:
        caller = Caller(
            organization=key.organization,
            key=key.id,
            admin=key.admin,
            models=None if key.models is None else frozenset(key.models),
            rates=_limits(snapshot.organizations.get(key.organization), defaults),
            key_rates=_limits(key, RateLimits()),
        )
        known[key.digest] = _CachedKey(key.digest, caller, key.expires_at)
    return known


def _limits(record: Organization | ApiKey | None, defaults: RateLimits) -> RateLimits:
    if record is None:
        return defaults
    limits = {name: getattr(record, name) for name in RateLimits.__struct_fields__}
    return msgspec.structs.replace(defaults, **{name: each for name, each in limits.items() if each is not None})


def _static_key(key: str, defaults: RateLimits) -> _CachedKey:
    """Return a key of the configuration. Its organization is named after its hash."""
    hashed = digest(key)
    caller = Caller(organization=hashed[:16], key=f"config-{hashed[:8]}", rates=defaults)
    return _CachedKey(hashed, caller, stored=False)
