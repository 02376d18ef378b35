"""Requests with images on the engine: token counts, caching, sharing and refusal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import msgspec
import pytest
import torch

from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.vision.preprocessor import MAX_CONCURRENT_REQUESTS
from syringa.engine.worker.core import EngineCore
from syringa.errors import ContextLengthExceeded, EngineOverloaded, InvalidRequest
from syringa.types import Grammar, Image, ResumedChoice
from tests.engine.conftest import Answers, Driver, drive, request
from tests.engine.models.tiny_models import SIZES
from tests.engine.models.tiny_models import save as save_text_model
from tests.engine.vision.tiny_models import TinyVisionModel, make_image, preprocess, save, tokenizer
from tests.engine.worker.resuming import cut_answer, join_answers, resume

RED, BLUE = make_image(1, 64, 48), make_image(2, 64, 48)
LONG = "A question of some length, to fill a block or two: @ What do you see there, and what is it that you do not?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyVisionModel:
    return save("idefics3", tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> TinyVisionModel:
    return save("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def loaded(model: TinyVisionModel) -> Any:
    return model.load()


@pytest.fixture
def engine(loaded: Any) -> Iterator[Callable[..., EngineCore]]:
    made = []

    def make(limits: SchedulerLimits | None = None, **options: Any) -> EngineCore:
        text = tokenizer("idefics3").to_str
        made.append(EngineCore(loaded, limits, **({"kv_cache_tokens": 2048, "tokenizer_json": text} | options)))
        return made[-1]

    yield make
    for core in made:
        core.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def refusal(core: EngineCore, request: Any) -> Any:
    """Submit a request and return the error with which it is refused afterwards."""
    driver = Driver(core)
    driver.submit(request)
    assert driver.finish() == {}
    ((client_id, id_, error),) = core.take_refused()
    assert (client_id, id_) == (0, request.id)
    assert core.take_refused() == []
    assert core.pool.free + core.pool.cached == core.pool.total
    return error


def test_expanded_prompt_is_counted_and_reported_once(engine: Any, model: TinyVisionModel, loaded: Any) -> None:
    core = engine()
    requests = [model.ask("a", LONG, RED, choices=2, max_tokens=3), model.ask("b", "Text.", max_tokens=3)]
    answers = drive(core, requests)
    length = len(preprocess(loaded, requests[0])[0][0])
    assert length > len(requests[0].prompt)
    assert [delta.prompt_tokens for delta in answers["a", 0].deltas] == [length, 0, 0]
    assert [delta.prompt_tokens for delta in answers["a", 1].deltas] == [0, 0, 0]
    assert [delta.prompt_tokens for delta in answers["b", 0].deltas] == [0, 0, 0]
    assert core.stats().prompt_tokens == length + len(requests[1].prompt)


@pytest.mark.parametrize("family", ["model", "gemma"], ids=["idefics3", "gemma3"])
def test_counted_prompt_is_neither_encoded_nor_computed(family: str, request: pytest.FixtureRequest) -> None:
    model: TinyVisionModel = request.getfixturevalue(family)
    core = EngineCore(model.load(), kv_cache_tokens=2048)
    whole = model.ask("whole", LONG + LONG, RED, BLUE, max_tokens=2)
    before, after = (msgspec.structs.replace(whole, id=id, count_only=True) for id in ("before", "after"))
    (counted,) = drive(core, [before])["before", 0].deltas
    assert core.pending.image_preprocessor is not None
    assert core.pending.image_preprocessor.encoded_images == 0
    assert (core.stats().prompt_tokens, core.stats().steps) == (0, 0)
    assert (counted.tokens, counted.finish) == ([], "length")
    first, *_ = drive(core, [whole])["whole", 0].deltas
    assert counted.prompt_tokens == first.prompt_tokens > len(whole.prompt)
    (again,) = drive(core, [after])["after", 0].deltas  # from the cache
    assert again.prompt_tokens == counted.prompt_tokens
    core.close()


def test_counted_prompt_with_a_broken_image_is_refused(engine: Any, model: TinyVisionModel) -> None:
    broken = msgspec.structs.replace(RED, data=RED.data[:100], digest=b"broken")
    asked = msgspec.structs.replace(model.ask("a", "@", broken), count_only=True)
    assert "cannot be decoded" in refusal(engine(), asked).message


def test_prefix_cache_depends_on_image_content(engine: Any, model: TinyVisionModel) -> None:
    core = engine()
    first = drive(core, [model.ask("a", LONG, RED, max_tokens=4)])
    again = drive(core, [model.ask("b", LONG, RED, max_tokens=4)])
    other = drive(core, [model.ask("c", LONG, BLUE, max_tokens=4)])
    low = drive(core, [model.ask("d", LONG, make_image(1, 64, 48, detail="low"), max_tokens=4)])

    def cached(answers: Answers) -> int:
        return next(iter(answers.values())).deltas[0].cached_tokens

    length = first["a", 0].deltas[0].prompt_tokens
    text = LONG.index("@") // 16 * 16  # a byte is a token, and <bos> makes up for the rest
    assert [cached(first), cached(again), cached(other), cached(low)] == [0, (length - 1) // 16 * 16, text, text]
    assert first["a", 0].tokens == again["b", 0].tokens
    assert core.pending.image_preprocessor.encoded_images == 3


def test_bidirectional_image_is_reused_from_prefix_cache_with_same_output(gemma: TinyVisionModel) -> None:
    core = EngineCore(gemma.load(), kv_cache_tokens=2048)
    requests = {name: gemma.ask(name, LONG, RED, max_tokens=6) for name in "ab"}
    first, again = drive(core, [requests["a"]]), drive(core, [requests["b"]])
    assert again["b", 0].deltas[0].cached_tokens > LONG.index("@") + 16
    assert first["a", 0].tokens == again["b", 0].tokens
    core.close()


@pytest.mark.parametrize("family", ["model", "gemma"], ids=["idefics3", "gemma3"])
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_request_with_images_is_resumed(family: str, caching: bool, request: pytest.FixtureRequest) -> None:
    """Placeholders are expanded as before, with tokens behind them; penalties go on applying to the text."""
    model: TinyVisionModel = request.getfixturevalue(family)
    options: dict[str, Any] = {
        "choices": 2,
        "max_tokens": 12,
        "repetition_penalty": 1.3,
        "stopping": {"ignore_eos": True},
    }
    whole = model.ask("a", LONG, RED, **options)
    core = EngineCore(model.load(), kv_cache_tokens=2048, prefix_caching=caching)
    expected = drive(core, [whole])
    parts = {choice: cut_answer(expected["a", choice], cut) for choice, cut in enumerate((4, 9))}
    answers = drive(core, [resume(whole, parts)])
    for choice, part in parts.items():
        joined = join_answers(part, answers["a", choice])
        assert (joined.tokens, joined.finish) == (expected["a", choice].tokens, "length")
        assert not any(delta.prompt_tokens or delta.cached_tokens for delta in answers["a", choice].deltas)
    assert core.pending.image_preprocessor is not None
    assert core.pending.image_preprocessor.encoded_images == 1
    assert core.stats().prompt_tokens == expected["a", 0].deltas[0].prompt_tokens
    core.close()


def test_resumed_request_whose_images_leave_no_room_is_refused(engine: Any, model: TinyVisionModel) -> None:
    core = engine()
    length = drive(core, [model.ask("a", LONG, RED, max_tokens=1)])["a", 0].deltas[0].prompt_tokens
    core = engine(kv_cache_tokens=-(-length // 16) * 16 + 16)
    room = core.max_length - length
    fits = msgspec.structs.replace(model.ask("a", LONG, RED, max_tokens=99), resumed=(ResumedChoice([5] * (room - 1)),))
    assert len(drive(core, [fits])["a", 0].tokens) == 1
    too_long = msgspec.structs.replace(fits, resumed=(ResumedChoice([5] * room),))
    assert isinstance(refusal(core, too_long), ContextLengthExceeded)


def test_preprocessor_encodes_each_image_once(engine: Any, model: TinyVisionModel) -> None:
    core = engine()
    requests = [model.ask(str(i), f"{i} @ and @", RED, BLUE, max_tokens=2) for i in range(6)]
    drive(core, requests)
    assert core.pending.image_preprocessor.encoded_images == 2
    assert torch.get_num_threads() == 1  # the tower has its own thread count


def test_image_cache_is_not_shared_between_tenants(engine: Any, model: TinyVisionModel) -> None:
    """A tenant could otherwise find out by the time to the first token which images others have sent."""
    core = engine()
    asked = [
        model.ask(str(index), LONG, RED, max_tokens=3, tenant=key, cache_key=key.encode())
        for index, key in enumerate("abab")
    ]
    answers = [drive(core, [each])[each.id, 0] for each in asked]
    cached = [answer.deltas[0].cached_tokens for answer in answers]
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] > 0
    assert core.pending.image_preprocessor.encoded_images == 2
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    drive(core, [model.ask(key, "@", BLUE, max_tokens=1, tenant=key, cache_key=key.encode()) for key in "ab"])
    assert core.pending.image_preprocessor.encoded_images == 4


def test_preemption_does_not_change_output(loaded: Any, model: TinyVisionModel) -> None:
    requests = [model.ask(str(i), f"{i}: {LONG}", make_image(i, 40, 40), max_tokens=30) for i in range(4)]
    found = []
    for tokens in (4096, 320):
        core = EngineCore(
            loaded, SchedulerLimits(step_tokens=32, max_running=8), kv_cache_tokens=tokens, prefix_caching=False
        )
        answers = drive(core, requests)
        found.append({key: answer.tokens for key, answer in answers.items()})
        preempted = core.stats().preemptions
        core.close()
    assert preempted
    assert found[0] == found[1]


def test_images_are_freed_with_their_requests(engine: Any, model: TinyVisionModel) -> None:
    core = engine()
    core.pending.image_preprocessor.cache.limit = 0
    driver = Driver(core)
    driver.submit(model.ask("a", LONG, RED, max_tokens=5))
    while not core.scheduler.running:
        driver.step()
    assert core.pending.image_preprocessor.cache.size > 0
    driver.finish()
    assert core.pending.image_preprocessor.cache.size == 0


def test_images_and_grammar_in_one_request(engine: Any, model: TinyVisionModel) -> None:
    core = engine()
    color, broken = Grammar("regex", "(red|blue)"), Grammar("regex", "(unclosed")
    requests = [
        model.ask("a", LONG, RED, grammar=color, max_tokens=20),
        model.ask("b", LONG, RED, grammar=broken),
    ]
    answers = drive(core, requests)
    assert bytes(answers["a", 0].tokens[:1])  # a byte is a token
    assert tokenizer("").decode(answers["a", 0].tokens) in ("red", "blue")
    assert answers["b", 0].deltas[-1].error_kind == "grammar"


@pytest.mark.parametrize(("text", "images"), [("none", (RED,)), ("@ @", (RED,)), ("@", ()), ("@", (RED, BLUE))])
def test_submit_refuses_placeholder_count_mismatch(
    engine: Any, model: TinyVisionModel, text: str, images: tuple[Image, ...]
) -> None:
    with pytest.raises(InvalidRequest, match=r"has \d image placeholders, but the request has \d images") as caught:
        engine().submit(model.ask("a", text, *images))
    assert caught.value.param == "messages"


BROKEN = {
    "not a file": b"no image at all",
    "cut short": make_image(3, 300, 300).data[:500],
    "empty": b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_undecodable_image_refuses_only_its_request(engine: Any, model: TinyVisionModel, name: str) -> None:
    core = engine()
    error = refusal(core, model.ask("a", "@ @", RED, Image(data=BROKEN[name], digest=b"broken")))
    assert isinstance(error, InvalidRequest)
    assert error.param == "messages"
    assert "cannot be decoded" in error.message
    assert core.pending.image_preprocessor.encoded_images == 0
    assert len(drive(core, [model.ask("b", "@", RED)])["b", 0].tokens) == 8


def test_reader_refuses_too_many_pixels(engine: Any, model: TinyVisionModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.engine.vision.image_reader.MAX_PIXELS", 1000)
    assert "64 x 48 pixels" in refusal(engine(), model.ask("a", "@", RED)).message


def test_context_must_fit_images_and_one_output_token(engine: Any, model: TinyVisionModel, loaded: Any) -> None:
    length = len(preprocess(loaded, model.ask("a", "@@", RED, BLUE))[0][0])
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


def test_image_larger_than_context_is_refused_before_encoding(engine: Any, model: TinyVisionModel) -> None:
    core = engine(kv_cache_tokens=16)
    assert isinstance(refusal(core, model.ask("a", "@", RED)), ContextLengthExceeded)
    assert core.pending.image_preprocessor.encoded_images == 0


def test_tower_failure_ends_only_its_request(
    engine: Any, model: TinyVisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine()

    def fail(_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(core.pending.image_preprocessor, "_encode", fail)
    answers = drive(core, [model.ask("a", "@", RED, choices=2), model.ask("b", "Text.")])
    for choice in range(2):
        delta = answers["a", choice].deltas[-1]
        assert (delta.finish, delta.error_kind) == ("error", "engine")
        assert "out of luck" in (delta.error or "")
    assert answers["b", 0].finish == "length"


def test_other_requests_progress_while_tower_runs(
    engine: Any, model: TinyVisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine()
    encode = core.pending.image_preprocessor._encode

    proceed = Event()

    def slow(inputs: Any) -> Any:
        proceed.wait(60)
        return encode(inputs)

    monkeypatch.setattr(core.pending.image_preprocessor, "_encode", slow)
    driver = Driver(core)
    driver.submit(
        model.ask("a", "@", RED, max_tokens=1), model.ask("b", "Text.", max_tokens=400, stopping={"ignore_eos": True})
    )
    driver.step(20)
    assert len(driver.answers["b", 0].tokens) == 20
    assert ("a", 0) not in driver.answers
    proceed.set()
    assert driver.finish()["a", 0].finish


def test_abort_while_images_are_preprocessed(engine: Any, model: TinyVisionModel) -> None:
    core = engine()
    for i in range(12):
        core.submit(model.ask(str(i), "@", make_image(i, 50, 50)), i % 2)
    assert core.stats().waiting == 12
    core.abort("0", client_id=0)
    core.abort_all(1)
    assert core.stats().waiting == 5
    assert {id_ for id_, _ in Driver(core).finish()} == {"2", "4", "6", "8", "10"}


def test_submit_refuses_when_image_queue_is_full(
    engine: Any, model: TinyVisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(limits=SchedulerLimits(max_queue=1))
    core.submit(model.ask("a", "@", RED))
    with pytest.raises(EngineOverloaded):
        core.submit(model.ask("b", "@", RED))
    monkeypatch.setattr("syringa.engine.scheduling.pending.MAX_IMAGE_BYTES", 10)
    core = engine()
    core.submit(model.ask("a", "@", RED))
    with pytest.raises(EngineOverloaded):
        core.submit(model.ask("b", "@", RED))


def test_text_model_refuses_images(tmp_path: Any) -> None:
    from transformers import AutoConfig

    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.engine.loading.loader import load_model

    save_text_model(tmp_path, AutoConfig.for_model("gpt2", **SIZES, n_embd=64, n_layer=2, n_head=4, n_positions=256))
    core = EngineCore(load_model(LoadOptions(model=str(tmp_path), dtype="fp32", threads=1)), kv_cache_tokens=256)
    with pytest.raises(InvalidRequest, match="text only") as caught:
        core.submit(request("a", [5, 6], images=(RED,)))
    assert caught.value.param == "messages"
    core.close()


def test_aborted_encoding_is_taken_over_by_waiting_request(
    engine: Any, model: TinyVisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine()
    image_preprocessor = core.pending.image_preprocessor
    encode, started, proceed, seen = image_preprocessor._encode, Event(), Event(), []

    def slow(inputs: Any) -> Any:
        seen.append(inputs)
        started.set()
        proceed.wait(60)
        return encode(inputs)

    monkeypatch.setattr(image_preprocessor, "_encode", slow)
    core.submit(model.ask("a", "@", RED))
    assert started.wait(60)
    core.submit(model.ask("b", "@", RED, max_tokens=2))
    core.abort("a")
    proceed.set()
    assert {id_ for id_, _ in Driver(core).finish()} == {"b"}
    tiles = 4 + 1
    assert tiles < len(seen) < 2 * tiles
    proceed.clear()
    core.submit(model.ask("c", "@", BLUE))
    core.abort("c")
    proceed.set()
    time.sleep(0.2)
    assert image_preprocessor.encoded_images == 1


def test_images_of_background_requests_are_encoded_last(
    engine: Any, model: TinyVisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine()
    preprocessor = core.pending.image_preprocessor
    encode, begun, proceed, order = preprocessor._encode_image, Event(), Event(), []

    def record(image: Any, image_hash: bytes, canceled: Event, *, background: bool) -> Any:
        order.append(background)
        begun.set()
        assert proceed.wait(60)
        return encode(image, image_hash, canceled, background=background)

    monkeypatch.setattr(preprocessor, "_encode_image", record)
    driver = Driver(core)
    for number in range(8):
        driver.submit(model.ask(f"batch {number}", "@", make_image(number, 40, 40), max_tokens=1, background=True))
    assert begun.wait(60)
    driver.submit(model.ask("interactive", "@", make_image(9, 40, 40), max_tokens=1))
    wait_until(lambda: False in order)  # on a thread that batches leave, while theirs are held
    assert len(order) <= MAX_CONCURRENT_REQUESTS // 2 + 1
    proceed.set()
    assert len(driver.finish()) == 9


def test_tower_runs_for_background_requests_last(
    engine: Any, model: TinyVisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine()
    tower = core.pending.image_preprocessor._tower
    submit, begun, proceed, order = tower.submit, Event(), Event(), []

    def record(tenant: str, work: Callable[[], Any], *, background: bool) -> Any:
        def run() -> Any:
            begun.set()
            assert proceed.wait(60)
            order.append(background)
            return work()

        return submit(tenant, run, background=background)

    monkeypatch.setattr(tower, "submit", record)
    driver = Driver(core)
    for number in range(4):
        driver.submit(model.ask(f"batch {number}", "@", make_image(number, 40, 40), max_tokens=1, background=True))
    assert begun.wait(60)
    driver.submit(model.ask("interactive", "@", BLUE, max_tokens=1))
    wait_until(lambda: len(tower._queues) == 2)  # of both classes
    proceed.set()
    assert len(driver.finish()) == 5
    assert order[:2] == [True, False]  # the first one was running


def test_images_of_background_requests_keep_no_interactive_request_waiting(engine: Any, model: TinyVisionModel) -> None:
    core = engine()
    preprocessor = core.pending.image_preprocessor
    driver = Driver(core)
    driver.submit(model.ask("batch", LONG, RED, max_tokens=200, background=True, stopping={"ignore_eos": True}))
    while not core.scheduler.running:
        driver.step()
    preprocessor.cache.limit = 0  # all of it is pinned
    driver.submit(model.ask("waits", "@", BLUE, max_tokens=1, background=True))
    driver.submit(model.ask("interactive", "@", make_image(3, 40, 40), max_tokens=1))
    wait_until(lambda: core.pending.any_done)
    while ("interactive", 0) not in driver.answers:
        driver.step()
    assert ("waits", 0) not in driver.answers
    assert driver.answers["batch", 0].finish is None
    answers = driver.finish()
    assert {id for id, _ in answers} == {"batch", "waits", "interactive"}
