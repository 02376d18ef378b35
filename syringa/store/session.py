"""All queries of one transaction. A new group of queries gets a class in `store/queries` and a line here."""

from __future__ import annotations

from sqlalchemy import Connection

from syringa.store.queries.batches import BatchQueries
from syringa.store.queries.chains import ChainQueries
from syringa.store.queries.conversations import ConversationQueries
from syringa.store.queries.events import EventQueries
from syringa.store.queries.files import FileQueries
from syringa.store.queries.keys import KeyQueries, OrganizationQueries
from syringa.store.queries.leases import LeaseQueries
from syringa.store.queries.listings import ListingQueries
from syringa.store.queries.maintenance import MaintenanceQueries
from syringa.store.queries.pools import PoolQueries
from syringa.store.queries.pulls import PullQueries
from syringa.store.queries.responses import ResponseQueries
from syringa.store.queries.series import SeriesQueries
from syringa.store.queries.server import ModelQueries, RevisionQueries, SecretQueries
from syringa.store.queries.usage import UsageQueries


class Session:
    """The argument of every query: one transaction, and the time at which it began."""

    def __init__(self, connection: Connection, now: float) -> None:
        self.responses = ResponseQueries(connection, now)
        self.chains = ChainQueries(connection, now)
        self.events = EventQueries(connection, now)
        self.conversations = ConversationQueries(connection, now)
        self.listings = ListingQueries(connection, now)
        self.files = FileQueries(connection, now)
        self.batches = BatchQueries(connection, now)
        self.maintenance = MaintenanceQueries(connection, now)
        self.secrets = SecretQueries(connection, now)
        self.keys = KeyQueries(connection, now)
        self.organizations = OrganizationQueries(connection, now)
        self.usage = UsageQueries(connection, now)
        self.series = SeriesQueries(connection, now)
        self.pulls = PullQueries(connection, now)
        self.models = ModelQueries(connection, now)
        self.revisions = RevisionQueries(connection, now)
        self.leases = LeaseQueries(connection, now)
        self.pools = PoolQueries(connection, now)
