"""Requests with images on the engine: what is counted, cached, shared and refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest
import torch

from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.worker.core import EngineCore
from syringa.errors import ContextLengthExceeded, EngineOverloaded, InvalidRequest
from syringa.types import Grammar, Image
from tests.engine.conftest import Answers, Driver, drive, request
from tests.engine.models.small import SIZES
from tests.engine.models.small import save as save_text_model
from tests.engine.vision.small import Small, picture, prepared, save, tokenizer

RED, BLUE = picture(1, 64, 48), picture(2, 64, 48)
LONG = "A question of some length, to fill a block or two: @ What do you see there, and what is it that you do not?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return save("idefics3", tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return save("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def loaded(model: Small) -> Any:
    return model.load()


@pytest.fixture
def engine(loaded: Any) -> Iterator[Callable[..., EngineCore]]:
    made = []

    def make(limits: Limits | None = None, **options: Any) -> EngineCore:
        text = tokenizer("idefics3").to_str
        made.append(EngineCore(loaded, limits, **({"kv_cache_tokens": 2048, "tokenizer_json": text} | options)))
        return made[-1]

    yield make
    for core in made:
        core.close()


def refusal(core: EngineCore, asked: Any) -> Any:
    """Why a request was refused after it had been taken."""
    driver = Driver(core)
    driver.submit(asked)
    assert driver.finish() == {}
    ((origin, id_, error),) = core.take_refused()
    assert (origin, id_) == (0, asked.id)
    assert core.take_refused() == []
    assert core.pool.free + core.pool.cached == core.pool.total
    return error


def test_the_expanded_prompt_is_counted_and_told_once(engine: Any, model: Small, loaded: Any) -> None:
    core = engine()
    asked = [model.ask("a", LONG, RED, choices=2, max_tokens=3), model.ask("b", "Text.", max_tokens=3)]
    answers = drive(core, asked)
    length = len(prepared(loaded, asked[0])[0][0])
    assert length > len(asked[0].prompt)
    assert [delta.prompt_tokens for delta in answers["a", 0].deltas] == [length, 0, 0]
    assert [delta.prompt_tokens for delta in answers["a", 1].deltas] == [0, 0, 0]
    assert [delta.prompt_tokens for delta in answers["b", 0].deltas] == [0, 0, 0]
    assert core.stats().prompt_tokens == length + len(asked[1].prompt)


def test_prefixes_are_known_by_the_content_of_images(engine: Any, model: Small) -> None:
    core = engine()
    first = drive(core, [model.ask("a", LONG, RED, max_tokens=4)])
    again = drive(core, [model.ask("b", LONG, RED, max_tokens=4)])
    other = drive(core, [model.ask("c", LONG, BLUE, max_tokens=4)])
    low = drive(core, [model.ask("d", LONG, picture(1, 64, 48, detail="low"), max_tokens=4)])

    def cached(answers: Answers) -> int:
        return next(iter(answers.values())).deltas[0].cached_tokens

    length = first["a", 0].deltas[0].prompt_tokens
    text = LONG.index("@") // 16 * 16  # a byte is a token, and <bos> makes up for the rest
    assert [cached(first), cached(again), cached(other), cached(low)] == [0, (length - 1) // 16 * 16, text, text]
    assert first["a", 0].tokens == again["b", 0].tokens
    assert core.arrivals.studio.encoded == 3


def test_a_joint_image_is_reused_with_the_same_answer(gemma: Small) -> None:
    core = EngineCore(gemma.load(), kv_cache_tokens=2048)
    asked = {name: gemma.ask(name, LONG, RED, max_tokens=6) for name in "ab"}
    first, again = drive(core, [asked["a"]]), drive(core, [asked["b"]])
    assert again["b", 0].deltas[0].cached_tokens > LONG.index("@") + 16
    assert first["a", 0].tokens == again["b", 0].tokens
    core.close()


def test_an_image_goes_through_the_tower_once(engine: Any, model: Small) -> None:
    core = engine()
    asked = [model.ask(str(i), f"{i} @ and @", RED, BLUE, max_tokens=2) for i in range(6)]
    drive(core, asked)
    assert core.arrivals.studio.encoded == 2
    assert torch.get_num_threads() == 1  # the tower's threads are its own


def test_preemption_and_small_memory_change_nothing(loaded: Any, model: Small) -> None:
    asked = [model.ask(str(i), f"{i}: {LONG}", picture(i, 40, 40), max_tokens=30) for i in range(4)]
    found = []
    for tokens in (4096, 320):
        core = EngineCore(loaded, Limits(step_tokens=32, max_running=8), kv_cache_tokens=tokens, prefix_caching=False)
        answers = drive(core, asked)
        found.append({key: answer.tokens for key, answer in answers.items()})
        preempted = core.stats().preemptions
        core.close()
    assert preempted
    assert found[0] == found[1]


def test_pictures_are_freed_with_their_requests(engine: Any, model: Small) -> None:
    core = engine()
    core.arrivals.studio.store.limit = 0
    driver = Driver(core)
    driver.submit(model.ask("a", LONG, RED, max_tokens=5))
    while not core.scheduler.running:
        driver.step()
    assert core.arrivals.studio.store.size > 0
    driver.finish()
    assert core.arrivals.studio.store.size == 0


def test_images_and_grammars_together(engine: Any, model: Small) -> None:
    core = engine()
    colour, broken = Grammar("regex", "(red|blue)"), Grammar("regex", "(unclosed")
    asked = [
        model.ask("a", LONG, RED, grammar=colour, max_tokens=20),
        model.ask("b", LONG, RED, grammar=broken),
    ]
    answers = drive(core, asked)
    assert bytes(answers["a", 0].tokens[:1])  # a byte is a token
    assert tokenizer("").decode(answers["a", 0].tokens) in ("red", "blue")
    assert answers["b", 0].deltas[-1].fault == "grammar"


@pytest.mark.parametrize(("text", "images"), [("none", (RED,)), ("@ @", (RED,)), ("@", ()), ("@", (RED, BLUE))])
def test_places_and_images_must_fit(engine: Any, model: Small, text: str, images: tuple[Image, ...]) -> None:
    with pytest.raises(InvalidRequest, match=r"places for \d images and \d came") as caught:
        engine().submit(model.ask("a", text, *images))
    assert caught.value.param == "messages"


BROKEN = {
    "not a file": b"no image at all",
    "cut short": picture(3, 300, 300).data[:500],
    "empty": b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_decoded_is_refused_alone(engine: Any, model: Small, name: str) -> None:
    core = engine()
    error = refusal(core, model.ask("a", "@ @", RED, Image(data=BROKEN[name], digest=b"broken")))
    assert isinstance(error, InvalidRequest)
    assert error.param == "messages"
    assert "cannot be decoded" in error.message
    assert core.arrivals.studio.encoded == 0
    assert len(drive(core, [model.ask("b", "@", RED)])["b", 0].tokens) == 8


def test_too_many_pixels_are_refused(engine: Any, model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.engine.vision.reader.MOST_PIXELS", 1000)
    assert "64 x 48 pixels" in refusal(engine(), model.ask("a", "@", RED)).message


def test_the_context_must_hold_images_and_an_answer(engine: Any, model: Small, loaded: Any) -> None:
    length = len(prepared(loaded, model.ask("a", "@@", RED, BLUE))[0][0])
    size = -(-length // 16) * 16
    fits = "x" * (size - 1 - length)
    core = engine(kv_cache_tokens=size)
    answer = drive(core, [model.ask("a", f"{fits}@@", RED, BLUE, max_tokens=100, stopping={"ignore_eos": True})])[
        "a", 0
    ]
    assert (answer.finish, len(answer.tokens), answer.deltas[0].prompt_tokens) == ("length", 1, size - 1)
    error = refusal(core, model.ask("b", f"{fits}x@@", RED, BLUE))
    assert isinstance(error, ContextLengthExceeded)
    assert (error.param, error.code) == ("messages", "context_length_exceeded")
    assert f"{size} tokens" in error.message


def test_an_image_that_fits_no_context_never_reaches_the_tower(engine: Any, model: Small) -> None:
    core = engine(kv_cache_tokens=16)
    assert isinstance(refusal(core, model.ask("a", "@", RED)), ContextLengthExceeded)
    assert core.arrivals.studio.encoded == 0


def test_a_failing_tower_ends_one_request(engine: Any, model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine()

    def fail(_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(core.arrivals.studio, "_encode", fail)
    answers = drive(core, [model.ask("a", "@", RED, choices=2), model.ask("b", "Text.")])
    for choice in range(2):
        delta = answers["a", choice].deltas[-1]
        assert (delta.finish, delta.fault) == ("error", "engine")
        assert "out of luck" in (delta.error or "")
    assert answers["b", 0].finish == "length"


def test_others_go_on_while_the_tower_works(engine: Any, model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine()
    encode = core.arrivals.studio._encode

    goes_on = Event()

    def slow(frame: Any) -> Any:
        goes_on.wait(60)
        return encode(frame)

    monkeypatch.setattr(core.arrivals.studio, "_encode", slow)
    driver = Driver(core)
    driver.submit(
        model.ask("a", "@", RED, max_tokens=1), model.ask("b", "Text.", max_tokens=400, stopping={"ignore_eos": True})
    )
    driver.step(20)
    assert len(driver.answers["b", 0].tokens) == 20
    assert ("a", 0) not in driver.answers
    goes_on.set()
    assert driver.finish()["a", 0].finish


def test_aborting_while_images_are_prepared(engine: Any, model: Small) -> None:
    core = engine()
    for i in range(12):
        core.submit(model.ask(str(i), "@", picture(i, 50, 50)), i % 2)
    assert core.stats().waiting == 12
    core.abort("0", origin=0)
    core.abort_all(1)
    assert core.stats().waiting == 5
    assert {id_ for id_, _ in Driver(core).finish()} == {"2", "4", "6", "8", "10"}


def test_too_many_waiting_are_refused(engine: Any, model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(limits=Limits(max_queue=1))
    core.submit(model.ask("a", "@", RED))
    with pytest.raises(EngineOverloaded):
        core.submit(model.ask("b", "@", RED))
    monkeypatch.setattr("syringa.engine.scheduling.pending.MOST_IMAGE_BYTES", 10)
    core = engine()
    core.submit(model.ask("a", "@", RED))
    with pytest.raises(EngineOverloaded):
        core.submit(model.ask("b", "@", RED))


def test_a_model_that_reads_text_refuses_images(tmp_path: Any) -> None:
    from transformers import AutoConfig

    from syringa.engine.loading.loader import LoadOptions, load_model

    save_text_model(tmp_path, AutoConfig.for_model("gpt2", **SIZES, n_embd=64, n_layer=2, n_head=4, n_positions=256))
    core = EngineCore(load_model(LoadOptions(model=str(tmp_path), dtype="fp32", threads=1)), kv_cache_tokens=256)
    with pytest.raises(InvalidRequest, match="text only") as caught:
        core.submit(request("a", [5, 6], images=(RED,)))
    assert caught.value.param == "messages"
    core.close()


def test_an_aborted_image_is_left_and_another_request_takes_over(
    engine: Any, model: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine()
    studio = core.arrivals.studio
    encode, begun, goes_on, seen = studio._encode, Event(), Event(), []

    def slow(frame: Any) -> Any:
        seen.append(frame)
        begun.set()
        goes_on.wait(60)
        return encode(frame)

    monkeypatch.setattr(studio, "_encode", slow)
    core.submit(model.ask("a", "@", RED))
    assert begun.wait(60)
    core.submit(model.ask("b", "@", RED, max_tokens=2))
    core.abort("a")
    goes_on.set()
    assert {id_ for id_, _ in Driver(core).finish()} == {"b"}
    frames = 4 + 1
    assert frames < len(seen) < 2 * frames
    goes_on.clear()
    core.submit(model.ask("c", "@", BLUE))
    core.abort("c")
    goes_on.set()
    time.sleep(0.2)
    assert studio.encoded == 1
