"""Embedding models and cross-encoders outside the native families, on `transformers`' definitions.

These definitions take batches with padding, so the inputs of a step are run in groups of similar lengths.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from syringa.engine.cpu.native import Kernels
from syringa.engine.embedding.batch import PackedBatch, similar_lengths
from syringa.engine.loading.loaded_model import Progress
from syringa.engine.loading.precision import check_host_memory
from syringa.engine.models.hf.definition import first_line
from syringa.engine.models.hf.int8 import quantize_linears
from syringa.engine.models.hf.model import FOREIGN_ERRORS
from syringa.engine.models.hf.progress import WeightProgress
from syringa.errors import ModelError
from syringa.modelfiles import EmbeddingSpec, ModelFiles

MAX_PADDED_TOKENS = {"cpu": 4096, "cuda": 1 << 16}  # of one call of a model
_MAY_BE_MISSING = ("pooler.", "position_ids")  # what an embedding does not depend on


class PaddedModel:
    """Calls a definition of `transformers` with groups of padded inputs."""

    def __init__(self, model: Any, padding: int, device: torch.device) -> None:
        """`padding`: the token that inputs are padded with."""
        self.model, self.padding, self.device = model, padding, device
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        self._takes_cache = "use_cache" in inspect.signature(model.forward).parameters

    def groups(self, batch: PackedBatch) -> list[tuple[list[int], torch.Tensor, Any]]:
        """Run a batch. Return for each group the indices of its inputs, which tokens are no padding, and the output."""
        lengths: list[int] = batch.lengths.tolist()
        found = []
        for group in similar_lengths(lengths, MAX_PADDED_TOKENS[self.device.type]):
            width = max(lengths[index] for index in group)
            tokens = np.full((len(group), width), self.padding, dtype=np.int64)
            types = np.zeros_like(tokens)
            for row, index in enumerate(group):
                begin, end = batch.starts[index], batch.starts[index + 1]
                tokens[row, : end - begin] = batch.tokens[begin:end]
                types[row, : end - begin] = batch.types[begin:end]
            present = np.arange(width)[None] < np.array([lengths[index] for index in group])[:, None]
            mask = torch.from_numpy(present).to(self.device)
            given: dict[str, Any] = {"attention_mask": mask.long()}
            given["input_ids"] = torch.from_numpy(tokens).to(self.device)
            if self._takes_types:
                given["token_type_ids"] = torch.from_numpy(types).to(self.device)
            if self._takes_cache:
                given["use_cache"] = False
            found.append((group, mask, self.model(**given)))
        return found


class HFEncoder(PaddedModel):
    """A `TokenEncoder`."""

    @torch.inference_mode()
    def encode(self, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden state of each token, fp32."""
        out: torch.Tensor | None = None
        for group, mask, output in self.groups(batch):
            states = output.last_hidden_state[mask].float()
            if out is None:
                out = torch.empty(len(batch.tokens), states.shape[1], device=self.device)
            rows = [np.arange(batch.starts[index], batch.starts[index + 1]) for index in group]
            out[torch.from_numpy(np.concatenate(rows)).to(self.device)] = states
        assert out is not None  # a batch has at least one input
        return out


class HFScorer(PaddedModel):
    """A cross-encoder with its own classifier."""

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return the logits of each input, fp32."""
        results = [(group, output.logits.float()) for group, _, output in self.groups(batch)]
        order = torch.tensor([index for group, _ in results for index in group], device=self.device)
        logits = torch.cat([logits for _, logits in results])
        return torch.empty_like(logits).index_copy_(0, order, logits)


def load_hf_encoder(
    files: ModelFiles,
    spec: EmbeddingSpec,
    dtype: str,
    kernels: Kernels | None,
    device: torch.device,
    progress: Progress | None = None,
) -> tuple[HFEncoder | HFScorer, int]:
    """Load a model, and return it with its number of weights. `progress` gets the number of parameters read.

    Raise `ModelError` with the reason if it cannot be run.
    """
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise ModelError(
            f"{spec.architecture} runs on transformers' definition of it, which is not installed: "
            "pip install 'syringa[models]'"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with WeightProgress(progress).reading():
        model, padding = _load(transformers, files, spec, dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if dtype == "int8":
        assert kernels is not None  # checked by choose_dtype
        quantize_linears(model, kernels)
    model.to(device)
    kind = HFScorer if spec.kind == "score" else HFEncoder
    encoder = kind(model, padding, device)
    _check(encoder, spec)
    return encoder, parameters


def _load(transformers: Any, files: ModelFiles, spec: EmbeddingSpec, dtype: str) -> tuple[Any, int]:
    """Return a loaded definition and the token that it takes for padding."""
    from safetensors import SafetensorError

    half = torch.float32 if dtype == "fp32" else torch.bfloat16
    try:
        config = transformers.AutoConfig.from_pretrained(files.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers and huggingface_hub raise many kinds for a malformed config
        raise ModelError(
            f"{spec.architecture} cannot be run: transformers {transformers.__version__} does not know its type, or "
            f"not with this config: {first_line(error)}"
        ) from None
    auto = transformers.AutoModelForSequenceClassification if spec.kind == "score" else transformers.AutoModel
    model_class = auto._model_mapping.get(type(config), None)
    if model_class is None:
        raise ModelError(f"{spec.architecture} cannot be run: transformers has no such class")
    if isinstance(model_class, (tuple, list)):
        model_class = model_class[0]
    try:
        with torch.device("meta"):
            parameters = sum(each.numel() for each in model_class._from_config(config).parameters())
        check_host_memory(parameters, "fp32" if dtype == "fp32" else "bf16", files.name)
        model, report = model_class.from_pretrained(
            files.path,
            config=config,
            dtype=half,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except ModelError:
        raise
    except (*FOREIGN_ERRORS, OSError, SafetensorError) as error:
        raise ModelError(f"{files.path} cannot be loaded: {first_line(error)}") from None
    # transformers initializes missing tensors randomly.
    missing = sorted(name for name in report["missing_keys"] if not any(each in name for each in _MAY_BE_MISSING))
    if missing:
        raise ModelError(f"{files.path} has no tensor for {missing[0]!r}: the model is incomplete")
    model.eval().requires_grad_(False)
    padding = getattr(config, "pad_token_id", None)
    if padding is None and spec.kind == "score":  # a decoder finds the last token by it
        padding = config.pad_token_id = 0
    return model, padding if isinstance(padding, int) else 0


def _check(encoder: HFEncoder | HFScorer, spec: EmbeddingSpec) -> None:
    """Raise `ModelError` if a definition cannot be called as it is here."""
    from syringa.engine.embedding.batch import pack_inputs

    batch = pack_inputs([[1, 2], [1, 2, 3]])
    try:
        out = encoder.forward(batch) if isinstance(encoder, HFScorer) else encoder.encode(batch)
    except FOREIGN_ERRORS as error:
        raise ModelError(
            f"{spec.architecture} cannot be run: its definition in transformers fails: {first_line(error)}"
        ) from None
    rows = len(batch) if isinstance(encoder, HFScorer) else len(batch.tokens)
    if out.shape[0] != rows or (isinstance(encoder, HFScorer) and out.shape[1] != spec.dimensions):
        raise ModelError(f"{spec.architecture} cannot be run: its output has the shape {list(out.shape)}")
