"""The default model in fp32 against `transformers`: weights, prompt logits and greedy continuations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from syringa.engine.loading.loaded_model import LoadedModel
from syringa.engine.loading.weights import open_weights
from syringa.engine.worker.core import EngineCore
from syringa.modelfiles import describe, locate
from tests.engine.conftest import Driver, drive, request
from tests.reference import reference_model
from tests.tiers import SLOW

pytestmark = pytest.mark.model
LENGTH = 64
TIE = 1e-3  # if the reference's two best logits are closer than this, either token is correct

ALL_PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there was a girl who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "The three laws of thermodynamics state that",
    "1, 2, 4, 8, 16, 32,",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "SELECT name, age FROM people WHERE",
    "La Révolution française commença en 1789 lorsque",
    "Der schnelle braune Fuchs springt über",
    "Q: What is the boiling point of water?\nA:",
    "# Shopping list\n\n- apples\n- bread\n-",
    '{"name": "Alice", "age": 31, "city": "',
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a pirate.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n",
    "import numpy as np\n\nx = np.array([1, 2, 3])\ny =",
    "The mitochondrion is an organelle that",
    "To be, or not to be, that is the question:",
    "日本の首都は",
    "In 1969, Apollo 11 landed on the Moon. The crew, Neil Armstrong, Buzz Aldrin and Michael Collins, " * 3,
    "😀 is an emoji that",
]
PROMPTS = ALL_PROMPTS if SLOW else ALL_PROMPTS[::5]


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's permutation: its row 2 i + j of a head is row j * size / 2 + i in transformers."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            for j in range(2):
                out[head * size + j * size // 2 + i] = rows[head * size + 2 * i + j]
    return out


def test_weights_equal_those_of_the_gguf_file() -> None:
    """Compared with the reader of the `gguf` package, tensor by tensor; the other tests rely on `open_weights`."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    files = locate("default")
    config = describe(files).config
    weights = open_weights(files, config)
    tensors = {tensor.name: tensor for tensor in GGUFReader(files.path).tensors}

    def original(name: str) -> np.ndarray:
        return dequantize(tensors[name].data, tensors[name].tensor_type)

    assert "output.weight" not in tensors
    assert config["tie_word_embeddings"]
    pairs = {"model.norm": "output_norm", "model.embed_tokens": "token_embd"}
    for layer in (0, 13, 29):
        names = {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
        pairs |= {f"model.layers.{layer}.{theirs}": f"blk.{layer}.{mine}" for theirs, mine in names.items()}
    for theirs, mine in pairs.items():
        expected = original(f"{mine}.weight")
        if theirs.endswith("q_proj"):
            expected = unpermute(expected, 9)
        if theirs.endswith("k_proj"):
            expected = unpermute(expected, 3)
        assert np.array_equal(weights(f"{theirs}.weight").numpy(), expected), theirs


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    return [list(tokenizer.encode(text).ids) for text in PROMPTS]


@pytest.fixture(scope="module")
def continuations(reference: Any, load: Callable[[str], LoadedModel], prompts: list[list[int]]) -> list[list[int]]:
    """Return each prompt with our greedy continuation, computed alone."""
    core = EngineCore(load("fp32"), kv_cache_tokens=4096, prefix_caching=False)
    found = []
    for prompt in prompts:
        found.append(prompt + drive(core, [greedy("alone", prompt)])["alone", 0].tokens)
    core.close()
    return found


def greedy(id_: str, prompt: list[int]) -> Any:
    return request(id_, prompt, temperature=0.0, max_tokens=LENGTH)


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def test_prompt_logits_equal_reference(
    reference: Any, engine: Callable[..., EngineCore], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare every prompt position, in chunks and in one batch, by scoring the prompts."""
    seen: list[torch.Tensor] = []

    def collect(item: Any, logits: torch.Tensor, *, vocab_size: int) -> None:
        seen.append(logits.clone())
        item.sequence.prompt_scores += [None] * len(logits)

    monkeypatch.setattr("syringa.engine.worker.core.score_prompt", collect)
    core = engine("fp32")
    worst = 0.0
    for prompt in prompts:
        seen.clear()
        drive(core, [request("a", prompt, max_tokens=1, prompt_logprobs=0)])
        expected = reference_logits(reference, prompt)[:-1]
        worst = max(worst, float((torch.cat(seen) - expected).abs().max() / expected.abs().max()))
    print(f"prompt logits differ by {worst:.1e} of the largest")
    assert worst <= 1e-3


def test_greedy_continuations_equal_reference(
    reference: Any, engine: Callable[..., EngineCore], prompts: list[list[int]], continuations: list[list[int]]
) -> None:
    """The reference reads our tokens in one pass, and must choose the same token at each position up to a tie."""
    driver = Driver(engine("fp32"))
    driver.submit(*(greedy(str(i), prompt) for i, prompt in enumerate(prompts)))
    batched = driver.finish()
    compared = 0
    for i, (prompt, alone) in enumerate(zip(prompts, continuations, strict=True)):
        logits = reference_logits(reference, alone[:-1])[len(prompt) - 1 :]
        best = logits.topk(2)
        ties = ((best.values[:, 0] - best.values[:, 1]) < TIE).nonzero()
        first_tie = int(ties[0]) if len(ties) else LENGTH
        compared += first_tie
        expected = best.indices[:first_tie, 0].tolist()
        assert alone[len(prompt) :][:first_tie] == expected, PROMPTS[i]
        assert batched[str(i), 0].tokens[:first_tie] == expected, PROMPTS[i]
    print(f"{compared} of {len(prompts) * LENGTH} greedy tokens compared")
    assert compared > 0.8 * len(prompts) * LENGTH
