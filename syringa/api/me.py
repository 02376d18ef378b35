"""Wire types of `/v1/me`: the caller of a request, and what it may do."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from syringa.api.fields.schema import doc

Scope = Literal["inference", "admin"]


class CallerKey(msgspec.Struct, kw_only=True):
    """The key of the caller, without its secret. Of a key of the settings, only the id is known."""

    id: str
    name: str | None = None
    hint: Annotated[str | None, doc("First characters of the key.")] = None
    created_at: Annotated[int | None, doc("Unix time in seconds.")] = None
    expires_at: Annotated[int | None, doc("Unix time in seconds; null: never.")] = None


class LimitsEntry(msgspec.Struct, kw_only=True):
    """Rate limits. 0: no limit."""

    requests_per_minute: int
    tokens_per_minute: int
    concurrent: int


class CallerLimits(msgspec.Struct, kw_only=True):
    organization: Annotated[LimitsEntry, doc("Limits that all keys of the organization share.")]
    key: Annotated[LimitsEntry, doc("Limits of this key alone.")]


class ServerEntry(msgspec.Struct, kw_only=True):
    version: str
    cluster: Annotated[bool, doc("Whether models run on the nodes of a cluster.")]
    default_model: Annotated[str, doc("Id of the model of requests that name none.")]


class CallerEntry(msgspec.Struct, kw_only=True):
    """The caller of a request."""

    object: Annotated[str, doc("`caller`.", const="caller")] = "caller"
    keys_required: Annotated[bool, doc("False: the server has no keys, and requests need none.")]
    organization: Annotated[str | None, doc("Null without keys.")]
    key: Annotated[CallerKey | None, doc("Null without keys.")]
    scopes: Annotated[
        list[Scope],
        doc("`admin`: may use the endpoints below `/admin`. Without keys, so may all that use a loopback address."),
    ]
    models: Annotated[list[str] | None, doc("Ids of the models that the key may use; null: all.")]
    limits: CallerLimits
    server: ServerEntry
