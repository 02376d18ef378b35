"""Tiny vision-language models with random weights, saved as Hugging Face folders, and helpers to run them."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from syringa.engine.execution.batch import build_step_tensors
from syringa.engine.loading.gpu_model import wrap_gpu_model
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.models.hf.model import load_hf_model
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.vision.preprocessor import ImagePreprocessor
from syringa.engine.vision.prompt_images import PromptImages
from syringa.engine.vision.step_images import locate_images
from syringa.modelfiles import describe, locate
from syringa.types import EngineRequest, Image
from tests.engine.conftest import request

TILE_TOKENS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPECIAL = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image_pad": "<|image_pad|>",
    "turn": "<turn>",
}
NEWLINES = ["\n\n", "\n\n\n", "\n\n\n\n"]
GRID_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
PLACEHOLDERS = {"qwen2_vl": GRID_PLACEHOLDER, "qwen2_5_vl": GRID_PLACEHOLDER, "gemma3": "<start_of_image>"}
VOCABULARY = 320


@cache
def tokenizer(family: str) -> Tokenizer:
    """Return a byte-level tokenizer with special tokens; that of Gemma also has tokens of several newlines."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)} | {"ĊĊ": 256}
    made = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, normalized=False) for each in [*SPECIAL.values(), *TILE_TOKENS]])
    if family == "gemma3":
        made.add_tokens([AddedToken(each, normalized=False) for each in NEWLINES])
    assert made.get_vocab_size() <= VOCABULARY
    return made


def id_of(token: str) -> int:
    id_ = tokenizer("").token_to_id(token)
    assert id_ is not None
    return id_


def encode(family: str, text: str) -> list[int]:
    return tokenizer(family).encode(text).ids


TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": id_of("<bos>"),
    "eos_token_id": id_of("<eos>"),
    "pad_token_id": 0,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
TILES = {
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": TOWER,
    "scale_factor": 2,
    "image_token_id": id_of("<image>"),
}
TILE_PROCESSOR = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
SQUARE = {"height": 32, "width": 32}
LLAVA = {"text_config": TEXT | {"model_type": "llama"}, "image_token_index": id_of("<image>")}
PAD = {
    "image_token_id": id_of("<|image_pad|>"),
    "vision_start_token_id": id_of("<|vision_start|>"),
    "vision_end_token_id": id_of("<|vision_end|>"),
    "text_config": TEXT
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
}
GRID_PROCESSOR = {"patch_size": 8, "min_pixels": 16 * 16 * 4, "max_pixels": 16 * 16 * 30}
# name → (model type, config, image processor, its settings)
FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "idefics3": ("idefics3", TILES, "Idefics3ImageProcessor", TILE_PROCESSOR),
    "smolvlm": ("smolvlm", TILES, "SmolVLMImageProcessor", TILE_PROCESSOR),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        PAD
        | {
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "num_heads": 4,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "patch_size": 8,
                "window_size": 32,
                "fullatt_block_indexes": [1],
            }
        },
        "Qwen2VLImageProcessor",
        GRID_PROCESSOR,
    ),
    "qwen2_vl": (
        "qwen2_vl",
        PAD | {"vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 8}},
        "Qwen2VLImageProcessor",
        GRID_PROCESSOR,
    ),
    "llava": (
        "llava",
        LLAVA | {"vision_config": TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}},
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 32}, "crop_size": SQUARE},
    ),
    "llava_siglip": (
        "llava",
        LLAVA
        | {"vision_config": TOWER | {"model_type": "siglip_vision_model"}, "vision_feature_select_strategy": "full"},
        "SiglipImageProcessor",
        {"size": SQUARE},
    ),
    "gemma3": (
        "gemma3",
        {
            "text_config": TEXT
            | {
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "query_pre_attn_scalar": 16,
            },
            "vision_config": TOWER | {"patch_size": 4, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 16,
            "image_token_index": id_of("<image>"),
            "boi_token_index": id_of("<start_of_image>"),
            "eoi_token_index": id_of("<end_of_image>"),
        },
        "Gemma3ImageProcessor",
        {"size": SQUARE},
    ),
}


def make_image(number: int, width: int, height: int, kind: str = "PNG", detail: Any = "auto") -> Image:
    """Return an image of coarse noise, different for each number."""
    dots = np.random.default_rng(number).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(dots).resize((width, height), Pillow.Resampling.BICUBIC).save(file, kind)
    return Image(data=file.getvalue(), digest=hashlib.sha256(file.getvalue()).digest(), detail=detail)


def open_pixels(image: Image) -> Any:
    return Pillow.open(io.BytesIO(image.data)).convert("RGB")


@dataclass
class TinyVisionModel:
    """A saved model, and the same model as loaded by transformers."""

    name: str
    folder: Path
    hf_model: Any
    processor: Any

    @property
    def placeholder(self) -> str:
        return PLACEHOLDERS.get(self.name, "<image>")

    def load(self, dtype: str = "fp32", **options: Any) -> LoadedModel:
        options = {"threads": 1, "device": "cpu"} | options
        return load_model(LoadOptions(model=str(self.folder), dtype=dtype, **options))

    def load_for_gpu(self, dtype: str = "fp32") -> LoadedModel:
        """Load for the GPU code path, on a CPU with the reference implementations of the kernels."""
        files = locate(str(self.folder))
        description = describe(files)
        found = load_hf_model(files, description, dtype, None, description.max_model_len, 1, torch.device("cpu"))
        assert found.gpu is not None
        return wrap_gpu_model(found.gpu, description, found.parameters, dtype, 0.0, 1, found.vision)

    def ask(self, id_: str, text: str, *images: Image, **options: Any) -> EngineRequest:
        """Return a request. `@` in `text` is replaced by the image placeholder."""
        prompt = encode(self.name, "<bos>" + text.replace("@", self.placeholder))
        return request(id_, prompt, images=images, **({"temperature": 0.0} | options))


def save(name: str, folder: Path, **processor: Any) -> TinyVisionModel:
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast

    kind, settings, processor_type, processor_settings = FAMILIES[name]
    config = AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in model.parameters():  # large enough that positions, windows and images change the logits
        wide = parameter.dim() > 1
        parameter.data = torch.randn_like(parameter) * 0.15 if wide else parameter + torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    named = {key: SPECIAL[key] for key in ("bos_token", "eos_token")}
    extra = {key: token for key, token in SPECIAL.items() if key.endswith("_token") and key not in named}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer(name).to_str()), extra_special_tokens=extra, **named
    ).save_pretrained(folder)
    settings = {"image_processor_type": processor_type, **processor_settings, **processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return TinyVisionModel(name, folder, model, AutoImageProcessor.from_pretrained(folder, backend="pil"))


def run(
    loaded: LoadedModel, prompts: list[tuple[list[int], PromptImages | None]], chunk: int = 10**6
) -> list[torch.Tensor]:
    """Return the logits of every token. All prompts run in one batch, in chunks of about `chunk` tokens of each."""
    needed = [-(-len(tokens) // BLOCK_SIZE) for tokens, _ in prompts]
    cache = loaded.cache.allocate(sum(needed))
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = [
        SimpleNamespace(
            tokens=tokens, prompt_images=images, done=0, found=[], block_table=[order.pop() for _ in range(n)]
        )
        for (tokens, images), n in zip(prompts, needed, strict=True)
    ]
    while left := [s for s in sequences if s.done < len(s.tokens)]:
        items: list[Any] = []
        for s in left:
            end = min(s.done + chunk, len(s.tokens))
            end = s.prompt_images.chunk_end(s.done, end) if s.prompt_images else end
            items.append(SimpleNamespace(sequence=s, start=s.done, count=end - s.done))
        counts = [item.count for item in items]
        step = build_step_tensors(items, range(sum(counts)))
        step.images = locate_images(items, step)
        for s, part, count in zip(left, loaded.model.forward(step, cache).split(counts), counts, strict=True):
            s.found.append(part)
            s.done += count
    return [torch.cat(s.found) for s in sequences]


def preprocess(loaded: LoadedModel, *requests: EngineRequest) -> list[tuple[list[int], PromptImages | None]]:
    """Return the expanded prompts and images of requests. Requests without images are returned unchanged."""
    assert loaded.vision is not None
    image_preprocessor = ImagePreprocessor(loaded.vision, 10_000)
    try:
        made = []
        for each in requests:
            expanded, images = image_preprocessor.prepare(each).future.result() if each.images else (each, None)
            made.append((list(expanded.prompt), images))
        return made
    finally:
        image_preprocessor.close()
