"""Vision-language models on the GPU code path, on a CPU with the reference implementations of the kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from syringa.engine.gpu import device as gpu_device
from syringa.engine.gpu.cache import GpuCacheShape
from syringa.engine.gpu.model_runner import GpuModelRunner
from syringa.engine.loading.gpu_model import load_on_gpu
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.models.hf import gpu
from syringa.engine.models.hf.vision import HFVisionLanguageGpuDecoder, largest_tower_inputs
from syringa.engine.sampling.sampler import Sampler
from syringa.engine.sampling.sampler_input import SamplerState, SamplingRow
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.errors import ConfigError
from syringa.modelfiles import describe, locate
from syringa.types import EngineRequest
from tests.engine.conftest import Answers, drive
from tests.engine.execution.test_overlap import SlowDevice
from tests.engine.gpu.tiny_models import nan_filled_cache
from tests.engine.models.tiny_models import difference
from tests.engine.vision import hf_reference
from tests.engine.vision.test_reference import PROMPTS
from tests.engine.vision.tiny_models import FAMILIES, VOCABULARY, TinyVisionModel, make_image, preprocess, run, save
from tests.tiers import slow

# Tiles by row and column; M-RoPE positions; bidirectional attention within an image.
DIFFERENT = ["idefics3", "qwen2_5_vl", "gemma3"]
IMAGES = [make_image(i, *size) for i, size in enumerate([(70, 40), (33, 90), (20, 20), (64, 64), (48, 64)])]
LONG = "A question of some length, to fill a block or two: @ What do you see there, and what is it that you do not?"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyVisionModel]:
    made: dict[str, TinyVisionModel] = {}

    def get(name: str) -> TinyVisionModel:
        if name not in made:
            made[name] = save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_gpu_vision_logits_match_transformers(tiny_model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, in chunks that split images, and token by token; with several images in a step and with none."""
    model = tiny_model(name)
    loaded = model.load_for_gpu()
    assert loaded.gpu is not None
    assert loaded.model is loaded.gpu
    expected = [hf_reference.logits(model, text, *images) for text, images in PROMPTS]
    prompts = preprocess(loaded, *(model.ask("a", text, *images) for text, images in PROMPTS))
    assert [tokens for tokens, _ in prompts] == [tokens for tokens, _ in expected]
    batches = [run(loaded, prompts), run(loaded, prompts, chunk=13), run(loaded, prompts[:1], chunk=1)]
    monkeypatch.setattr(gpu, "MAX_SCORES", 2000)  # the PyTorch path then takes a few rows at a time
    batches.append(run(loaded, prompts))
    for batch in batches:
        for got, (_, wanted) in zip(batch, expected, strict=False):
            assert difference(got, wanted) < 1e-3


def test_bidirectional_attention_reads_no_unwritten_cache(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3")
    loaded = model.load_for_gpu()
    prompts = preprocess(loaded, *(model.ask("a", text, *images) for text, images in PROMPTS))
    expected = run(loaded, prompts, chunk=13)

    monkeypatch.setattr(GpuCacheShape, "allocate", nan_filled_cache)
    for got, wanted in zip(run(loaded, prompts, chunk=13), expected, strict=True):
        assert torch.equal(got, wanted)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def workload(model: TinyVisionModel, seed: int) -> list[EngineRequest]:
    """Return requests with zero to three images, most of them repeated, some with several choices."""
    rng = random.Random(seed)
    requests = []
    for i in range(12):
        images = [rng.choice(IMAGES) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        words = ["Now, " * rng.randint(0, 6), *(f"@{' or' * rng.randint(0, 4)}" for _ in images), " what?"]
        options = {
            "seed": seed + i,
            "max_tokens": rng.randint(1, 40),
            "choices": rng.choice([1, 1, 3]),
            "stopping": {"ignore_eos": True, "stop_tokens": frozenset(rng.sample(range(VOCABULARY), 6))},
        }
        requests.append(model.ask(str(i), "".join(words), *images, **(options | rng.choice(KINDS))))
    return requests


def assert_same_answers(loaded: LoadedModel, requests: list[EngineRequest], found: Answers, expected: Answers) -> None:
    """Assert equal tokens, but for at most one draw that the last bits of the logits decide."""
    assert found.keys() == expected.keys()
    differ = []
    for key, one in expected.items():
        assert found[key].deltas[0].prompt_tokens == one.deltas[0].prompt_tokens
        if (found[key].tokens, found[key].finish) != (one.tokens, one.finish):
            differ.append(key)
            continue
        for a, b in zip(found[key].logprobs, one.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    assert len(differ) <= 1
    for key in differ:
        tokens, other = expected[key].tokens, found[key].tokens
        at = next(i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b)
        request = next(each for each in requests if each.id == key[0])
        ((prompt, images),) = preprocess(loaded, request)
        logits = run(loaded, [(prompt + tokens[:at], images)])[0][-1]
        row = SamplingRow(SamplerState(request.sampling, request.prompt, tokens[:at]), key[1], at)
        noise = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(0))
        rounded = logits + 1e-5 * noise
        assert {tokens[at], other[at]} <= set(Sampler(VOCABULARY).sample(rounded, [row] * 64).tokens)


def answer(core: EngineCore, requests: list[EngineRequest]) -> list[Answers]:
    """Run the requests twice; the second time, their prefixes are cached."""
    answers = [drive(core, requests), drive(core, requests)]
    stats = core.stats()
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    core.close()
    return answers


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
@pytest.mark.parametrize("name", [*DIFFERENT, "llava"])
def test_tokens_match_synchronous_execution(tiny_model: Any, name: str, seed: int) -> None:
    """On the CPU with and without async scheduling, and on the GPU code path; with split images and preemption."""
    model = tiny_model(name)
    limits, room = SchedulerLimits(step_tokens=40, max_running=9), {"kv_cache_tokens": 416}
    requests = workload(model, seed)
    here, there = model.load(), model.load_for_gpu()
    plain = EngineCore(here, limits, **room)
    ahead = EngineCore(here, limits, **room)
    device = SlowDevice(ahead)
    ahead.use_runner(device)
    placed = EngineCore(there, limits, **room)
    assert placed.runner
    assert isinstance(placed.runner, GpuModelRunner)
    expected, again = answer(plain, requests)
    assert_same_answers(here, requests, again, expected)
    for core in (ahead, placed):
        for found in answer(core, requests):
            assert_same_answers(here, requests, found, expected)
        assert core.stats().preemptions
    assert device.max_pending > 1
    assert not len(placed.runner.input_batch)


@pytest.mark.parametrize("name", DIFFERENT)
def test_prefix_cache_reuses_prefix_with_images(tiny_model: Any, name: str) -> None:
    model = tiny_model(name)
    core = EngineCore(model.load_for_gpu(), kv_cache_tokens=2048)
    first, again, other = (
        drive(core, [model.ask(id_, LONG, image, max_tokens=6)])[id_, 0]
        for id_, image in (("a", IMAGES[0]), ("b", IMAGES[0]), ("c", IMAGES[4]))
    )
    core.close()
    assert again.deltas[0].cached_tokens > LONG.index("@") + 9
    assert again.tokens == first.tokens
    assert 0 < other.deltas[0].cached_tokens < LONG.index("@") + 16


def test_cached_prompt_that_ends_with_image_token_matches_cpu(tiny_model: Any) -> None:
    """The step adds one token to the sequence, but cannot be replayed from a CUDA graph."""
    model = tiny_model("llava")
    answers = []
    for loaded in (model.load(), model.load_for_gpu()):
        core = EngineCore(loaded, kv_cache_tokens=512)
        answers += [drive(core, [model.ask("a", "@", IMAGES[0], max_tokens=6)])["a", 0] for _ in range(2)]
        core.close()
    assert [answer.deltas[0].cached_tokens for answer in answers] == [0, 16, 0, 16]
    assert answers[0].deltas[0].prompt_tokens == 17
    assert all(answer.tokens == answers[0].tokens for answer in answers)


def test_tower_out_of_memory_ends_only_its_request(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llava")
    loaded = model.load_for_gpu()
    assert loaded.gpu is not None
    decoder: Any = loaded.gpu.decoder
    assert isinstance(decoder, HFVisionLanguageGpuDecoder)

    def fail(**_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation.")

    core = EngineCore(loaded, kv_cache_tokens=1024)
    with monkeypatch.context() as patch:
        patch.setattr(decoder.model, "get_image_features", fail)
        answers = drive(core, [model.ask("a", "@", IMAGES[0]), model.ask("b", "Text.", max_tokens=4)])
    delta = answers["a", 0].deltas[-1]
    assert (delta.finish, delta.error_kind) == ("error", "engine")
    assert delta.error == "The GPU has no memory left to encode this image: try again later."
    assert len(answers["b", 0].tokens) == 4
    assert len(drive(core, [model.ask("c", "@", IMAGES[0], max_tokens=4)])["c", 0].tokens) == 4
    core.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_largest_tower_inputs_bounds_every_image(tiny_model: Any, name: str) -> None:
    loaded = tiny_model(name).load_for_gpu()
    assert loaded.vision is not None
    reader = loaded.vision.reader
    most = largest_tower_inputs(reader, 512)["pixel_values"].numel()
    for image in (*IMAGES, make_image(1, 400, 60), make_image(2, 300, 310)):
        assert max(inputs["pixel_values"].numel() for inputs in reader.read(image).tower_inputs) <= most
    if reader.family.mrope:  # 30 tokens of 2 x 2 patches, or as many tokens as the context has
        assert largest_tower_inputs(reader, 512)["image_grid_thw"].prod() == 30 * 4
        assert largest_tower_inputs(reader, 9)["image_grid_thw"].prod() == 9 * 4


def test_bf16_logits_are_close_to_fp32(tiny_model: Any) -> None:
    model = tiny_model("qwen2_5_vl")
    loaded = model.load_for_gpu("bf16")
    text, images = PROMPTS[1]
    prompts = preprocess(loaded, model.ask("a", text, *images))
    expected = hf_reference.logits(model, text, *images)[1]
    error = run(loaded, prompts)[0] - expected
    assert float(error.norm() / expected.norm()) < 0.06


def test_gpu_loader_returns_vision_components(tiny_model: Any) -> None:
    model = tiny_model("gemma3")
    files = locate(str(model.folder))
    options = LoadOptions(model=str(model.folder), device="cuda")
    loaded = load_on_gpu(options, files, describe(files), torch.device("cpu"), None)
    assert loaded.info.dtype == "bf16"
    core = EngineCore(loaded, kv_cache_tokens=512)
    answer = drive(core, [model.ask("a", "@ and @", *IMAGES[:2], max_tokens=5)])["a", 0]
    core.close()
    assert len(answer.tokens) == 5
    assert answer.deltas[0].prompt_tokens > 32


def test_loader_refuses_fp8_before_reading_files(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_device, "gpu_unavailable_reason", lambda: None)
    with pytest.raises(ConfigError, match=r"^LlavaFor\w+ runs on transformers' definition .* has no fp8: use --dtype"):
        load_model(LoadOptions(model=str(tiny_model("llava").folder), dtype="fp8"))
