"""`Store`: the store as the rest of Syringa sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Self

from syringa.store.executor import Errands
from syringa.store.glance import Glance
from syringa.store.parts import KeyPart, ModelPart, OrganisationPart, UsagePart
from syringa.store.records import (
    BrokenChain,
    Chain,
    Conversation,
    Event,
    Item,
    Order,
    Page,
    Revised,
    Running,
    Status,
    StoredResponse,
)
from syringa.store.url import locate

LOST = "The process that ran this response ended before the response was finished."


class Store(Errands):
    """Everything that lasts, for several organisations that do not see each other.

    Making one only reads the setting, and may raise `StartupError` for it. The database is opened, and its tables are
    brought up to date, by `open` or by whatever comes first. Every method may raise `StoreUnavailable`, and works again
    as soon as the database does. SQL runs in threads of its own; a call that is cancelled may still take effect.

    Any number of processes may use the same database. Ids come from the caller, and are looked for in one
    organisation only.
    """

    def __init__(self, database: str = "", *, clock: Callable[[], float] = time.time, patience: float = 5.0) -> None:
        """`database` as in the settings; `patience`: the seconds to wait for another process's lock, queue and all."""
        super().__init__(locate(database), clock=clock, patience=patience)
        self._mark: object = None  # of the file, when the revisions were read
        self._revisions: dict[str, int] = {}
        self._glance = Glance(self.location)
        self.keys = KeyPart(self)
        self.organisations = OrganisationPart(self)
        self.usage = UsagePart(self)
        self.models = ModelPart(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._glance.close()
        await super().close()

    async def open(self) -> None:
        """Opens the database now. Raises `StartupError` if a newer Syringa has changed it."""
        await self.read(lambda session: None)

    # Responses

    async def create_response(self, response: StoredResponse, input: Sequence[Item] = ()) -> bool:
        """Keeps a response with its input, and with its output if it is finished. False: the id is taken already.

        One that runs names its owner, which has to call `heartbeat`.
        """
        return await self.write(lambda session: session.responses.create(response, input))

    async def update_response(self, organisation: str, id: str, *, status: Status, body: str) -> bool:
        """Changes a response that runs, say from queued to in_progress. False: it does not run, or is gone."""
        return await self.write(lambda session: session.responses.update(organisation, id, status, body))

    async def finish_response(
        self, organisation: str, id: str, *, status: Status, body: str, output: Sequence[Item] = ()
    ) -> Status | None:
        """Ends a response, and says what has become of it: the first end counts and later ones change nothing.

        So an answer that comes after a cancel leaves it cancelled. None: the response was deleted meanwhile. Completed
        or incomplete, its input and output become part of its conversation, if it has one.
        """
        return await self.write(lambda session: session.responses.finish(organisation, id, status, body, output))

    async def get_response(self, organisation: str, id: str) -> StoredResponse | None:
        return await self.read(lambda session: session.responses.get(organisation, id))

    async def delete_response(self, organisation: str, id: str) -> bool:
        """Removes a response with its items and events. What continued it stays, and is a broken chain."""
        return await self.write(lambda session: session.responses.delete(organisation, id))

    async def input_items(
        self,
        organisation: str,
        id: str,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> Page | None:
        """A page of a response's input. None: no such response. `NotFound`: the cursor is not in the list."""
        return await self.read(
            lambda session: session.responses.input_items(
                organisation, id, after=after, before=before, limit=limit, order=order
            )
        )

    async def chain(self, organisation: str, id: str) -> Chain | BrokenChain:
        """All that a response which names this one as its previous response continues."""
        return await self.read(lambda session: session.chains.chain(organisation, id))

    async def find_items(self, organisation: str, ids: Collection[str]) -> dict[str, Item]:
        """The items with these ids, wherever they are; an id that is not in the answer is not known."""
        return await self.read(lambda session: session.chains.find_items(organisation, ids))

    async def find_item(self, organisation: str, id: str) -> Item | None:
        return (await self.find_items(organisation, [id])).get(id)

    async def append_events(self, organisation: str, id: str, events: Sequence[Event]) -> bool:
        """Adds to a response's stream; a number that is there already stays as it is. False: the response is gone."""
        return await self.write(lambda session: session.events.append(organisation, id, events))

    async def events_after(self, organisation: str, id: str, sequence: int = -1, *, limit: int = 1000) -> list[Event]:
        """The events with higher numbers, in order, and at most `limit` of them."""
        return await self.read(lambda session: session.events.after(organisation, id, sequence, limit))

    async def last_event(self, organisation: str, id: str) -> Event | None:
        return await self.read(lambda session: session.events.last(organisation, id))

    # Conversations

    async def create_conversation(self, conversation: Conversation, items: Sequence[Item] = ()) -> bool:
        """False: the id is taken already."""
        return await self.write(lambda session: session.conversations.create(conversation, items))

    async def get_conversation(self, organisation: str, id: str) -> Conversation | None:
        return await self.read(lambda session: session.conversations.get(organisation, id))

    async def update_conversation(self, organisation: str, id: str, *, metadata: str) -> Conversation | None:
        return await self.write(lambda session: session.conversations.update(organisation, id, metadata))

    async def delete_conversation(self, organisation: str, id: str) -> bool:
        """Removes a conversation with its items. The responses that ran in it stay."""
        return await self.write(lambda session: session.conversations.delete(organisation, id))

    async def add_conversation_items(self, organisation: str, id: str, items: Sequence[Item]) -> bool:
        """Adds at the end. False: no such conversation. `InvalidRequest`: it has an item with such an id."""
        return await self.write(lambda session: session.conversations.add_items(organisation, id, items))

    async def conversation_items(
        self,
        organisation: str,
        id: str,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> Page | None:
        """A page of a conversation. None: no such conversation. `NotFound`: the cursor is not in the list."""
        return await self.read(
            lambda session: session.conversations.list_items(
                organisation, id, after=after, before=before, limit=limit, order=order
            )
        )

    async def conversation_history(self, organisation: str, id: str) -> tuple[Item, ...] | None:
        """All items of a conversation, oldest first: what a response in it continues."""
        return await self.read(lambda session: session.conversations.all_items(organisation, id))

    async def get_conversation_item(self, organisation: str, id: str, item: str) -> Item | None:
        return await self.read(lambda session: session.conversations.get_item(organisation, id, item))

    async def delete_conversation_item(self, organisation: str, id: str, item: str) -> bool:
        return await self.write(lambda session: session.conversations.delete_item(organisation, id, item))

    # The server's own upkeep

    async def expire(self, now: float | None = None) -> int:
        """Removes what has expired, a few at a time so that others write in between, and says how much it was."""
        at = self._clock() if now is None else now
        total = 0
        while count := await self.write(lambda session: session.upkeep.expire(at)):
            total += count
        return total

    async def heartbeat(self, owner: str) -> list[Running]:
        """Says that a process is alive. The answer is what it should be running: the rest was cancelled or deleted."""
        return await self.write(lambda session: session.upkeep.heartbeat(owner))

    async def fail_orphans(
        self,
        *,
        silent_for: float | None = None,
        gone: Callable[[str], bool] | None = None,
        message: str = LOST,
        only: Running | None = None,
    ) -> list[Running]:
        """Marks as failed what still runs on paper though its process is gone, and says which responses these were.

        A process is gone if it gave no heartbeat for `silent_for` seconds, or if `gone` says so of its name. `only`:
        one response, which is no longer running afterwards, whoever ended it.
        """
        since = None if silent_for is None else self._clock() - silent_for
        owners = await self.read(lambda session: session.upkeep.owners()) if gone is not None else []
        lost = [owner for owner in owners if gone is not None and gone(owner)]
        failed: list[Running] = []
        while some := await self.write(lambda session: session.upkeep.fail_orphans(lost, since, message, only)):
            failed += some
        return failed

    async def secret(self, name: str, fresh: Callable[[], str]) -> str:
        """A value that is drawn once and is the same for every process from then on."""
        found = await self.read(lambda session: session.secrets.get(name))
        if found is not None:
            return found
        value = fresh()
        return await self.write(lambda session: session.secrets.keep(name, value))

    async def revision(self, name: Revised) -> int:
        """A number that grows with every change to keys and organisations, or to models. It is asked for over and
        over: as long as a file was not written to, it is not read either."""
        mark = self.location.mark()
        if mark is None or mark != self._mark:
            self._mark = None
            found = self._glance.revisions()
            if found is None:
                found = await self.watch(lambda session: session.revisions.all())
            self._revisions = found
            self._mark = mark
        return self._revisions.get(name, 0)
