"""Wire types of the admin API: API keys, organizations, models and usage."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.fields.schema import doc

Limit = Annotated[int, Meta(ge=0, le=10**12)]


class KeyRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /admin/keys`."""

    organization: Annotated[
        Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")],
        doc("Organization of the key; created if it does not exist."),
    ]
    name: Annotated[Annotated[str, Meta(max_length=100)] | None, doc("Label of the key, at most 100 characters.")] = (
        None
    )
    admin: Annotated[bool | None, doc("Whether the key may use the admin API.", False)] = None
    models: Annotated[list[str] | None, doc("Ids of the models that the key may use. Default: all.")] = None
    expires_at: Annotated[int | None, doc("Unix time in seconds. Default: never.")] = None
    requests_per_minute: Annotated[
        Limit | None, doc("Maximum requests per minute of the key. Default or 0: no limit.")
    ] = None
    tokens_per_minute: Annotated[Limit | None, doc("Maximum tokens per minute of the key. Default or 0: no limit.")] = (
        None
    )
    concurrent: Annotated[
        Limit | None, doc("Maximum number of concurrent requests of the key. Default or 0: no limit.")
    ] = None


class KeyEntry(msgspec.Struct, kw_only=True):
    """A key without its secret."""

    object: Annotated[str, doc("`api_key`.", const="api_key")] = "api_key"
    id: str
    organization: str
    name: str
    hint: Annotated[str, doc("First characters of the key.")]
    admin: bool
    models: Annotated[list[str] | None, doc("Ids of the models that the key may use; null: all.")]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None


class NewKey(KeyEntry, kw_only=True):
    """A key that was just created."""

    key: Annotated[str, doc("The secret key. It is returned only once.")]


class KeyList(msgspec.Struct, kw_only=True):
    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[KeyEntry]


class OrganizationRequest(msgspec.Struct, kw_only=True):
    """The body of `PUT /admin/organizations/{id}`. Absent fields are left unchanged."""

    requests_per_minute: Annotated[
        Limit | Literal["default"] | None,
        doc("Maximum requests per minute; 0: no limit; `default`: the server's setting."),
    ] = None
    tokens_per_minute: Annotated[
        Limit | Literal["default"] | None,
        doc("Maximum tokens per minute; 0: no limit; `default`: the server's setting."),
    ] = None
    concurrent: Annotated[
        Limit | Literal["default"] | None,
        doc("Maximum number of concurrent requests; 0: no limit; `default`: the server's setting."),
    ] = None


class OrganizationEntry(msgspec.Struct, kw_only=True):
    """An organization. A limit of null means the server's default, 0 no limit."""

    object: Annotated[str, doc("`organization`.", const="organization")] = "organization"
    id: str
    created_at: int
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None


class OrganizationList(msgspec.Struct, kw_only=True):
    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[OrganizationEntry]


class ModelRequest(msgspec.Struct, kw_only=True):
    """The body of `PUT /admin/models/{id}`. Absent fields take the value of the server's setting of the same name."""

    path: Annotated[str, doc("Name of a known model, or path of a GGUF file or Hugging Face folder on the server.")]
    aliases: Annotated[list[str] | None, doc("Other names of the model.")] = None
    max_model_len: Annotated[Limit | None, doc("Maximum prompt plus output length, in tokens.")] = None
    dtype: Annotated[str | None, doc("Data type of the weights.")] = None
    threads: Annotated[Limit | None, doc("Number of CPU threads.")] = None
    kv_cache_tokens: Annotated[Limit | None, doc("Size of the KV cache, in tokens.")] = None
    kv_cache_gb: Annotated[float | None, doc("Size of the KV cache, in GiB.")] = None
    kv_cache_dtype: Annotated[str | None, doc("Data type of the KV cache on a GPU: auto or fp8.")] = None
    replicas: Annotated[
        dict[str, int] | int | str | None, doc('Number of replicas: `{"min": 1, "max": 3}`, `3` or `"1:3"`.')
    ] = None
    chat_template: Annotated[str | None, doc("Path of a file with a chat template on the server.")] = None
    tool_format: Annotated[str | None, doc("Format in which the model writes tool calls.")] = None
    reasoning_format: Annotated[str | None, doc("Format in which the model marks its reasoning.")] = None
    prices: Annotated[dict[str, float] | None, doc("Prices per million tokens: `input`, `cached_input`, `output`.")] = (
        None
    )
    defaults: Annotated[dict[str, Any] | None, doc("Default values of request fields.")] = None
    pools: Annotated[
        list[str] | None, doc("Pools of a cluster in which it may run, the preferred one first. Default: any.")
    ] = None
    preload: Annotated[bool | None, doc("Load the model when the server starts.")] = None
    idle_seconds: Annotated[
        float | None, doc("Seconds without requests after which the model is unloaded; 0: never.")
    ] = None


class ReplicaEntry(msgspec.Struct, kw_only=True):
    """A replica of a model: a worker process."""

    object: Annotated[str, doc("`replica`.", const="replica")] = "replica"
    id: Annotated[str, doc("Unique in the life of the server.")]
    model: Annotated[str, doc("Id of the model; of the first one if several share the replica.")]
    status: Annotated[str, doc("`queued`, `fetching`, `loading`, `ready`, `hanging` or `draining`.")]
    node: Annotated[str, doc("Where it runs; `local`: on this machine.")]
    fingerprint: Annotated[str, doc("Replicas with the same one give the same outputs, bit by bit. Known when ready.")]
    reason: Annotated[str | None, doc("Why it waits or hangs.")]


class ReplicaList(msgspec.Struct, kw_only=True):
    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[ReplicaEntry]


class DrainRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /admin/replicas/{id}/drain`."""

    grace: Annotated[
        Annotated[float, Meta(ge=0, le=86_400)] | None,
        doc("Seconds in which requests may finish. Default: the setting `drain_timeout`."),
    ] = None


class NodeEntry(msgspec.Struct, kw_only=True):
    """A node: a machine on which replicas run."""

    object: Annotated[str, doc("`node`.", const="node")] = "node"
    name: Annotated[str, doc("`local`: this machine.")]
    state: Annotated[str, doc("`ready`, `draining` (it is about to leave) or `lost` (it does not respond).")]
    pool: Annotated[str | None, doc("The pool to which it belongs.")]
    offered: Annotated[bool, doc("Whether replicas may be started on it now.")]
    reason: Annotated[str | None, doc("Why it is not offered.")]
    gpus: Annotated[int, doc("Number of GPUs.")]
    cpus: Annotated[int | None, doc("CPU threads, if known.")]
    memory: Annotated[int | None, doc("Memory in bytes, if known.")]
    replicas: Annotated[int, doc("Replicas on it.")]
    labels: Annotated[dict[str, str], doc("Labels, by which pools select their nodes.")]


class NodeList(msgspec.Struct, kw_only=True):
    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[NodeEntry]


class NodeDrainRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /admin/nodes/{name}/drain`."""

    grace: Annotated[
        Annotated[float, Meta(ge=0, le=86_400)] | None,
        doc("Seconds in which requests may finish. Default: `preemption.grace_period` of the node's pool."),
    ] = None


class PoolWindowEntry(msgspec.Struct, kw_only=True):
    """Times at which a pool is open, in its time zone."""

    days: Annotated[list[str], doc("Days on which it begins: `mon` to `sun`.")]
    start: Annotated[str, doc("Time at which it begins, such as `22:00`.")]
    end: Annotated[str, doc("Time at which it ends; on the next day if it is not later than `start`.")]


class PoolEntry(msgspec.Struct, kw_only=True):
    """A pool of nodes."""

    object: Annotated[str, doc("`pool`.", const="pool")] = "pool"
    name: str
    state: Annotated[
        str,
        doc(
            "`active`; `closing`: closed, and replicas are left; `inactive`: closed; `degraded`: open, and a node is"
            " lost, or there is no room for a model."
        ),
    ]
    reason: Annotated[str | None, doc("Why it has this state.")]
    mode: Annotated[str, doc("When it is open: `always`, `scheduled` or `idle`.")]
    override: Annotated[str | None, doc("`open` or `closed` by an operator; null: it follows its schedule.")]
    changes_at: Annotated[int | None, doc("Unix time at which its schedule opens or closes it next.")]
    nodes: Annotated[int, doc("Nodes that are not lost.")]
    offered: Annotated[int, doc("Of these, those on which replicas may be started now.")]
    gpus: Annotated[int, doc("GPUs of its nodes.")]
    gpus_used: Annotated[int, doc("GPUs in use.")]
    cpus: Annotated[int, doc("CPU threads of its nodes without GPUs.")]
    cpus_used: Annotated[int, doc("CPU threads in use.")]
    replicas: Annotated[int, doc("Replicas on its nodes.")]
    timezone: Annotated[str, doc("Time zone of its windows.")]
    windows: Annotated[list[PoolWindowEntry], doc("When its schedule opens it; none: at any time.")]


class PoolList(msgspec.Struct, kw_only=True):
    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[PoolEntry]


class MoveEntry(msgspec.Struct, kw_only=True):
    """A replica that was started or stopped, and why."""

    object: Annotated[str, doc("`move`.", const="move")] = "move"
    at: Annotated[int, doc("Unix time in seconds.")]
    action: Annotated[str, doc("`start` or `stop`.")]
    replica: str
    model: Annotated[str | None, doc("Id of its model, if known.")]
    node: Annotated[str | None, doc("Where it runs or ran, if known.")]
    reason: str


class MoveList(msgspec.Struct, kw_only=True):
    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[MoveEntry]


class UsageEntry(msgspec.Struct, kw_only=True):
    """Totals of a group of requests. Fields that were not grouped by are null."""

    day: Annotated[str | None, doc("Day in UTC.")]
    organization: str | None
    key: Annotated[str | None, doc("Id of the key.")]
    key_name: Annotated[str | None, doc("Its name, or how it begins if it has none.")]
    model: str | None
    endpoint: str | None
    user: str | None
    requests: int
    ok: int
    cancelled: Annotated[int, doc("Requests whose client disconnected.")]
    refused: Annotated[int, doc("Requests that were invalid or over a limit.")]
    failed: Annotated[int, doc("Requests that failed with a server error.")]
    input_tokens: int
    cached_tokens: Annotated[int, doc("Input tokens found in the prefix cache.")]
    output_tokens: int
    reasoning_tokens: Annotated[int, doc("Output tokens that were reasoning.")]
    cost: Annotated[float, doc("Cost in the currency of the models' prices.")]


class UsageList(msgspec.Struct, kw_only=True):
    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[UsageEntry]


def to_wire(value: msgspec.Struct, wire: type[Any], **more: Any) -> Any:
    """Convert a stored record to its wire type."""
    fields = {name: each for name, each in msgspec.structs.asdict(value).items() if name in wire.__struct_fields__}
    if isinstance(fields.get("models"), tuple):
        fields["models"] = list(fields["models"])
    return wire(**fields, **more)
