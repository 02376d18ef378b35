"""The endpoints of administrators, and of usage, as they are published."""

from __future__ import annotations

from syringa.api import admin
from syringa.api.openapi.operations import POST_ERRORS, Operation, in_query

_GROUPS = ["day", "organisation", "key", "model", "endpoint", "user"]
_STORED = (403, 500, 503)
_WRITTEN = (*POST_ERRORS, 403, 503)


_USAGE = {
    "by": in_query(
        f"What to group by: some of {', '.join(_GROUPS)}, with commas.",
        type="string",
        pattern=f"^({'|'.join(_GROUPS)})(,({'|'.join(_GROUPS)}))*$",
        default="day",
    ),
    "since": in_query("From then on: a date, a time (RFC 3339), Unix seconds, or a span such as `7d`.", type="string"),
    "until": in_query("Before then.", type="string"),
    "key": in_query("The id of a key.", type="string"),
    "model": in_query("The id of a model.", type="string"),
    "format": in_query("`csv` for a spreadsheet.", enum=["json", "csv"], default="json"),
}
_ORGANISATION = {"organisation": in_query("One organisation alone.", type="string")}
_KEY_ID = {"key_id": "The id of a key, which is not the key."}
_ORGANISATION_ID = {"organisation_id": "The id of an organisation."}

_MODEL_ID = {"model_id": "The id of a model. May contain slashes."}
_MODEL = {
    "type": "object",
    "description": "The configuration, with `status`: `loaded`, `loading`, `cold` or `failed`.",
    "required": ["object", "id", "path", "status"],
    "properties": {"object": {"const": "model_configuration"}},
}
_MODELS = {"type": "array", "items": _MODEL}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/admin/keys",
        id="listKeys",
        tag="Administration",
        summary="List the keys",
        answer=admin.KeyList,
        query=_ORGANISATION | {"revoked": in_query("Those that were revoked, too.", type="boolean", default=False)},
        errors=(400, *_STORED),
    ),
    Operation(
        path="/admin/keys",
        id="createKey",
        tag="Administration",
        summary="Make a key",
        method="post",
        description="The key itself is in the answer, this once.",
        request=admin.KeyRequest,
        example={"organisation": "acme", "name": "the website"},
        answer=admin.NewKey,
        errors=_WRITTEN,
    ),
    Operation(
        path="/admin/keys/{key_id}",
        id="showKey",
        tag="Administration",
        summary="Show a key",
        answer=admin.KeyEntry,
        parameters=_KEY_ID,
        errors=(404, *_STORED),
    ),
    Operation(
        path="/admin/keys/{key_id}",
        id="revokeKey",
        tag="Administration",
        summary="Revoke a key",
        method="delete",
        description="Within a second it is refused by every process. Doing it again changes nothing.",
        answer=admin.KeyEntry,
        parameters=_KEY_ID,
        errors=(404, *_STORED),
    ),
    Operation(
        path="/admin/organisations",
        id="listOrganisations",
        tag="Administration",
        summary="List the organisations",
        answer=admin.OrganisationList,
        errors=_STORED,
    ),
    Operation(
        path="/admin/organisations/{organisation_id}",
        id="showOrganisation",
        tag="Administration",
        summary="Show an organisation",
        answer=admin.OrganisationEntry,
        parameters=_ORGANISATION_ID,
        errors=(404, *_STORED),
    ),
    Operation(
        path="/admin/organisations/{organisation_id}",
        id="setOrganisation",
        tag="Administration",
        summary="Set an organisation's limits",
        method="put",
        description="Makes it if it is new. `default`: the server's own limit from now on.",
        request=admin.OrganisationRequest,
        example={"requests_per_minute": 600, "tokens_per_minute": "default"},
        answer=admin.OrganisationEntry,
        parameters=_ORGANISATION_ID,
        errors=_WRITTEN,
    ),
    Operation(
        path="/admin/models",
        id="listModelConfigurations",
        tag="Administration",
        summary="List the models as they are configured",
        answer={"type": "object", "properties": {"object": {"const": "list"}, "data": _MODELS}},
        errors=(403, 500),
    ),
    Operation(
        path="/admin/models/{model_id}",
        id="showModelConfiguration",
        tag="Administration",
        summary="Show a model as it is configured",
        answer=_MODEL,
        parameters=_MODEL_ID,
        errors=(400, 403, 404, 500),
    ),
    Operation(
        path="/admin/models/{model_id}",
        id="configureModel",
        tag="Administration",
        summary="Configure a model",
        method="put",
        description="Adds it, or puts this description in the place of the one before. It is loaded by the first"
        " request for it. Models of the settings are changed there.",
        request=admin.ModelRequest,
        example={"path": "default", "prices": {"input": 0.1, "output": 0.4}, "defaults": {"temperature": 0.7}},
        answer=_MODEL,
        parameters=_MODEL_ID,
        errors=_WRITTEN,
    ),
    Operation(
        path="/admin/models/{model_id}",
        id="removeModel",
        tag="Administration",
        summary="Remove a model that was added",
        method="delete",
        answer={"type": "object", "required": ["id", "deleted"], "properties": {"deleted": {"const": True}}},
        parameters=_MODEL_ID,
        errors=(400, 404, *_STORED),
    ),
    Operation(
        path="/admin/usage",
        id="usage",
        tag="Administration",
        summary="What was used",
        answer=admin.UsageList,
        also="text/csv",
        query=_USAGE | _ORGANISATION,
        errors=(400, *_STORED),
    ),
    Operation(
        path="/v1/usage",
        id="ownUsage",
        tag="Usage",
        summary="What your organisation used",
        answer=admin.UsageList,
        also="text/csv",
        query=_USAGE,
        errors=(400, 500, 503),
    ),
)
