"""Corrupt quantized folders, of dense, sparse and hybrid models, and how they are loaded as on a GPU."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from syringa.engine.gpu import device as gpu_device
from syringa.engine.loading.gpu_model import load_on_gpu
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.models.config import read_config
from syringa.engine.models.tensor_shapes import tensor_shapes
from syringa.modelfiles import describe, locate
from tests.engine.loading.quantized_folders import LAYOUTS, Tensors, quantize_tensors
from tests.engine.models.tiny_models import SIZES, save_tokenizer

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
# Model types with the flags of their configs, and the layout of their linear layers; "": only the experts, in MXFP4.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", {}, "gptq act-order"),
    "qwen2": ("Qwen2ForCausalLM", {}, "awq"),
    "qwen3": ("Qwen3ForCausalLM", {}, "fp8 blocks"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", EXPERTS | {"num_experts": 3}, "compressed"),
    "glm4_moe": ("Glm4MoeForCausalLM", EXPERTS | {"n_routed_experts": 3, "n_shared_experts": 1}, "fp8 channel"),
    "gpt_oss": ("GptOssForCausalLM", {"num_experts_per_tok": 2, "num_local_experts": 3, "sliding_window": 8}, ""),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", DELTA_NET, "fp8 blocks"),
}
DTYPES = (torch.float32, torch.float16, torch.int32, torch.uint8, torch.int64, torch.float8_e4m3fn)
FREE_GPU_MEMORY = (1 << 30) + (64 << 20)  # a margin of the check, and little more


class QuantizedFolder(NamedTuple):
    config: dict[str, Any]
    tensors: Tensors


def make_folder(kind: str) -> QuantizedFolder:
    """Return a model with random weights."""
    architecture, flags, layout = MODELS[kind]
    config: dict[str, Any] = SIZES | {"num_hidden_layers": 2, "head_dim": 16, "model_type": kind}
    config |= flags | {"architectures": [architecture], "quantization_config": LAYOUTS.get(layout)}
    if not layout:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    tensors: Tensors = {}
    generator = torch.Generator().manual_seed(0)
    for name, shape in tensor_shapes(read_config(config)).items():
        if name.endswith(("_blocks", "_scales")):
            tensors[name] = torch.randint(100, 128, shape, generator=generator, dtype=torch.uint8)
        elif not name.endswith("g_proj.weight"):  # gates are in the same matrix as queries
            doubled = kind == "qwen3_5_text" and name.endswith("q_proj.weight")
            stored = re.sub(r"linear_attn\.(\w+)_proj", r"linear_attn.in_proj_\1", name).replace(
                "in_proj_out", "out_proj"
            )
            rows = 2 * shape[0] if doubled else shape[0]
            tensors[stored] = torch.randn(rows, *shape[1:], generator=generator) * 0.1
    return QuantizedFolder(config, quantize_tensors(tensors, layout)[0] if layout else tensors)


class CorruptQuantizedFolders:
    """A source of corrupt quantized folders."""

    def __init__(self, folder: Path, choice: random.Random, config_values: tuple[Any, ...]) -> None:
        self.folder, self.choice, self.config_values = folder, choice, config_values
        self.folders = {kind: make_folder(kind) for kind in MODELS}
        folder.mkdir()
        save_tokenizer(folder)

    def write_whole(self, kind: str) -> Path:
        config, tensors = self.folders[kind]
        return self._write(config, save(tensors))

    def write(self) -> tuple[str, Path]:
        """Write a corrupt folder. Return what is wrong with it, and where it is."""
        choice = self.choice
        kind = choice.choice(list(MODELS))
        config, tensors = self.folders[kind]
        match choice.randrange(4):
            case 0:
                what, config = self._corrupt_config(config)
                data = save(tensors)
            case 1:
                data = bytearray(save(tensors))
                at = choice.randrange(int.from_bytes(data[:8], "little") + 8)
                data[at] = choice.randrange(256)
                what = f"byte {at}"
            case _:
                what, tensors = self._corrupt_tensor(tensors)
                data = save(tensors)
        return f"{kind}: {what}", self._write(config, bytes(data))

    def _write(self, config: dict[str, Any], data: bytes) -> Path:
        (self.folder / "model.safetensors").write_bytes(data)
        (self.folder / "config.json").write_text(json.dumps(config))
        return self.folder

    def _corrupt_config(self, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        value = self.choice.choice(self.config_values)
        if self.choice.random() < 0.5:
            quantization = config["quantization_config"]
            key = self.choice.choice(list(quantization))
            return f"quantization {key} is {value!r}", config | {"quantization_config": quantization | {key: value}}
        key = self.choice.choice([key for key in config if key != "max_position_embeddings"])
        return f"{key} is {value!r}", config | {key: value}

    def _corrupt_tensor(self, tensors: Tensors) -> tuple[str, Tensors]:
        choice = self.choice
        name = choice.choice(list(tensors))
        tensor = tensors[name]
        edits: dict[str, Callable[[], torch.Tensor]] = {
            "is a vector": lambda: tensor.flatten(),
            "has one more dimension": lambda: tensor[None],
            "is one number": lambda: tensor.flatten()[0],
            "is empty": lambda: tensor[:0],
            "lost a part": lambda: tensor[: max(1, len(tensor) // 2)] if tensor.dim() else tensor[None],
            "is transposed": lambda: tensor.T if tensor.dim() == 2 else tensor[None, None],
            "has another dtype": lambda: tensor.float().to(choice.choice(DTYPES)),
            "has random bytes": lambda: self._random_bytes(tensor),
        }
        edit = choice.choice(["is missing", *edits])
        others = {each: value for each, value in tensors.items() if each != name}
        if edit == "is missing":
            return f"{name} {edit}", others
        return f"{name} {edit}", others | {name: edits[edit]().contiguous()}

    def _random_bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        found = bytearray(self.choice.randbytes(tensor.nbytes))
        return torch.frombuffer(found, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def load_as_on_gpu(folder: Path) -> LoadedModel:
    """Load a folder with all checks of a GPU with FP8, with the reference operations."""
    files = locate(str(folder))
    return load_on_gpu(LoadOptions(str(folder)), files, describe(files), torch.device("cpu"), None)


def pretend_gpu() -> None:
    """Let this process load models as on a GPU. For processes of their own only."""
    gpu_device.free_memory = lambda device: FREE_GPU_MEMORY
    torch.cuda.get_device_name = lambda device=None: "G"
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
