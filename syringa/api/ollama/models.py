"""Wire types of `/api/tags`, `/api/ps` and `/api/show`, and the descriptions of models in them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.schema import doc, ignored_field
from syringa.api.models.served_model import ModelCard, ServedModel
from syringa.api.ollama.common import shown_name, timestamp
from syringa.api.ollama.files import ModelFileFacts, OllamaModelDetails
from syringa.api.ollama.options import defaults_to_parameters
from syringa.config import ModelSpec
from syringa.prompt.tokens.fim import find_fim_format

_NEVER = 100 * 365.25 * 86400.0  # seconds until a model leaves memory that is never unloaded
# Ollama's names of capabilities, by those of `/v1/models`.
_CAPABILITIES = {"completion": "completion", "vision": "vision", "reasoning": "thinking", "embedding": "embedding"}

NameField = Annotated[str, doc("Id of the model, with a tag.")]
DigestField = Annotated[str, doc("Changes with the model's files; not a checksum of their content.")]
CapabilitiesField = Annotated[
    list[str], doc("Any of `completion`, `tools`, `insert`, `vision`, `thinking`, `embedding`.")
]


class OllamaModelEntry(msgspec.Struct, kw_only=True):
    """A model of `/api/tags`."""

    name: NameField
    model: NameField
    modified_at: Annotated[str, doc("In RFC 3339.")]
    size: Annotated[int, doc("Bytes of the model's files.")]
    digest: DigestField
    details: OllamaModelDetails
    capabilities: CapabilitiesField


class OllamaModelList(msgspec.Struct):
    models: list[OllamaModelEntry]


class OllamaRunningModel(msgspec.Struct, kw_only=True):
    """A model of `/api/ps`, which is in memory."""

    name: NameField
    model: NameField
    size: Annotated[int, doc("Bytes of the model's files.")]
    digest: DigestField
    details: OllamaModelDetails
    expires_at: Annotated[str, doc("When the model leaves memory if it is not used, in RFC 3339.")]
    size_vram: Annotated[int, doc("Bytes in the memory of GPUs: 0, or `size`.")]
    context_length: int


class OllamaRunningModels(msgspec.Struct):
    models: list[OllamaRunningModel]


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/show`."""

    model: Annotated[str | None, doc("A model of `/api/tags`.")] = None
    name: Annotated[str | None, doc("Same as `model`, which takes precedence.")] = None
    verbose: Annotated[
        bool | None, ignored_field("Vocabularies are not returned, see `/tokenizer_info`. Reported if true.")
    ] = None
    system: Annotated[str | None, ignored_field("Reported as ignored.")] = None
    template: Annotated[str | None, ignored_field("Reported as ignored.")] = None
    options: Annotated[dict[str, Any] | None, ignored_field("Reported as ignored.")] = None


class OllamaShownMessage(msgspec.Struct):
    role: str
    content: str


class OllamaShowResponse(msgspec.Struct, kw_only=True):
    license: Annotated[str | UnsetType, doc("Absent if it is not known.")] = UNSET
    modelfile: Annotated[str, doc("The instructions that make this model from its parent.")]
    parameters: Annotated[str, doc("A line for each parameter.")]
    template: Annotated[str, doc("The chat template, in Jinja; empty if there is none.")]
    system: Annotated[str | UnsetType, doc("Absent if there is none.")] = UNSET
    messages: Annotated[list[OllamaShownMessage] | UnsetType, doc("Absent if there are none.")] = UNSET
    details: OllamaModelDetails
    model_info: Annotated[dict[str, Any], doc("In the names of GGUF metadata.")]
    capabilities: CapabilitiesField
    modified_at: Annotated[str, doc("In RFC 3339.")]


def list_entry(card: ModelCard, facts: ModelFileFacts) -> OllamaModelEntry:
    name = shown_name(card.id)
    found = [_CAPABILITIES[each] for each in card.capabilities or () if each in _CAPABILITIES]
    return OllamaModelEntry(
        name=name,
        model=name,
        modified_at=timestamp(facts.modified_at or card.created),
        size=facts.size,
        digest=facts.digest,
        details=facts.details,
        capabilities=[*found, *(["tools"] if "chat" in (card.capabilities or ()) else [])],
    )


def running_entry(
    card: ModelCard, facts: ModelFileFacts, *, idle_seconds: float, idle_timeout: float, on_gpu: bool
) -> OllamaRunningModel:
    """Describe a model in memory. `idle_timeout`: the idle seconds after which it is unloaded; 0: never."""
    name = shown_name(card.id)
    left = min(max(0.0, idle_timeout - idle_seconds), _NEVER) if idle_timeout else _NEVER
    return OllamaRunningModel(
        name=name,
        model=name,
        size=facts.size,
        digest=facts.digest,
        details=facts.details,
        expires_at=timestamp(time.time() + left),
        size_vram=facts.size if on_gpu else 0,
        context_length=card.max_model_len or 0,
    )


def show_model(model: ServedModel, spec: ModelSpec | None, facts: ModelFileFacts) -> OllamaShowResponse:
    """Describe one model. `spec`: its configuration, if it can be changed at run time."""
    parameters = defaults_to_parameters(model.defaults, spec.context_limit if spec is not None else 0)
    template = model.template.source if model.template is not None else ""
    messages = [OllamaShownMessage(each["role"], each["content"]) for each in model.preset_messages]
    info = facts.info or {"general.architecture": model.architecture}
    return OllamaShowResponse(
        license=(spec.license if spec is not None else "") or UNSET,
        modelfile=_modelfile(model, spec, parameters, messages),
        parameters="\n".join(f"{name:<30} {_quoted(each)}" for name, each in _lines(parameters)),
        template=template,
        system=model.system or UNSET,
        messages=messages or UNSET,
        details=facts.details,
        model_info=info | {f"{info['general.architecture']}.context_length": model.max_model_len},
        capabilities=_capabilities(model),
        modified_at=timestamp(facts.modified_at or model.created),
    )


def _capabilities(model: ServedModel) -> list[str]:
    if model.kind != "generate":
        return ["embedding"] if model.kind == "embed" else []
    flags = {
        "completion": True,
        "tools": model.template is not None,  # those that the template does not describe are described before it
        "insert": find_fim_format(model.tokenizer) is not None,
        "vision": model.supports_images,
        "thinking": model.formats.reasoning is not None,
    }
    return [name for name, able in flags.items() if able]


def _modelfile(
    model: ServedModel, spec: ModelSpec | None, parameters: Mapping[str, Any], messages: list[OllamaShownMessage]
) -> str:
    lines = [f"# To build a new model based on this one:\nFROM {shown_name(model.id)}"]
    if spec is not None and spec.template:
        lines.append(f'TEMPLATE """{spec.template}"""')
    if model.system:
        lines.append(f'SYSTEM """{model.system}"""')
    lines += [f"PARAMETER {name} {_quoted(value)}" for name, value in _lines(parameters)]
    lines += [f"MESSAGE {each.role} {json.dumps(each.content, ensure_ascii=False)}" for each in messages]
    if spec is not None and spec.license:
        lines.append(f'LICENSE """{spec.license}"""')
    return "\n".join(lines) + "\n"


def _lines(parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return parameters with one value each: those that are lists are repeated."""
    listed = [(name, value if isinstance(value, list) else [value]) for name, value in parameters.items()]
    return [(name, each) for name, values in listed for each in values]


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
