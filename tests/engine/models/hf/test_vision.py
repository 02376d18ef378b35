"""Image-text models by the contract of the GPU's decoder: on a CPU, by the kernels' references."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from syringa.engine.gpu import device as machine
from syringa.engine.gpu.cache import GpuCacheShape
from syringa.engine.gpu.model_runner import GpuRunner
from syringa.engine.loading import loader
from syringa.engine.loading.loader import LoadedModel, LoadOptions, load_model
from syringa.engine.models.hf import gpu
from syringa.engine.models.hf.vision import SeeingDecoder, largest_frame
from syringa.engine.sampling.sampler import Sampler, SamplerState, SamplingRow
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.worker.core import EngineCore
from syringa.errors import ConfigError
from syringa.modelfiles import describe, locate
from syringa.types import EngineRequest
from tests.engine.conftest import Answers, drive
from tests.engine.execution.test_overlap import SlowDevice
from tests.engine.gpu.small_gpu import poisoned_cache
from tests.engine.models.small import difference
from tests.engine.vision import theirs
from tests.engine.vision.small import FAMILIES, VOCABULARY, Small, picture, prepared, run, save
from tests.engine.vision.test_reference import PROMPTS

# Tiles by rows; positions in the plane; one that has to be computed whole.
DIFFERENT = ["idefics3", "qwen2_5_vl", "gemma3"]
PICTURES = [picture(i, *size) for i, size in enumerate([(70, 40), (33, 90), (20, 20), (64, 64), (48, 64)])]
LONG = "A question of some length, to fill a block or two: @ What do you see there, and what is it that you do not?"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Small]:
    made: dict[str, Small] = {}

    def get(name: str) -> Small:
        if name not in made:
            made[name] = save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(small: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in pieces that cut images, and one by one; with four pictures in a step, and none."""
    model = small(name)
    loaded = model.place()
    assert loaded.gpu is not None
    assert loaded.model is loaded.gpu
    expected = [theirs.logits(model, text, *images) for text, images in PROMPTS]
    ours = prepared(loaded, *(model.ask("a", text, *images) for text, images in PROMPTS))
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in expected]
    batches = [run(loaded, ours), run(loaded, ours, chunk=13), run(loaded, ours[:1], chunk=1)]
    monkeypatch.setattr(gpu, "CELLS", 2000)  # plain PyTorch then takes a few rows at a time
    batches.append(run(loaded, ours))
    for batch in batches:
        for got, (_, wanted) in zip(batch, expected, strict=False):
            assert difference(got, wanted) < 1e-3


def test_an_image_computed_whole_reads_nothing_that_nobody_wrote(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("gemma3")
    loaded = model.place()
    ours = prepared(loaded, *(model.ask("a", text, *images) for text, images in PROMPTS))
    expected = run(loaded, ours, chunk=13)

    monkeypatch.setattr(GpuCacheShape, "allocate", poisoned_cache)
    for got, wanted in zip(run(loaded, ours, chunk=13), expected, strict=True):
        assert torch.equal(got, wanted)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def workload(model: Small, seed: int) -> list[EngineRequest]:
    """Some with text alone, some with up to three images, few of which are new; some of several choices."""
    rng = random.Random(seed)
    asked = []
    for i in range(12):
        images = [rng.choice(PICTURES) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        words = ["Now, " * rng.randint(0, 6), *(f"@{' or' * rng.randint(0, 4)}" for _ in images), " what?"]
        wishes = {
            "seed": seed + i,
            "max_tokens": rng.randint(1, 40),
            "choices": rng.choice([1, 1, 3]),
            "stopping": {"ignore_eos": True, "stop_tokens": frozenset(rng.sample(range(VOCABULARY), 6))},
        }
        asked.append(model.ask(str(i), "".join(words), *images, **(wishes | rng.choice(KINDS))))
    return asked


def check_alike(loaded: LoadedModel, asked: list[EngineRequest], found: Answers, expected: Answers) -> None:
    """Token for token, but for one draw that the last bits of the logits decide."""
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
        request = next(each for each in asked if each.id == key[0])
        ((prompt, pictures),) = prepared(loaded, request)
        logits = run(loaded, [(prompt + tokens[:at], pictures)])[0][-1]
        row = SamplingRow(SamplerState(request.sampling, request.prompt, tokens[:at]), key[1], at)
        noise = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(0))
        rounded = logits + 1e-5 * noise
        assert {tokens[at], other[at]} <= set(Sampler(VOCABULARY).sample(rounded, [row] * 64).tokens)


def answer(core: EngineCore, asked: list[EngineRequest]) -> list[Answers]:
    """Twice: the second time, prefixes are in the cache."""
    answers = [drive(core, asked), drive(core, asked)]
    stats = core.stats()
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    core.close()
    return answers


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*DIFFERENT, "llava"])
def test_tokens_are_those_of_one_step_at_a_time(small: Any, name: str, seed: int) -> None:
    """On the CPU's model with and without lookahead, and on the GPU's; chunks cut images, and blocks run out."""
    model = small(name)
    limits, room = Limits(step_tokens=40, max_running=9), {"kv_cache_tokens": 416}
    asked = workload(model, seed)
    here, there = model.load(), model.place()
    plain = EngineCore(here, limits, **room)
    ahead = EngineCore(here, limits, **room)
    device = SlowDevice(ahead)
    ahead.look_ahead(device)
    placed = EngineCore(there, limits, **room)
    assert placed.ahead
    assert isinstance(placed.ahead.runner, GpuRunner)
    expected, again = answer(plain, asked)
    check_alike(here, asked, again, expected)
    for core in (ahead, placed):
        for found in answer(core, asked):
            check_alike(here, asked, found, expected)
        assert core.stats().preemptions
    assert device.most > 1
    assert not len(placed.ahead.runner.lanes)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_prefix_with_images_is_found_again(small: Any, name: str) -> None:
    model = small(name)
    core = EngineCore(model.place(), kv_cache_tokens=2048)
    first, again, other = (
        drive(core, [model.ask(id_, LONG, image, max_tokens=6)])[id_, 0]
        for id_, image in (("a", PICTURES[0]), ("b", PICTURES[0]), ("c", PICTURES[4]))
    )
    core.close()
    assert again.deltas[0].cached_tokens > LONG.index("@") + 9
    assert again.tokens == first.tokens
    assert 0 < other.deltas[0].cached_tokens < LONG.index("@") + 16


def test_a_prompt_that_ends_with_an_image_and_is_known_but_for_its_last_place(small: Any) -> None:
    """That step adds one token to a sequence, and is none of those that can be recorded."""
    model = small("llava")
    answers = []
    for loaded in (model.load(), model.place()):
        core = EngineCore(loaded, kv_cache_tokens=512)
        answers += [drive(core, [model.ask("a", "@", PICTURES[0], max_tokens=6)])["a", 0] for _ in range(2)]
        core.close()
    assert [answer.deltas[0].cached_tokens for answer in answers] == [0, 16, 0, 16]
    assert answers[0].deltas[0].prompt_tokens == 17
    assert all(answer.tokens == answers[0].tokens for answer in answers)


def test_a_tower_without_memory_ends_one_request(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llava")
    loaded = model.place()
    assert loaded.gpu is not None
    decoder: Any = loaded.gpu.decoder
    assert isinstance(decoder, SeeingDecoder)

    def fail(**_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation.")

    core = EngineCore(loaded, kv_cache_tokens=1024)
    with monkeypatch.context() as patch:
        patch.setattr(decoder.model, "get_image_features", fail)
        answers = drive(core, [model.ask("a", "@", PICTURES[0]), model.ask("b", "Text.", max_tokens=4)])
    delta = answers["a", 0].deltas[-1]
    assert (delta.finish, delta.fault) == ("error", "engine")
    assert delta.error == "The GPU has no memory left to look at this image: try again later."
    assert len(answers["b", 0].tokens) == 4
    assert len(drive(core, [model.ask("c", "@", PICTURES[0], max_tokens=4)])["c", 0].tokens) == 4
    core.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_no_frame_is_larger_than_the_one_that_memory_is_kept_for(small: Any, name: str) -> None:
    loaded = small(name).place()
    assert loaded.vision is not None
    reader = loaded.vision.reader
    most = largest_frame(reader, 512)["pixel_values"].numel()
    for image in (*PICTURES, picture(1, 400, 60), picture(2, 300, 310)):
        assert max(frame["pixel_values"].numel() for frame in reader.read(image).frames) <= most
    if reader.family.planar:  # thirty places of two patches by two; or no more than the context has
        assert largest_frame(reader, 512)["image_grid_thw"].prod() == 30 * 4
        assert largest_frame(reader, 9)["image_grid_thw"].prod() == 9 * 4


def test_bf16_stays_near_fp32(small: Any) -> None:
    model = small("qwen2_5_vl")
    loaded = model.place("bf16")
    text, images = PROMPTS[1]
    ours = prepared(loaded, model.ask("a", text, *images))
    expected = theirs.logits(model, text, *images)[1]
    error = run(loaded, ours)[0] - expected
    assert float(error.norm() / expected.norm()) < 0.06


def test_loading_brings_what_reads_images(small: Any) -> None:
    model = small("gemma3")
    files = locate(str(model.folder))
    options = LoadOptions(model=str(model.folder), device="cuda")
    loaded = loader._load_on_gpu(options, files, describe(files), torch.device("cpu"), None)
    assert loaded.info.dtype == "bf16"
    core = EngineCore(loaded, kv_cache_tokens=512)
    told = drive(core, [model.ask("a", "@ and @", *PICTURES[:2], max_tokens=5)])["a", 0]
    core.close()
    assert len(told.tokens) == 5
    assert told.deltas[0].prompt_tokens > 32


def test_fp8_is_refused_before_anything_is_read(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda: None)
    with pytest.raises(ConfigError, match=r"^LlavaFor\w+ runs on transformers' definition .* has no fp8: use --dtype"):
        load_model(LoadOptions(model=str(small("llava").folder), dtype="fp8"))
