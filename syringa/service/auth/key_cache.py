"""The keys that a process accepts, and who sends a request with one of them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from syringa.errors import StoreError, StoreUnavailable, SyringaError, Unauthorized
from syringa.service.auth.caller import ANYONE, Caller, Rates
from syringa.service.auth.keys import digest
from syringa.store import ApiKey, KeySnapshot, Organisation, Store

logger = logging.getLogger("syringa.service")

POLL_SECONDS = 0.7  # a key that is revoked is refused everywhere after this long
TOUCH_SECONDS = 10.0  # between two writes of when keys were last used
LAST_SECONDS = 5.0  # what the end of a process waits for the last of these
LONGEST_KEY = 512

_HOW = "send it as `Authorization: Bearer <key>`"
_AWAY = "keys cannot be checked at the moment; try again in a few seconds"


async def usable(store: Store) -> bool:
    """Whether the store has a key that lets anybody in. One that was never made is not made for the question."""
    return not is_absent(store) and await store.keys.usable()


class _Known(msgspec.Struct, frozen=True):
    digest: str
    caller: Caller
    expires_at: int | None = None
    stored: bool = True


class Keyring:
    """The keys that this process accepts: those of the settings, and a copy of those in the store.

    The copy is at most `POLL_SECONDS` old. While the store is away it stays in use, so that a database that fails does
    not lock everybody out; while the store was never read, nobody whose key may be in there is let in. Once there was a
    key, one is needed: revoking the last, or removing the database, does not open the server.
    """

    def __init__(
        self,
        store: Store,
        static: Sequence[str] = (),
        defaults: Rates = Rates(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`static`: the setting `api_key`; `defaults`: the limits of an organisation that has none of its own."""
        self._store, self._defaults, self._clock = store, defaults, clock
        self._static = {known.digest: known for known in (_of_settings(key, defaults) for key in static)}
        self._longest = max((LONGEST_KEY, *map(len, static)))
        self._stored: dict[str, _Known] | None = None  # None: whether there are any is not known
        self._revision: int | None = None  # None: the store was never read
        self._ever = False
        self._used: dict[str, float] = {}
        self._touched = time.monotonic()
        self._complaint = ""
        self._polling: asyncio.Task[None] | None = None
        self.also: list[Callable[[], Awaitable[None]]] = []  # what else is looked for, whenever keys are

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._static) or self._ever or self._stored is None

    def begin_empty(self) -> None:
        """Until `start`, as if nothing were stored: for parts of a server that is never started."""
        self._stored = {}

    async def start(self) -> None:
        """Reads the store, and looks for changes from now on. Raises `StartupError` for a store of a newer Syringa."""
        with contextlib.suppress(StoreError):
            self._complain(await self._refresh())
        self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Before the store is closed."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        with contextlib.suppress(SyringaError, TimeoutError):
            await asyncio.wait_for(self._touch(), LAST_SECONDS)

    def find(self, header: str | bytes | None) -> Caller:
        """Who sends a request with this `Authorization`. Raises `Unauthorized`, or `StoreUnavailable` where the store
        would have to be asked and cannot be.

        How long this takes says nothing about any key: what is looked up is a hash, and whoever sends guesses cannot
        steer how far the hash of a guess agrees with that of a key.
        """
        if not self.required:
            return ANYONE
        if not self._static and self._stored is None:
            raise StoreUnavailable(_AWAY)
        given = digest(self._read(header))
        known = self._static.get(given) or (self._stored or {}).get(given)
        if known is None and self._stored is None:
            raise StoreUnavailable(_AWAY)
        if known is None or not hmac.compare_digest(known.digest, given):
            raise Unauthorized("The API key is not valid: it is unknown, or it was revoked.")
        now = self._clock()
        if known.expires_at is not None and now >= known.expires_at:
            raise Unauthorized("The API key has expired.")
        if known.stored:
            self._used[known.caller.key] = now
        return known.caller

    def _read(self, header: str | bytes | None) -> bytes:
        """The key in a header. What is wrong is not repeated: it may hold most of a key."""
        if isinstance(header, str):
            header = header.encode("utf-8", "surrogatepass")
        if not header or header.isspace():
            raise Unauthorized(f"An API key is needed: {_HOW}.")
        scheme, _, key = header.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized(f"The Authorization header has another form than expected: {_HOW}.")
        key = key.strip()
        if not key or len(key) > self._longest or not key.isascii():
            raise Unauthorized(f"The API key is malformed: {_HOW}.")
        return key

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                self._complain(await self._refresh())
            except SyringaError as error:
                self._complain(error.message)
            except Exception:  # whatever it is, a key that is revoked must go on being noticed
                logger.exception("the keys could not be read")
            for look in self.also:
                await look()
            if time.monotonic() - self._touched >= TOUCH_SECONDS:
                with contextlib.suppress(SyringaError):
                    await self._touch()

    async def _refresh(self) -> str:
        """Reads what has changed. The answer is why the copy is not, or may not be, what the store says."""
        if is_absent(self._store):
            return self._without_file()
        try:
            if await self._store.revision("keys") == self._revision:
                return ""
            snapshot = await self._store.keys.snapshot()
        except SyringaError:
            if self._revision is None:
                self._stored = None  # also where there was no file before: there is one now, and it may hold keys
            raise
        if self._ever and not snapshot.any_ever:
            return f"{self._store.location.shown} is another database now, and has no keys"
        self._stored = _by_digest(snapshot, self._defaults)
        self._revision, self._ever = snapshot.revision, snapshot.any_ever
        return ""

    def _without_file(self) -> str:
        if self._revision is None:
            self._stored = {}
            place = Path(self._store.location.place)
            return "" if _can_be_made(place) else f"{self._store.location.shown} cannot be made"
        return f"{self._store.location.shown} is gone"

    def _complain(self, why: str) -> None:
        """Once, not at each poll."""
        if why and why != self._complaint:
            state = "cannot be checked" if self._stored is None else "stay as they are"
            logger.warning("stored keys %s: %s", state, why)
        self._complaint = why

    async def _touch(self) -> None:
        self._touched = time.monotonic()
        used, self._used = self._used, {}
        try:
            if used:
                await self._store.keys.touch(used)
        except BaseException:
            self._used = used | self._used  # what was noted meanwhile is later
            raise


def _by_digest(snapshot: KeySnapshot, defaults: Rates) -> dict[str, _Known]:
    known = {}
    for key in snapshot.keys:
        caller = Caller(
            organisation=key.organisation,
            key=key.id,
            admin=key.admin,
            models=None if key.models is None else frozenset(key.models),
            rates=_rates(snapshot.organisations.get(key.organisation), defaults),
            key_rates=_rates(key, Rates()),
        )
        known[key.digest] = _Known(key.digest, caller, key.expires_at)
    return known


def _rates(given: Organisation | ApiKey | None, otherwise: Rates) -> Rates:
    if given is None:
        return otherwise
    limits = {name: getattr(given, name) for name in Rates.__struct_fields__}
    return msgspec.structs.replace(otherwise, **{name: each for name, each in limits.items() if each is not None})


def _of_settings(key: str, defaults: Rates) -> _Known:
    hashed = digest(key)
    return _Known(hashed, Caller(organisation=hashed[:16], key=f"config-{hashed[:8]}", rates=defaults), stored=False)


def is_absent(store: Store) -> bool:
    """Whether no key can be in the store, as its file was never written. It is not opened for this: a server that
    stores nothing does not pay for a database. A path that may not be looked at is not absent."""
    if store.location.kind != "sqlite":
        return False
    try:
        if os.stat(store.location.place).st_size > 0:
            return False
        return os.stat(store.location.place + "-wal").st_size == 0
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _can_be_made(path: Path) -> bool:
    folder = next((each for each in path.parents if each.exists()), path.parent)
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
