"""The description of a model: an entry of `[[models]]`, or one that is added at run time."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.output_formats import ReasoningFormat, ToolCallFormat

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
ReplicaCount = Annotated[int, Meta(ge=1, le=256)]
Price = Annotated[float, Meta(ge=0, le=1e12)]  # finite, so that sums are

Device = Literal["auto", "cpu", "cuda"]
CacheDtype = Literal["auto", "fp8"]
Dtype = Literal["auto", "int8", "bf16", "fp32", "fp8", "gguf"]
EngineName = Literal["syringa", "vllm"]
ToolFormatSetting = Literal["auto", ToolCallFormat]
ReasoningFields = Literal["both", "reasoning", "reasoning_content"]
RequestChatTemplates = Literal["auto", "allow", "refuse"]
ReasoningFormatSetting = Literal["auto", "none", ReasoningFormat]


def doc(text: str) -> Meta:
    return Meta(description=text)


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of a million tokens, in any currency."""

    input: Annotated[Price, doc("Of input tokens.")] = 0.0
    cached_input: Annotated[
        Price | None, doc("Of input tokens found in the prefix cache; default: the price of input.")
    ] = None
    output: Annotated[Price, doc("Of output tokens.")] = 0.0


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas of a model there are while it is loaded."""

    min: Annotated[ReplicaCount, doc("At least.")] = 1
    max: Annotated[ReplicaCount, doc("At most, when requests wait.")] = 1

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}:{self.max}"


class PresetMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is part of every conversation with a model."""

    role: Literal["system", "user", "assistant"]
    content: str


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one model. Those in `INHERITED` default to the server's setting of the same name."""

    id: Annotated[str, doc("Name of the model in requests.")]
    path: Annotated[str, doc("A known model's name, a GGUF file, or a Hugging Face folder.")]
    aliases: Annotated[
        tuple[str, ...],
        doc("Other names of the model in requests. One that ends with * stands for all that begin so, as claude-*."),
    ] = ()
    engine: Annotated[EngineName, doc("Engine that runs the model: Syringa's own or [vLLM](vllm.md).")] = "syringa"
    python: Annotated[
        str, doc("With vLLM: the interpreter of the environment it is installed in, on each node; empty: Syringa's.")
    ] = ""
    engine_args: Annotated[
        dict[str, Any], doc("With vLLM: further engine arguments of it, such as `{tensor_parallel_size = 2}`.")
    ] = {}
    max_model_len: Annotated[
        Count, doc("Maximum tokens of prompt plus output; 0: the model's maximum, or less where memory is short.")
    ] = 0
    dtype: Annotated[Dtype, doc("Data type of the weights.")] = "auto"
    device: Annotated[Device, doc("Device of the model.")] = "auto"
    deterministic: Annotated[bool, doc("Batch-invariant results, on a GPU too.")] = False
    threads: Annotated[Count, doc("CPU threads; 0: chosen for the machine.")] = 0
    kv_cache_tokens: Annotated[Count, doc("Capacity of the KV cache in tokens; 0: sized from memory.")] = 0
    kv_cache_gb: Annotated[
        Annotated[float, Meta(ge=0)], doc("Memory of the KV cache in GiB; 0: chosen automatically.")
    ] = 0.0
    kv_cache_dtype: Annotated[CacheDtype, doc("Data type of the KV cache on a GPU.")] = "auto"
    replicas: Annotated[
        Replicas, doc("Replicas of the model while it is loaded: `{min = 1, max = 3}`, a number, or `MIN:MAX` as text.")
    ] = Replicas()
    chat_template: Annotated[str, doc("File with a chat template; empty: the model's own.")] = ""
    tool_format: Annotated[ToolFormatSetting, doc("Format of the model's tool calls.")] = "auto"
    reasoning_format: Annotated[ReasoningFormatSetting, doc("Format of the model's reasoning.")] = "auto"
    prices: Annotated[Prices | None, doc("Prices of a million tokens: `input`, `cached_input`, `output`.")] = None
    defaults: Annotated[dict[str, Any], doc("Default fields of requests.")] = {}
    system: Annotated[str, doc("System message of conversations that have none.")] = ""
    messages: Annotated[
        tuple[PresetMessage, ...],
        doc("Messages before those of every conversation, each a table with `role` and `content`."),
    ] = ()
    template: Annotated[str, doc("Text of a chat template, instead of a file with one.")] = ""
    license: Annotated[str, doc("Text of the license, shown by Ollama's API.")] = ""
    context_limit: Annotated[
        Count,
        doc(
            "Maximum tokens of prompt plus output, like `max_model_len`, but not known to the worker: models that "
            "differ in it share one. 0: no other limit."
        ),
    ] = 0
    pools: Annotated[
        tuple[str, ...],
        doc("Pools of a cluster in which it may run, the preferred one first; default: any, by their priority."),
    ] = ()
    preload: Annotated[bool | None, doc("Load the model when the server starts; default: only the default model.")] = (
        None
    )
    idle_seconds: Annotated[
        Seconds | None,
        doc("Seconds after which it is unloaded when idle; 0: never. Default: `model_idle`, or 0 if preloaded."),
    ] = None


# Settings that default to the server's setting of the same name.
INHERITED = (
    "max_model_len", "dtype", "device", "deterministic", "threads", "kv_cache_tokens", "kv_cache_gb", "kv_cache_dtype",
    "replicas", "chat_template", "tool_format", "reasoning_format",
)  # fmt: skip
