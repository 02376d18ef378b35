"""Descriptions of the administration and usage endpoints for the OpenAPI document."""

from __future__ import annotations

from syringa.api import admin, pulls, series
from syringa.api.models import model_files
from syringa.api.openapi.operations import POST_ERRORS, Operation, query_parameter

_GROUPS = ["day", "organization", "key", "model", "endpoint", "user"]
_STORE_ERRORS = (403, 500, 503)
_WRITE_ERRORS = (*POST_ERRORS, 403, 503)

_USAGE = {
    "by": query_parameter(
        f"Comma-separated grouping: {', '.join(_GROUPS)}.",
        type="string",
        pattern=f"^({'|'.join(_GROUPS)})(,({'|'.join(_GROUPS)}))*$",
        default="day",
    ),
    "since": query_parameter(
        "Start of the period: a date, a time (RFC 3339), Unix seconds, or an age such as `7d`.", type="string"
    ),
    "until": query_parameter("End of the period (exclusive), in the same formats.", type="string"),
    "key": query_parameter("The id of a key.", type="string"),
    "model": query_parameter("The id of a model.", type="string"),
    "format": query_parameter("The format of the response.", enum=["json", "csv"], default="json"),
}
_ORGANIZATION = {"organization": query_parameter("Only this organization.", type="string")}
_KEY_ID = {"key_id": "The id of a key (not the key itself)."}
_ORGANIZATION_ID = {"organization_id": "The id of an organization."}

_MODEL_ID = {"model_id": "The id of a model. May contain slashes."}
_MODEL = {
    "type": "object",
    "description": "The configuration, with `status`: `loaded`, `hanging`, `loading`, `cold` or `failed`.",
    "required": [
        *("object", "id", "path", "status", "loading", "error", "removable", "files", "loaded", "engine_stats"),
        *("memory_bytes", "idle_timeout"),
    ],
    "properties": {
        "object": {"const": "model_configuration"},
        "loading": {
            "type": ["object", "null"],
            "description": "How far loading is, as in `/v1/models`: `phase`, `fraction`, `seconds`; null if the status "
            "is another one.",
        },
        "error": {
            "type": ["string", "null"],
            "description": "Why it could not be loaded the last time, or does not respond; null: nothing is wrong.",
        },
        "removable": {"type": "boolean", "description": "False: it is defined in the settings."},
        "files": {
            "type": ["object", "null"],
            "description": "`path`, `bytes`, and `deletable`: whether they were pulled. Null: they are not here.",
        },
        "loaded": {
            "type": ["object", "null"],
            "description": "What its worker tells: `architecture`, `dtype`, `max_model_len`, `parameters`, `kernels`,"
            " `threads`, `load_seconds`; null: it is not loaded.",
        },
        "engine_stats": {
            "type": ["object", "null"],
            "description": "`running`, `waiting`, `kv_tokens`, `kv_tokens_used`, `idle_seconds`, `prefix_caching`;"
            " null: it is not loaded.",
        },
        "memory_bytes": {
            "type": ["integer", "null"],
            "description": "Weights plus KV cache while it is loaded, estimated from its files.",
        },
        "idle_timeout": {"type": "number", "description": "Idle seconds after which it is unloaded; 0: never."},
    },
}
_MODELS = {"type": "array", "items": _MODEL}

LIST_KEYS = Operation(
    id="listKeys",
    tag="Administration",
    summary="List the keys",
    response=admin.KeyList,
    query=_ORGANIZATION | {"revoked": query_parameter("Include revoked keys.", type="boolean", default=False)},
    errors=(400, *_STORE_ERRORS),
)

CREATE_KEY = Operation(
    id="createKey",
    tag="Administration",
    summary="Create a key",
    description="The key itself is returned only in this response.",
    request=admin.KeyRequest,
    example={"organization": "acme", "name": "the website"},
    response=admin.NewKey,
    errors=_WRITE_ERRORS,
)

SHOW_KEY = Operation(
    id="showKey",
    tag="Administration",
    summary="Show a key",
    response=admin.KeyEntry,
    parameters=_KEY_ID,
    errors=(404, *_STORE_ERRORS),
)

REVOKE_KEY = Operation(
    id="revokeKey",
    tag="Administration",
    summary="Revoke a key",
    description="Every process rejects the key within a second. Idempotent.",
    response=admin.KeyEntry,
    parameters=_KEY_ID,
    errors=(404, *_STORE_ERRORS),
)

LIST_ORGANIZATIONS = Operation(
    id="listOrganizations",
    tag="Administration",
    summary="List the organizations",
    response=admin.OrganizationList,
    errors=_STORE_ERRORS,
)

SHOW_ORGANIZATION = Operation(
    id="showOrganization",
    tag="Administration",
    summary="Show an organization",
    response=admin.OrganizationEntry,
    parameters=_ORGANIZATION_ID,
    errors=(404, *_STORE_ERRORS),
)

SET_ORGANIZATION = Operation(
    id="setOrganization",
    tag="Administration",
    summary="Set an organization's limits",
    description="Creates the organization if it does not exist. `default` restores the server's own limit.",
    request=admin.OrganizationRequest,
    example={"requests_per_minute": 600, "tokens_per_minute": "default"},
    response=admin.OrganizationEntry,
    parameters=_ORGANIZATION_ID,
    errors=_WRITE_ERRORS,
)

LIST_MODEL_CONFIGURATIONS = Operation(
    id="listModelConfigurations",
    tag="Administration",
    summary="List the model configurations",
    response={"type": "object", "properties": {"object": {"const": "list"}, "data": _MODELS}},
    errors=(403, 500),
)

SHOW_MODEL_CONFIGURATION = Operation(
    id="showModelConfiguration",
    tag="Administration",
    summary="Show a model configuration",
    response=_MODEL,
    parameters=_MODEL_ID,
    errors=(400, 403, 404, 500),
)

CONFIGURE_MODEL = Operation(
    id="configureModel",
    tag="Administration",
    summary="Configure a model",
    description="Adds the model, or replaces its configuration. The first request for the model loads it. Models"
    " defined in the settings are changed there.",
    request=admin.ModelRequest,
    example={"path": "default", "prices": {"input": 0.1, "output": 0.4}, "defaults": {"temperature": 0.7}},
    response=_MODEL,
    parameters=_MODEL_ID,
    errors=_WRITE_ERRORS,
)

REMOVE_MODEL = Operation(
    id="removeModel",
    tag="Administration",
    summary="Remove a model that was added at run time",
    description="Its files stay, unless `files` is true, they were pulled, and no other model uses them.",
    response={
        "type": "object",
        "required": ["id", "deleted", "files_deleted"],
        "properties": {"deleted": {"const": True}, "files_deleted": {"type": "boolean"}},
    },
    parameters=_MODEL_ID,
    query={"files": query_parameter("Delete its files, too.", type="boolean", default=False)},
    errors=(400, 404, *_STORE_ERRORS),
)

LOAD_MODEL = Operation(
    id="loadModel",
    tag="Administration",
    summary="Load a model",
    description="The response does not wait until it is loaded.",
    response=_MODEL,
    parameters=_MODEL_ID,
    errors=(400, 403, 404, 500),
)

UNLOAD_MODEL = Operation(
    id="unloadModel",
    tag="Administration",
    summary="Unload a model",
    description="As soon as its running requests have finished. The next request loads it again.",
    response=_MODEL,
    parameters=_MODEL_ID,
    errors=(400, 403, 404, 500),
)

LIST_AVAILABLE_MODELS = Operation(
    id="listAvailableModels",
    tag="Administration",
    summary="List the models that can be pulled by a short name",
    response=model_files.AvailableModelList,
    errors=(403, 500),
)

_PULL_ID = {"pull_id": "The id of a pull."}

PULL_MODEL = Operation(
    id="pullModel",
    tag="Administration",
    summary="Pull a model",
    description="Downloads a model and adds it to those of the server. The response does not wait for it; the pull goes"
    " on without the client. If the same one is running, it is returned.",
    request=pulls.ModelPullRequest,
    example={"model": "qwen3-0.6b"},
    response=pulls.PullEntry,
    errors=_WRITE_ERRORS,
)

LIST_PULLS = Operation(
    id="listPulls",
    tag="Administration",
    summary="List the pulls that are running, or have ended within a day",
    response=pulls.PullList,
    errors=_STORE_ERRORS,
)

SHOW_PULL = Operation(
    id="showPull",
    tag="Administration",
    summary="Show the progress of a pull",
    response=pulls.PullEntry,
    parameters=_PULL_ID,
    errors=(404, *_STORE_ERRORS),
)

END_PULL = Operation(
    id="endPull",
    tag="Administration",
    summary="Cancel a pull that is running, or forget one that has ended",
    description="One that runs in another process is canceled within about a second. What has arrived stays, and the"
    " next pull goes on from there.",
    response=pulls.PullEntry,
    parameters=_PULL_ID,
    errors=(404, *_STORE_ERRORS),
)

LIST_REPLICAS = Operation(
    id="listReplicas",
    tag="Administration",
    summary="List the replicas of all models",
    response=admin.ReplicaList,
    errors=(403, 500),
)

DRAIN_REPLICA = Operation(
    id="drainReplica",
    tag="Administration",
    summary="Drain a replica",
    description="The replica gets no new requests. Those that will finish within `grace` seconds finish, the others go"
    " on at another replica, and the process ends. It is replaced if the model needs it.",
    request=admin.DrainRequest,
    example={"grace": 10},
    response=admin.ReplicaEntry,
    parameters={"replica_id": "The id of a replica."},
    errors=(*POST_ERRORS, 403, 404),
)

LIST_NODES = Operation(
    id="listNodes",
    tag="Administration",
    summary="List the nodes",
    response=admin.NodeList,
    errors=(403, 500),
)

DRAIN_NODE = Operation(
    id="drainNode",
    tag="Administration",
    summary="Drain a node",
    description="Nothing is started on the node any more. The requests of its replicas finish within `grace` seconds or"
    " go on at replicas on other nodes.",
    request=admin.NodeDrainRequest,
    example={"grace": 60},
    response=admin.NodeEntry,
    parameters={"node": "The name of a node."},
    errors=(*POST_ERRORS, 403, 404),
)

LIST_POOLS = Operation(
    id="listPools",
    tag="Administration",
    summary="List the pools",
    response=admin.PoolList,
    errors=(403, 500),
)

LIST_MOVES = Operation(
    id="listMoves",
    tag="Administration",
    summary="List the replicas that were started and stopped last, with the reason",
    response=admin.MoveList,
    errors=(403, 500),
)

_POOL = {"pool": "The name of a pool."}

OPEN_POOL = Operation(
    id="openPool",
    tag="Administration",
    summary="Open a pool",
    description="The pool is open, whatever its windows are, until it is closed or reset. In mode `idle`, only its idle"
    " nodes are used. Survives a restart of the server.",
    response=admin.PoolEntry,
    parameters=_POOL,
    errors=(403, 404, 500),
)

CLOSE_POOL = Operation(
    id="closePool",
    tag="Administration",
    summary="Close a pool",
    description="The replicas in the pool are drained, the last that came first, and none is started until the pool is"
    " opened or reset. Survives a restart of the server.",
    response=admin.PoolEntry,
    parameters=_POOL,
    errors=(403, 404, 500),
)

RESET_POOL = Operation(
    id="resetPool",
    tag="Administration",
    summary="Let a pool follow its schedule again",
    response=admin.PoolEntry,
    parameters=_POOL,
    errors=(403, 404, 500),
)

_DURATION = "^[1-9][0-9]{0,6}[smhd]$"

SERIES = Operation(
    id="series",
    tag="Administration",
    summary="Speed, load, latencies and errors over time",
    description="Figures of all organizations. They are kept for 30 days: for 2 hours in steps of 10 seconds, for 2"
    " days in steps of a minute, then in steps of 15 minutes.",
    response=series.SeriesReport,
    query={
        "range": query_parameter("The length of the time range, `1m` to `30d`.", type="string", pattern=_DURATION),
        "step": query_parameter(
            "The length of a step. Default: one with which there are at most 120.", type="string", pattern=_DURATION
        ),
        "until": query_parameter(
            "The end of the range, in Unix seconds. Default: now.", type="integer", minimum=0, maximum=2**53
        ),
        "model": query_parameter("Only this model.", type="string"),
    },
    errors=(400, *_STORE_ERRORS),
)

USAGE = Operation(
    id="usage",
    tag="Administration",
    summary="Usage of all organizations",
    response=admin.UsageList,
    text_media_type="text/csv",
    query=_USAGE | _ORGANIZATION,
    errors=(400, *_STORE_ERRORS),
)

OWN_USAGE = Operation(
    id="ownUsage",
    tag="Usage",
    summary="Usage of your organization",
    response=admin.UsageList,
    text_media_type="text/csv",
    query=_USAGE,
    errors=(400, 500, 503),
)
