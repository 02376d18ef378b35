"""Wire types of `/api/create`, `/api/copy` and `/api/delete`, and the configurations of the models that they make."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from syringa.api.decoding import convert
from syringa.api.fields.schema import doc, ignored_field, nullable, object_schema, refused_field
from syringa.api.ollama.common import StreamField, check_template, rename_error
from syringa.api.ollama.options import OptionsField, parameters_to_defaults
from syringa.config import Config, ModelSpec
from syringa.config.specs import INHERITED, PresetMessage
from syringa.errors import InvalidRequest, StartupError
from syringa.prompt.chat.isolated_template import IsolatedTemplate

_NO_FILES = "Files cannot be uploaded: put them on the server, or pull them."
_REFUSED = {
    "files": _NO_FILES,
    "draft_files": _NO_FILES,
    "modelfile": "Send its instructions as fields: `from`, `system`, `parameters`, `messages`, `template`, `license`.",
    "path": _NO_FILES,
    "adapters": "Adapters are not supported.",
    "quantize": "Models are not quantized here: see the setting `dtype`.",
    "quantization": "Models are not quantized here: see the setting `dtype`.",
    "draft_quantize": "Models are not quantized here: see the setting `dtype`.",
    "renderer": "Prompts are rendered by chat templates: see `template`.",
    "parser": "The format of the output is found from the chat template.",
    "remote_host": "Models of other servers are not supported.",
}
_MESSAGE = object_schema(
    ("role", "content"), role={"enum": ["system", "user", "assistant"]}, content={"type": "string"}
)
_TEXT = {"type": "string"}
_STATUSES = ("reading model metadata", "writing manifest", "success")


def _refused(name: str) -> Meta:
    return refused_field(_REFUSED[name], type="null")


class OllamaProgress(msgspec.Struct, kw_only=True):
    """A line of a pull or of a creation. The status of the last one is `success`."""

    status: str
    digest: Annotated[str | UnsetType, doc("Checksum of the file that is downloaded.")] = UNSET
    total: Annotated[int | UnsetType, doc("Bytes of that file.")] = UNSET
    completed: Annotated[int | UnsetType, doc("Bytes of it that are here.")] = UNSET


class OllamaCreateRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/create`."""

    model: Annotated[str | None, doc("Name of the model. One that was created or pulled is replaced.")] = None
    name: Annotated[str | None, doc("Same as `model`, which takes precedence.")] = None
    from_: Annotated[str | None, doc("The model whose files, and what is not given here, the new one has.")] = (
        msgspec.field(default=None, name="from")
    )
    system: Annotated[str | None, doc("System message of conversations that have none.")] = None
    parameters: Annotated[OptionsField, doc("Default options of requests, and `num_ctx`.")] = None
    messages: Annotated[
        list[Annotated[dict[str, Any], Meta(extra_json_schema=_MESSAGE)]] | None,
        doc("Messages before those of every conversation."),
    ] = None
    template: Annotated[str | None, doc("Chat template in Jinja. Go templates are refused.")] = None
    license: Annotated[
        Any,
        doc("Text of the license, or several.", **nullable(_TEXT, {"type": "array", "items": _TEXT})),
    ] = None
    stream: StreamField = None
    requires: Annotated[str | None, ignored_field("Reported as ignored.")] = None
    info: Annotated[dict[str, Any] | None, ignored_field("Reported as ignored.")] = None
    files: Annotated[Any, _refused("files")] = None
    draft_files: Annotated[Any, _refused("draft_files")] = None
    modelfile: Annotated[Any, _refused("modelfile")] = None
    path: Annotated[Any, _refused("path")] = None
    adapters: Annotated[Any, _refused("adapters")] = None
    quantize: Annotated[Any, _refused("quantize")] = None
    quantization: Annotated[Any, _refused("quantization")] = None
    draft_quantize: Annotated[Any, _refused("draft_quantize")] = None
    renderer: Annotated[Any, _refused("renderer")] = None
    parser: Annotated[Any, _refused("parser")] = None
    remote_host: Annotated[Any, _refused("remote_host")] = None


class OllamaCopyRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/copy`."""

    source: Annotated[Annotated[str, Meta(min_length=1)], doc("A model of `/api/tags`.")]
    destination: Annotated[Annotated[str, Meta(min_length=1)], doc("Name of the copy, which has the same files.")]


class OllamaDeleteRequest(msgspec.Struct, kw_only=True):
    """The body of `DELETE /api/delete`."""

    model: Annotated[str | None, doc("A model that was created, copied or pulled. Its files stay.")] = None
    name: Annotated[str | None, doc("Same as `model`, which takes precedence.")] = None


def required_name(model: str | None, name: str | None) -> str:
    """Return the model that a body names, in either field. Raises `InvalidRequest`."""
    if not (found := model or name):
        raise InvalidRequest("model is required", param="model")
    return found


def progress_lines() -> list[OllamaProgress]:
    """Return the lines of a creation, which takes no time to speak of."""
    return [OllamaProgress(status=status) for status in _STATUSES]


def check_create(body: OllamaCreateRequest, ignored: list[str]) -> None:
    """Raise `InvalidRequest` for a field that is refused. Those without effect are appended to `ignored`."""
    for name, reason in _REFUSED.items():
        if getattr(body, name) not in (None, {}, ""):
            raise InvalidRequest(f"{name}: {reason}", param=name)
    if not body.from_:
        raise InvalidRequest("from: expected the model that the new one is made from.", param="from")
    ignored += [name for name in ("requires", "info") if getattr(body, name) is not None]


async def changed_fields(body: OllamaCreateRequest, base: ModelSpec, ignored: list[str]) -> dict[str, Any]:
    """Return the fields of a configuration that a request to create a model sets. Raises `InvalidRequest`."""
    fields: dict[str, Any] = {}
    if body.system is not None:
        fields["system"] = body.system
    if body.messages is not None:
        fields["messages"] = [
            msgspec.to_builtins(convert(each, PresetMessage, path=f"messages[{index}]", ignored=ignored))
            for index, each in enumerate(body.messages)
        ]
    if body.template:
        check_template(body.template)
        try:
            await IsolatedTemplate.open(body.template, {}, "")  # it runs with limits there
        except InvalidRequest as error:
            rename_error(error)
            raise
        fields["template"] = body.template
    if body.license is not None:
        texts = [body.license] if isinstance(body.license, str) else body.license
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise InvalidRequest("license: expected a text or several.", param="license")
        fields["license"] = "\n\n".join(texts)
    if body.parameters:
        fields["defaults"], limit = parameters_to_defaults(body.parameters, base.defaults, ignored)
        if limit:
            fields["context_limit"] = limit
    return fields


def creation_error(error: StartupError) -> InvalidRequest:
    """Return the error for a configuration that is not valid, with the names that its fields have here."""
    param, message = error.param or "", error.message
    if param.startswith("defaults"):
        own = param.replace("defaults", "parameters", 1)
        param, message = own, message.replace(param, own, 1)
    return InvalidRequest(message, param=param or "model")


def copied_fields(base: ModelSpec, config: Config) -> dict[str, Any]:
    """Return the fields of a configuration with the same files and workers as another one.

    Fields that have the values of the settings are left out, so that they follow later changes of these. Names, and
    when the model is loaded, are its own.
    """
    own = ("id", "aliases", "preload", "idle_seconds", "engine", "python", "engine_args")
    if base.engine != "syringa":
        message = f"The model {base.id!r} runs on {base.engine}: it cannot be copied at run time."
        raise InvalidRequest(message, param="from")
    fields = {}
    for field in msgspec.structs.fields(ModelSpec):
        value = getattr(base, field.name)
        usual = getattr(config, field.name) if field.name in INHERITED else None if field.required else field.default
        if field.name not in own and value != usual and value not in ({}, None):
            fields[field.name] = msgspec.to_builtins(value)
    return fields
