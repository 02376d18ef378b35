from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.types import EngineDelta, Grammar
from tests.engine.conftest import Driver, drive, request

pytestmark = pytest.mark.model
Make = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def encode(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer.encode(text).ids)


def all_blocks_are_free(core: EngineCore) -> bool:
    stats = core.stats()
    idle = not core.busy and stats.running == stats.waiting == 0
    return idle and stats.blocks_free + stats.blocks_cached == stats.blocks_total


def test_greedy_completion_is_correct(engine: Make, encode: Any, tokenizer: Any) -> None:
    answers = drive(engine(), [request("a", encode("The capital of France is"), temperature=0.0, max_tokens=4)])
    assert "Paris" in tokenizer.decode(answers["a", 0].tokens)
    assert answers["a", 0].finish == "length"


def test_choices_share_one_prompt_computation(engine: Make, encode: Any) -> None:
    core = engine()
    prompt = encode("Once upon a time, in a country far away, there lived") * 4
    answers = drive(core, [request("a", prompt, choices=5, max_tokens=6)])
    assert {choice for _, choice in answers} == set(range(5))
    assert all(len(answer.tokens) == 6 and answer.finish == "length" for answer in answers.values())
    assert len({tuple(answer.tokens) for answer in answers.values()}) > 1
    stats = core.stats()
    assert stats.steps == 6
    assert (stats.prompt_tokens, stats.output_tokens, stats.cached_tokens) == (len(prompt), 30, 0)
    assert all_blocks_are_free(core)


def test_cached_prefix_is_reused_and_reported(engine: Make, encode: Any) -> None:
    core = engine()
    prompt = encode("A long and common beginning, word by word, ") * 5
    first = drive(core, [request("a", prompt, max_tokens=2)])
    again = drive(
        core, [request("b", prompt, max_tokens=2, choices=2), request("c", prompt, max_tokens=2, use_cache=False)]
    )
    whole = (len(prompt) - 1) // 16 * 16
    assert [delta.cached_tokens for delta in first["a", 0].deltas] == [0, 0]
    assert [delta.cached_tokens for delta in again["b", 0].deltas] == [whole, 0]
    assert [delta.cached_tokens for delta in again["b", 1].deltas] == [whole, 0]
    assert [delta.cached_tokens for delta in again["c", 0].deltas] == [0, 0]
    assert core.stats().cached_tokens == whole


def test_abort_frees_blocks_at_once(engine: Make, encode: Any) -> None:
    core = engine(limits=SchedulerLimits(max_running=4))
    driver = Driver(core)
    driver.submit(*(request(name, encode("A story about") * 9, choices=2, max_tokens=50) for name in "abc"))
    driver.step(3)
    assert core.stats().running == 4
    assert core.stats().waiting == 1
    core.abort("a")
    core.abort("c")  # still waiting
    core.abort("unknown")
    assert (core.stats().running, core.stats().waiting) == (2, 0)
    seen = len(driver.answers["a", 0].deltas)
    core.abort("b", choice=1)
    driver.step(2)
    assert core.stats().running == 1
    assert len(driver.answers["a", 0].deltas) == seen
    core.abort("b")
    assert all_blocks_are_free(core)
    assert ("c", 0) not in driver.answers


def test_requests_of_clients_are_separate(engine: Make, encode: Any) -> None:
    core = engine()
    for client_id in (1, 2):
        core.submit(request("same id", encode("Hello"), max_tokens=50), client_id)
    assert sorted(client_id for client_id, _ in core.step()) == [1, 2]
    core.abort_all(1)
    assert [client_id for client_id, _ in core.step()] == [2]
    core.abort("same id", client_id=1)
    assert [client_id for client_id, _ in core.step()] == [2]
    core.abort_all(2)
    assert all_blocks_are_free(core)


def test_prompt_logprobs_are_the_model_logprobs(engine: Make, encode: Any) -> None:
    prompt = encode("The quick brown fox jumps over the lazy dog. " * 20)  # more than one chunk
    core = engine()
    answers = drive(
        core,
        [request("a", prompt, prompt_logprobs=2, max_tokens=0), request("b", prompt[:40], max_tokens=1, logprobs=2)],
    )
    answer = answers["a", 0]
    assert (answer.tokens, answer.logprobs, answer.finish, len(answer.deltas)) == ([], [], "length", 1)
    scores = answer.deltas[0].prompt_logprobs
    assert scores is not None
    assert len(scores) == len(prompt)
    assert scores[0] is None
    for token, score in zip(prompt[1:], scores[1:], strict=True):
        assert score is not None
        assert score.token == token
        assert len(score.top) == 2
        assert score.top[0][1] >= score.top[1][1]
        assert score.logprob <= score.top[0][1]
    # A request whose prompt ends at a position reports the same log-probabilities.
    assert scores[40] is not None
    assert scores[40].top == answers["b", 0].logprobs[0].top
    # By the end, the model has seen the sentence nineteen times.
    assert sum(score.logprob for score in scores[-10:] if score) > -10.0 > sum(s.logprob for s in scores[1:11] if s)


def test_all_logprobs_sum_to_one(engine: Make, encode: Any) -> None:
    answers = drive(engine(), [request("a", encode("It is"), max_tokens=4, logprobs=49152, temperature=1.5)])
    for score in answers["a", 0].logprobs:
        assert sum(math.exp(logprob) for _, logprob in score.top) == pytest.approx(1, abs=1e-4)
        assert dict(score.top)[score.token] == score.logprob


def test_max_tokens_zero_generates_nothing(engine: Make, encode: Any) -> None:
    core = engine()
    answers = drive(core, [request("a", encode("Only count me."), max_tokens=0, choices=2)])
    assert [(a.tokens, a.finish) for a in answers.values()] == [([], "length")] * 2
    assert core.stats().output_tokens == 0
    assert all_blocks_are_free(core)


def force_token(token: int, **options: Any) -> dict[str, Any]:
    """Return options that make the model generate one token over and over."""
    return {"temperature": 0.0, "logit_bias": {token: 100.0}, **options}


def test_stop_conditions(engine: Make, encode: Any) -> None:
    prompt = encode("Hello")
    end = {"end_tokens": frozenset({2})}
    answers = drive(
        engine(),
        [
            request("end", prompt, **force_token(2), stopping=end),
            request("ignored", prompt, **force_token(2), stopping={**end, "ignore_eos": True}),
            request("stop", prompt, **force_token(77), stopping={**end, "stop_tokens": frozenset({77})}),
            request("least", prompt, **force_token(2), stopping={**end, "min_tokens": 3}),
        ],
    )
    found = {id_: (a.tokens, a.finish, a.deltas[-1].stop_token) for (id_, _), a in answers.items()}
    assert found["end"] == ([2], "stop", 2)
    assert found["ignored"] == ([2] * 8, "length", None)
    assert found["stop"] == ([77], "stop", 77)
    tokens, reason, stop = found["least"]
    assert len(tokens) == 4
    assert 2 not in tokens[:3]
    assert (tokens[3], reason, stop) == (2, "stop", 2)


def test_generation_ends_at_context_length(engine: Make, encode: Any) -> None:
    core = engine(kv_cache_tokens=48)
    prompt = (encode("word ") * 48)[:40]
    answers = drive(core, [request("a", prompt, max_tokens=1000), request("b", (prompt * 2)[:48], max_tokens=5)])
    assert answers["a", 0].finish == answers["b", 0].finish == "length"
    assert len(answers["a", 0].tokens) == 8
    assert len(answers["b", 0].tokens) == 1  # the cache is full, but its last row predicts one more
    with pytest.raises(InvalidRequest, match="48 fit"):
        core.submit(request("c", (prompt * 2)[:49]))


@pytest.mark.parametrize(("prompt", "message"), [([], "no tokens"), ([1, 49152], "vocabulary"), ([-1], "vocabulary")])
def test_submit_rejects_invalid_prompts(engine: Make, prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine().submit(request("a", prompt))


def test_submit_raises_engine_overloaded_when_queue_is_full(engine: Make, encode: Any) -> None:
    core = engine(limits=SchedulerLimits(max_queue=2))
    for name in "ab":
        core.submit(request(name, encode("Hello")))
    with pytest.raises(EngineOverloaded):
        core.submit(request("c", encode("Hello")))
    answers = Driver(core).finish()
    assert {name for name, _ in answers} == {"a", "b"}
    assert all_blocks_are_free(core)


def test_grammar_failures_affect_only_their_request(engine: Make, encode: Any, tokenizer: Any) -> None:
    core = engine()
    color = Grammar("regex", "(red|green|blue)")
    schema = Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}))
    ends = {"end_tokens": core.loaded.description.end_tokens}
    answers = drive(
        core,
        [
            request("color", encode("The sky is"), grammar=color, choices=3, stopping=ends, temperature=1.5),
            request("list", encode("[true,"), grammar=schema, max_tokens=30, stopping=ends),
            request("bad", encode("Hello"), grammar=Grammar("regex", "(unclosed"), choices=2),
            request("stuck", encode("Hello"), grammar=color, logit_bias=dict.fromkeys(range(49152), -math.inf)),
            request("free", encode("Hello"), max_tokens=5),
        ],
    )
    for choice in range(3):
        answer = answers["color", choice]
        text = tokenizer.decode([t for t in answer.tokens if t not in ends["end_tokens"]])
        assert (text in ("red", "green", "blue"), answer.finish) == (True, "stop")
    booleans = json.loads(tokenizer.decode([t for t in answers["list", 0].tokens if t not in ends["end_tokens"]]))
    assert len(booleans) <= 2
    assert all(isinstance(item, bool) for item in booleans)
    for choice in range(2):
        delta = answers["bad", choice].deltas[-1]
        assert delta.finish == "error"
        assert delta.error
    assert answers["stuck", 0].finish == "error"
    assert answers["stuck", 0].deltas[-1].error
    assert len(answers["free", 0].tokens) == 5
    for name in ("list", "free"):  # a delta between the first and the last has nothing but its token
        for delta in answers[name, 0].deltas[1:-1]:
            assert len(delta.tokens) == 1
            assert delta == EngineDelta(delta.request_id, 0, delta.tokens)
    assert all_blocks_are_free(core)


def test_expensive_grammar_fails_without_stalling_others(engine: Make, encode: Any) -> None:
    core = engine(kv_cache_tokens=32_768)
    driver = Driver(core)
    expensive = Grammar("lark", 'start: e\ne: e e e | e e | /[a-z]/ | " "')
    ends = {"end_tokens": core.loaded.description.end_tokens}
    driver.submit(request("stream", encode("Hello"), max_tokens=60, stopping={"ignore_eos": True}))
    driver.submit(request("expensive", encode("Hello"), grammar=expensive, choices=64, max_tokens=40, stopping=ends))
    longest = 0.0
    while core.busy or core.stats().waiting:
        started = time.process_time()
        driver.step()
        longest = max(longest, time.process_time() - started)
    answers = driver.answers
    assert len(answers["stream", 0].tokens) == 60
    last = [answers["expensive", choice].deltas[-1] for choice in range(64)]
    assert {delta.finish for delta in last} == {"error"}
    assert all("too" in (delta.error or "") and delta.error_kind == "grammar" for delta in last)
    assert longest < 3, "without a time budget it takes 8 s"
    assert all_blocks_are_free(core)


def test_abort_while_grammar_compiles(engine: Make, encode: Any) -> None:
    core = engine()
    core.submit(request("a", encode("Hello"), grammar=Grammar("regex", "[a-z]{3,400}x")))
    assert core.stats().waiting == 1
    core.abort("a")
    assert core.stats().waiting == 0
    assert Driver(core).finish() == {}


def test_engine_without_tokenizer_rejects_grammars(engine: Make, encode: Any) -> None:
    core = engine(tokenizer_json=None)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        core.submit(request("a", encode("Hello"), grammar=Grammar("regex", "a")))


def test_nan_logits_fail_only_their_request(engine: Make, encode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine()
    forward = core.loaded.model.forward

    def broken(step: Any, cache: Any) -> torch.Tensor:
        logits = forward(step, cache).clone()
        logits[0] = math.nan
        return logits

    monkeypatch.setattr(core.loaded.model, "forward", broken)
    driver = Driver(core)
    driver.submit(request("a", encode("Hello")), request("b", encode("Hello")))
    driver.step()
    assert driver.answers["a", 0].finish == "error"
    assert "probabilities" in (driver.answers["a", 0].deltas[0].error or "")
    assert driver.answers["b", 0].finish is None
    monkeypatch.undo()
    assert driver.finish()["b", 0].finish == "length"


def test_stats(engine: Make, encode: Any) -> None:
    core = engine(kv_cache_tokens=160)
    driver = Driver(core)
    driver.submit(request("a", encode("Hello there, ") * 5, max_tokens=3), request("b", encode("Hi"), max_tokens=9))
    assert (core.stats().waiting, core.stats().running) == (2, 0)
    driver.step()
    stats = core.stats()
    assert (stats.waiting, stats.running, stats.steps) == (0, 2, 1)
    assert (stats.blocks_total, stats.block_size) == (10, 16)
    assert stats.blocks_free == 10 - 1 - math.ceil(len(encode("Hello there, ") * 5) / 16)
    assert stats.step_seconds > 0
    driver.finish()
    stats = core.stats()
    assert (stats.steps, stats.output_tokens) == (9, 12)
    assert sum(stats.token_gaps.counts) == 10  # all tokens but the first of each sequence
    assert stats.token_gaps.sum > 0
    assert sum(stats.step_tokens.counts) == 9
    assert stats.step_tokens.sum == stats.prompt_tokens + 10
    assert (stats.max_length, stats.prefix_caching) == (160, True)
    assert all_blocks_are_free(core)


def test_suspects_are_computed_alone_and_their_deltas_are_held(engine: Make, encode: Any) -> None:
    core = engine()
    running: list[list[bytes]] = []
    core.record_running = lambda fingerprints: running.append(sorted(fingerprints))
    driver = Driver(core)
    driver.submit(request("a", encode("One two"), max_tokens=9, fingerprint=b"a"))
    driver.step(2)
    suspects = [
        request(name, encode(f"Three {name}"), max_tokens=4, fingerprint=name.encode(), isolation="start")
        for name in ("b", "c")
    ]
    driver.submit(*suspects)
    assert core.stats().waiting == 2
    driver.step(2)
    assert running == [[b"a"], [b"a"], [b"b"], [b"c"]]
    assert {id_ for id_, _ in driver.answers} == {"a"}  # a crash of "c" would lose nothing that "b" has sent
    assert len(driver.answers["a", 0].tokens) == 2
    driver.step()
    assert running[4] == [b"a", b"b", b"c"]
    assert [len(driver.answers[name, 0].tokens) for name in "abc"] == [3, 2, 2]
    answers = dict(driver.finish())
    assert all_blocks_are_free(core)
    alone = drive(engine(), [request(name, encode(f"Three {name}"), max_tokens=4) for name in ("b", "c")])
    assert [answers[name, 0].tokens for name in "bc"] == [alone[name, 0].tokens for name in "bc"]


def test_held_deltas_are_sent_when_the_last_suspect_is_aborted(engine: Make, encode: Any) -> None:
    core = engine()
    driver = Driver(core)
    driver.submit(*(request(name, encode("One"), max_tokens=1, isolation="start") for name in ("a", "b")))
    driver.step()
    assert not driver.answers
    core.abort("b")
    assert driver.finish()["a", 0].finish == "length"
    assert all_blocks_are_free(core)


def test_token_rules_hold_for_every_choice_and_beside_a_grammar(engine: Make, encode: Any, tokenizer: Any) -> None:
    digits = frozenset(encode("0123456789"))
    word = tuple(encode(" 2 3"))
    rules = {"allowed_tokens": digits | set(word), "bad_words": ((encode("1")[0],), word), "choices": 3}
    grammar = Grammar("regex", "[0-5]{4}")
    answers = drive(
        engine(tokenizer_json=tokenizer.to_str),
        [
            request("free", encode("Count: 1 2 3 1 2 3"), max_tokens=12, **rules),
            request("grammar", encode("Count: 1 2 3"), max_tokens=12, grammar=grammar, **rules),
            request("impossible", encode("Count"), allowed_tokens=digits, grammar=Grammar("regex", "[a-z]+")),
            request("none", encode("Count"), allowed_tokens=frozenset({7}), bad_words=((7,),)),
        ],
    )
    for (name, _), answer in answers.items():
        if name in ("free", "grammar"):
            assert answer.finish == ("length" if name == "free" else "stop")
            assert set(answer.tokens) <= rules["allowed_tokens"] - {encode("1")[0]}  # type: ignore[operator]
            pairs = zip(answer.tokens, answer.tokens[1:], answer.tokens[2:], strict=False)
            assert word not in list(pairs)
    assert {len(answers["grammar", choice].tokens) for choice in range(3)} == {4}
    failed = [answers[name, 0].deltas[-1] for name in ("impossible", "none")]
    assert [(delta.finish, delta.error_kind) for delta in failed] == [("error", "grammar"), ("error", "no_token")]
    assert all(delta.error is not None and "allowed_token_ids" in delta.error for delta in failed)


def test_waiting_requests_of_a_tenant_start_by_priority(engine: Make, encode: Any) -> None:
    driver = Driver(engine(limits=SchedulerLimits(max_running=1)))
    prompt = encode("Once")
    driver.submit(*(request(f"p{priority}", prompt, max_tokens=1, priority=priority) for priority in (2, 0, -1, 1)))
    order: list[str] = []
    while driver.core.busy:
        driver.step()
        order += [name for name, _ in driver.answers if name not in order]
    assert order == ["p-1", "p0", "p1", "p2"]
