"""Every query there is, in one transaction. A new group of queries gets a module of its own and a line here."""

from __future__ import annotations

from sqlalchemy import Connection

from syringa.store.queries.chains import Chains
from syringa.store.queries.conversations import Conversations
from syringa.store.queries.events import Events
from syringa.store.queries.keys import Keys, Organisations
from syringa.store.queries.maintenance import Upkeep
from syringa.store.queries.models import Models
from syringa.store.queries.responses import Responses
from syringa.store.queries.revisions import Revisions
from syringa.store.queries.secrets import Secrets
from syringa.store.queries.usage import Usage


class Session:
    """What `Store.read` and `Store.write` hand to their work."""

    def __init__(self, connection: Connection, now: float) -> None:
        self.responses = Responses(connection, now)
        self.chains = Chains(connection, now)
        self.events = Events(connection, now)
        self.conversations = Conversations(connection, now)
        self.upkeep = Upkeep(connection, now)
        self.secrets = Secrets(connection, now)
        self.keys = Keys(connection, now)
        self.organisations = Organisations(connection, now)
        self.usage = Usage(connection, now)
        self.models = Models(connection, now)
        self.revisions = Revisions(connection, now)
