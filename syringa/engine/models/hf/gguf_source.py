"""Weights of `transformers`' models from GGUF files: dequantized, or in the file's own blocks (`--dtype gguf`)."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import nn

from syringa.engine.cpu.layers.linear import BlockEmbedding, BlockLinear
from syringa.engine.cpu.native import Kernels
from syringa.engine.loading.gguf_parameters import GgufParameters
from syringa.engine.models.hf.int8 import ROUTERS, HFNativeExperts, HFNativeLinear, expert_biases, is_experts_module
from syringa.errors import ModelError
from syringa.modelfiles import ModelDescription, ModelFiles

EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")


class LazyParameter:
    """A parameter that is read when `transformers` loads it, as it does with slices of safetensors files.

    `lock`: `transformers` reads several at a time, and the compiled kernels, which run on all cores, take one.
    """

    def __init__(self, weights: GgufParameters, name: str, shape: torch.Size, lock: Lock) -> None:
        self.weights, self.name, self.shape, self.lock = weights, name, shape, lock

    def __getitem__(self, index: Any) -> torch.Tensor:
        with self.lock:
            tensor = self.weights(self.name)
        # The converter drops dimensions of size 1.
        return tensor.reshape(self.shape) if [n for n in self.shape if n > 1] == list(tensor.shape) else tensor


class HFBlockEmbedding(nn.Module):
    """`BlockEmbedding` as a drop-in for `nn.Embedding`."""

    def __init__(self, embedding: BlockEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding[tokens.flatten()].view(*tokens.shape, -1)


class GgufSource:
    """The weights of a model in a GGUF file.

    `model` has no weights yet. With `blocks`, layers that the compiled kernels can run on the file's blocks are not
    dequantized: `pack_layers` replaces them.
    """

    def __init__(
        self, files: ModelFiles, description: ModelDescription, model: Any, kernels: Kernels | None, *, blocks: bool
    ) -> None:
        self.weights = GgufParameters(files, description.config, kernels)
        self.parameters: dict[str, torch.Tensor] = model.state_dict()
        self.weights.check_all_used(self.parameters)
        self._check_shapes(files)
        # Names of modules.
        self.linears: dict[str, str] = {}  # with the parameter whose blocks each takes
        self.experts: list[str] = []
        self.embedding: str | None = None
        if blocks:
            self._find_layers(model)

    def _check_shapes(self, files: ModelFiles) -> None:
        """Raise `ModelError` if a tensor has another shape than its parameter: the kernels read blocks unchecked."""
        for name, parameter in self.parameters.items():
            if not self.weights.has(name):
                continue
            found, wanted = ([n for n in shape if n > 1] for shape in (self.weights.shape(name), parameter.shape))
            if found != wanted:
                raise ModelError(f"{files.path}: {name} is {found}, and by the model's config {wanted}")

    def _find_layers(self, model: Any) -> None:
        head = model.get_output_embeddings() if model.config.tie_word_embeddings else None
        embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
        if type(model.get_input_embeddings()) is nn.Embedding and self.weights.blocks(f"{embedding}.weight"):
            self.embedding = embedding
        for name, module in model.named_modules():
            if is_experts_module(module):
                if module.has_gate and self.weights.expert_blocks(name) is not None:
                    self.experts.append(name)
            elif type(module) is nn.Linear and name.rpartition(".")[2] not in ROUTERS:
                parameter = f"{embedding if module is head else name}.weight"
                if self.weights.blocks(parameter) is not None:
                    self.linears[name] = parameter

    def state_dict(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the model's parameters for `from_pretrained`. Those of packed layers are zeros that take no memory."""
        packed = {name for module, name in self.linears.items() if name == f"{module}.weight"}
        packed |= {f"{module}.{name}" for module in self.experts for name in EXPERT_PARAMETERS}
        packed.add(f"{self.embedding}.weight")
        nothing, lock = torch.zeros((), dtype=dtype), Lock()
        found: dict[str, Any] = {}
        for name, tensor in self.parameters.items():
            if name in packed:
                found[name] = nothing.expand(tensor.shape)
            elif self.weights.has(name):
                found[name] = LazyParameter(self.weights, name, tensor.shape, lock)
        return found

    def pack_layers(self, model: Any, kernels: Kernels, advance: Callable[[], None] = lambda: None) -> None:
        """Replace layers of the loaded model by ones with the blocks of the file.

        `advance` is called with each linear layer.
        """
        packed: dict[str, BlockLinear] = {}

        def pack(parameter: str, bias: torch.Tensor | None) -> BlockLinear:
            blocks = self.weights.blocks(parameter)
            assert blocks is not None  # see _find_layers
            packed[parameter] = BlockLinear(kernels, [blocks], bias)
            return packed[parameter]

        for name, parameter in self.linears.items():
            model.set_submodule(name, HFNativeLinear(pack(parameter, model.get_submodule(name).bias)))
            advance()
        if self.embedding is not None:
            parameter = f"{self.embedding}.weight"
            linear = packed.get(parameter) or pack(parameter, None)  # a tied output layer has the same weights
            model.set_submodule(self.embedding, HFBlockEmbedding(BlockEmbedding(linear)))
        for name in self.experts:
            module = model.get_submodule(name)
            module.native_experts = self._pack_experts(module, kernels, name)
            for parameter in EXPERT_PARAMETERS:
                setattr(module, parameter, None)

    def _pack_experts(self, module: Any, kernels: Kernels, name: str) -> HFNativeExperts:
        blocks = self.weights.expert_blocks(name)
        assert blocks is not None  # see _find_layers
        up_biases, down_biases = (expert_biases(module, each, len(blocks["up"])) for each in EXPERT_PARAMETERS)
        pairs = zip(blocks["gate"], blocks["up"], up_biases, strict=True)
        return HFNativeExperts(
            [BlockLinear(kernels, [gate, up], bias) for gate, up, bias in pairs],
            [BlockLinear(kernels, [down], bias) for down, bias in zip(blocks["down"], down_biases, strict=True)],
        )
