"""Compare the usage rows in the database with the requests whose end the clients have received."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import msgspec

from bench.soak.results import MeteredRequest
from syringa.store import Store, UsageRecord
from syringa.store.records import UsageFilter

PREFIX = "soak-"  # of the request ids of the clients
_PAGE = 5000


class UsageCheck(msgspec.Struct, kw_only=True):
    ended: int  # generating requests whose end a client has received
    rows: int
    lost: int
    duplicated: int
    examples: list[str] = []


def compare(
    ended: Sequence[MeteredRequest], unknown: collections.Counter[str], rows: Iterable[UsageRecord]
) -> UsageCheck:
    """`unknown`: requests per organization that may or may not have a row, because their client has not seen an end.

    Refusals without tokens share rows, so they are compared by their number per organization and status. All other
    requests are compared by their id.
    """
    by_id: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[tuple[str, int]] = collections.Counter()
    count = 0
    for row in rows:
        count += 1
        if row.outcome == "refused" and not row.input_tokens and not row.output_tokens:
            refusals[row.organization, row.status] += row.requests
        else:
            by_id[row.request_id] += 1
    # A request that is refused after its first token has a row of its own.
    merged = [each for each in ended if each.refused and not by_id[each.request_id]]
    expected = collections.Counter((each.organization, each.status) for each in merged)
    examples: list[str] = []
    lost = duplicated = 0
    for each in ended:
        if not each.refused and not by_id[each.request_id]:
            lost += 1
            examples.append(f"lost: {each.request_id} {each.organization} {each.status}")
    for request_id, found in by_id.items():
        if found > 1 and request_id.startswith(PREFIX):
            duplicated += found - 1
            examples.append(f"duplicated: {request_id} {found} rows")
    spare = collections.Counter(unknown)
    for group, number in expected.items():
        if (missing := number - refusals[group]) > 0:
            lost += missing
            examples.append(f"lost: {missing} refusals of {group}")
    for group, found in refusals.items():
        extra = max(0, found - expected[group])
        covered = min(extra, spare[group[0]])
        spare[group[0]] -= covered
        if extra > covered:
            duplicated += extra - covered
            examples.append(f"duplicated: {extra - covered} refusals of {group}")
    return UsageCheck(ended=len(ended), rows=count, lost=lost, duplicated=duplicated, examples=examples[:20])


async def read_rows(database: str, organizations: Iterable[str]) -> list[UsageRecord]:
    """Return all usage rows of some organizations."""
    found: list[UsageRecord] = []
    async with Store(database) as store:
        for organization in organizations:
            after: str | None = None
            while True:
                page = await store.read(
                    lambda session, organization=organization, after=after: session.usage.records(  # type: ignore[misc]
                        UsageFilter(organization=organization), after=after, limit=_PAGE
                    )
                )
                found += page
                if len(page) < _PAGE:
                    break
                after = page[-1].id
    return found
