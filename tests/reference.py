"""The default model in fp32 under `transformers`, as a reference."""

from __future__ import annotations

from typing import Any

import torch

from syringa.engine.loading.weights import open_weights
from syringa.modelfiles import describe, locate


def reference_model() -> Any:
    """Return the Llama of `transformers` with the weights of the file, whose GGUF reader would take 25 seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    files = locate("default")
    description = describe(files)
    config = {k: v for k, v in description.config.items() if k not in ("architectures", "torch_dtype", "dtype")}
    weights = open_weights(files, description.config)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    model.load_state_dict({name: weights(name) for name in names}, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffer is not a weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model.eval()


@torch.inference_mode()
def token_logprobs(model: Any, texts: list[list[int]]) -> list[list[float]]:
    """Return the log-probability of each token but the first, for several texts in one pass."""
    # Padding comes after a text, which therefore does not attend to it.
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens in texts], batch_first=True)
    logprobs = torch.log_softmax(model(padded).logits[:, :-1], dim=-1)
    found = logprobs.gather(2, padded[:, 1:, None])[:, :, 0].tolist()
    return [row[: len(tokens) - 1] for row, tokens in zip(found, texts, strict=True)]
