"""What administrators send and see: keys, organisations, and what was used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.fields.annotations import says

Limit = Annotated[int, Meta(ge=0, le=10**12)]


class KeyRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /admin/keys`."""

    organisation: Annotated[
        Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")], says("Whose key it is; made if it is new.")
    ]
    name: Annotated[Annotated[str, Meta(max_length=100)] | None, says("What it is for.")] = None
    admin: Annotated[bool | None, says("May manage keys, organisations and models.", False)] = None
    models: Annotated[list[str] | None, says("Ids of the models that it may use; absent: all.")] = None
    expires_at: Annotated[int | None, says("Unix time, in seconds; absent: never.")] = None
    requests_per_minute: Annotated[Limit | None, says("A limit of its own; absent or 0: none.")] = None
    tokens_per_minute: Annotated[Limit | None, says("A limit of its own; absent or 0: none.")] = None
    concurrent: Annotated[Limit | None, says("Requests at the same time; absent or 0: no limit of its own.")] = None


class KeyEntry(msgspec.Struct, kw_only=True):
    """What is known of a key, which is not the key."""

    object: Annotated[str, says("`api_key`.", const="api_key")] = "api_key"
    id: str
    organisation: str
    name: str
    hint: Annotated[str, says("How the key begins.")]
    admin: bool
    models: Annotated[list[str] | None, says("Null: all.")]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None


class NewKey(KeyEntry, kw_only=True):
    """A key that was just made."""

    key: Annotated[str, says("The key itself. It is shown this once, and cannot be had again.")]


class KeyList(msgspec.Struct, kw_only=True):
    object: Annotated[str, says("`list`.", const="list")] = "list"
    data: list[KeyEntry]


class OrganisationRequest(msgspec.Struct, kw_only=True):
    """The body of `PUT /admin/organisations/{id}`. What is absent stays as it is."""

    requests_per_minute: Annotated[Limit | Literal["default"] | None, says("0: no limit.")] = None
    tokens_per_minute: Annotated[Limit | Literal["default"] | None, says("0: no limit.")] = None
    concurrent: Annotated[Limit | Literal["default"] | None, says("Requests at the same time; 0: no limit.")] = None


class OrganisationEntry(msgspec.Struct, kw_only=True):
    """An organisation. A limit that is null is the server's default; 0: no limit."""

    object: Annotated[str, says("`organisation`.", const="organisation")] = "organisation"
    id: str
    created_at: int
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None


class OrganisationList(msgspec.Struct, kw_only=True):
    object: Annotated[str, says("`list`.", const="list")] = "list"
    data: list[OrganisationEntry]


class ModelRequest(msgspec.Struct, kw_only=True):
    """The body of `PUT /admin/models/{id}`. What is absent is as the server's setting of the same name."""

    path: Annotated[str, says("A known model's name, a GGUF file, or a Hugging Face folder, on the server.")]
    aliases: Annotated[list[str] | None, says("Other names that it answers to.")] = None
    max_model_len: Annotated[Limit | None, says("Longest prompt plus answer, in tokens.")] = None
    dtype: Annotated[str | None, says("Precision of the weights.")] = None
    threads: Annotated[Limit | None, says("CPU threads.")] = None
    kv_cache_tokens: Annotated[Limit | None, says("Tokens that the cache holds.")] = None
    kv_cache_gb: Annotated[float | None, says("Memory for the cache in GiB.")] = None
    chat_template: Annotated[str | None, says("A file with a chat template, on the server.")] = None
    tool_format: Annotated[str | None, says("How the model writes calls of tools.")] = None
    reasoning_format: Annotated[str | None, says("How the model marks its thoughts.")] = None
    prices: Annotated[dict[str, float] | None, says("Of a million tokens: `input`, `cached_input`, `output`.")] = None
    defaults: Annotated[dict[str, Any] | None, says("Fields of a request, for requests that do not say.")] = None
    preload: Annotated[bool | None, says("Load it when the server starts.")] = None
    idle_seconds: Annotated[float | None, says("Seconds without use after which it is unloaded; 0: never.")] = None


class UsageEntry(msgspec.Struct, kw_only=True):
    """Requests added up. What they were not grouped by is null."""

    day: Annotated[str | None, says("In UTC.")]
    organisation: str | None
    key: str | None
    model: str | None
    endpoint: str | None
    user: str | None
    requests: int
    ok: int
    cancelled: Annotated[int, says("The client went away.")]
    refused: Annotated[int, says("The client's fault, or over a limit.")]
    failed: Annotated[int, says("The server's fault.")]
    input_tokens: int
    cached_tokens: Annotated[int, says("Of the input tokens.")]
    output_tokens: int
    reasoning_tokens: Annotated[int, says("Of the output tokens.")]
    cost: Annotated[float, says("In the currency of the models' prices.")]


class UsageList(msgspec.Struct, kw_only=True):
    object: Annotated[str, says("`list`.", const="list")] = "list"
    data: list[UsageEntry]


def shown(value: msgspec.Struct, wire: type[Any], **more: Any) -> Any:
    """A stored value as its wire type shows it."""
    known = msgspec.structs.asdict(value)
    given = {name: each for name, each in known.items() if name in wire.__struct_fields__}
    if isinstance(given.get("models"), tuple):
        given["models"] = list(given["models"])
    return wire(**given, **more)
