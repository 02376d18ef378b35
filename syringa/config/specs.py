"""A model as an administrator describes it: an entry of `[[models]]`, or one that was added while the server runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.output_formats import CallFormat, ThoughtFormat

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Price = Annotated[float, Meta(ge=0, le=1e12)]  # not infinite: sums have to make sense

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "int8", "bf16", "fp32", "fp8"]
ToolFormat = Literal["auto", CallFormat]
ReasoningFormat = Literal["auto", "none", ThoughtFormat]


def says(text: str) -> Meta:
    return Meta(description=text)


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Of a million tokens, in whatever currency the admin counts."""

    input: Annotated[Price, says("Of input that is computed.")] = 0.0
    cached_input: Annotated[Price | None, says("Of input that was found in the cache; absent: as other input.")] = None
    output: Annotated[Price, says("Of what the model writes.")] = 0.0


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an administrator may say of a model. What is not said of one is as the setting of the same name says."""

    id: Annotated[str, says("What requests call it.")]
    path: Annotated[str, says("A known model's name, a GGUF file, or a Hugging Face folder.")]
    aliases: Annotated[tuple[str, ...], says("Other names that it answers to.")] = ()
    max_model_len: Annotated[Count, says("Longest prompt plus answer, in tokens; 0: what the model allows.")] = 0
    dtype: Annotated[Dtype, says("Precision of the weights.")] = "auto"
    device: Annotated[Device, says("Where it is computed.")] = "auto"
    deterministic: Annotated[bool, says("The same bytes under any load, on a GPU too.")] = False
    threads: Annotated[Count, says("CPU threads; 0: chosen for the machine.")] = 0
    kv_cache_tokens: Annotated[Count, says("Tokens that the cache holds; 0: sized from memory.")] = 0
    kv_cache_gb: Annotated[Annotated[float, Meta(ge=0)], says("Memory for the cache in GiB; 0: chosen.")] = 0.0
    chat_template: Annotated[str, says("A file with a chat template; empty: the model's own.")] = ""
    tool_format: Annotated[ToolFormat, says("How the model writes calls of tools.")] = "auto"
    reasoning_format: Annotated[ReasoningFormat, says("How the model marks its thoughts.")] = "auto"
    prices: Annotated[Prices | None, says("Of a million tokens: `input`, `cached_input`, `output`.")] = None
    defaults: Annotated[dict[str, Any], says("Fields of a request, for requests that do not say.")] = {}
    preload: Annotated[bool | None, says("Load it when the server starts; absent: only the default model.")] = None
    idle_seconds: Annotated[
        Seconds | None,
        says("Seconds without use after which it is unloaded; 0: never. Absent: `model_idle`, and 0 if preloaded."),
    ] = None


# What a table does not say of these is as the setting of the same name says.
INHERITED = (
    "max_model_len", "dtype", "device", "deterministic", "threads", "kv_cache_tokens", "kv_cache_gb", "chat_template",
    "tool_format", "reasoning_format",
)  # fmt: skip
