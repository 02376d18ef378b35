"""vLLM's request extensions on the real model: each acts. `test_scoring.py` compares log-probabilities and beams."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.client import events
from tests.e2e.server import Server, serve, wait_for

pytestmark = pytest.mark.model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "The capital of France is"
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
PARIS, END = 7042, 2  # the tokens " Paris" and "<|im_end|>"
# A template that reads documents, and one of whose variables lets the model think first.
TEMPLATE = (
    "{% for each in documents or [] %}<|im_start|>system\n{{ each.title }}: {{ each.text }}<|im_end|>\n{% endfor %}"
    "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    settings = ("--chat-template", str(template), "--max-model-len", "4096", "--max-running", "1")
    with serve(*settings) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as http:
        yield http


def post(http: httpx.Client, path: str = COMPLETIONS, /, **body: Any) -> dict[str, Any]:
    default = {"messages": ASKED} if path == CHAT else {"prompt": PROMPT}
    answer = http.post(path, json={**default, "temperature": 0, "max_tokens": 8, **body})
    assert answer.status_code == 200, answer.text
    assert "x-syringa-ignored" not in answer.headers
    found: dict[str, Any] = answer.json()
    return found


def choice(http: httpx.Client, path: str = COMPLETIONS, /, **body: Any) -> dict[str, Any]:
    (found,) = post(http, path, **body)["choices"]
    assert isinstance(found, dict)
    return found


def test_only_allowed_tokens_are_generated(http: httpx.Client) -> None:
    allowed = [PARIS, END, 28, 30]
    for path in (CHAT, COMPLETIONS):
        found = choice(http, path, allowed_token_ids=allowed, temperature=2, return_token_ids=True, ignore_eos=True)
        assert len(found["token_ids"]) == 8
        assert set(found["token_ids"]) <= set(allowed)


def test_bad_words_are_not_generated(http: httpx.Client) -> None:
    plain = choice(http)["text"]
    assert "Paris" in plain
    assert "Paris" not in choice(http, bad_words=["Paris"])["text"]
    assert "Paris" not in choice(http, CHAT, bad_words=["Paris"])["message"]["content"]


def test_stop_reason_and_stop_string_are_returned(http: httpx.Client) -> None:
    found = choice(http, stop=["Paris"])
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == (" ", "stop", "Paris")
    found = choice(http, stop=["Paris"], include_stop_str_in_output=True)
    assert (found["text"], found["stop_reason"]) == (" Paris", "Paris")
    found = choice(http, stop_token_ids=[PARIS], include_stop_str_in_output=True)
    assert (found["text"], found["stop_reason"]) == (" Paris", PARIS)
    assert choice(http, stop_token_ids=[PARIS])["text"] == ""


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, ""),
        ({"skip_special_tokens": False}, "<|im_end|><|im_end|>"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": True}, "<|im_end|> <|im_end|>"),
    ],
)
def test_special_tokens_are_shown(http: httpx.Client, body: dict[str, Any], text: str) -> None:
    special = {"allowed_token_ids": [END], "ignore_eos": True, "max_tokens": 2}
    assert choice(http, **special, **body)["text"] == text
    assert choice(http, CHAT, **special, **body)["message"]["content"] == text


def test_prompt_is_truncated_on_either_side(http: httpx.Client) -> None:
    body = {"echo": True, "max_tokens": 0}
    assert choice(http, **body, truncate_prompt_tokens=2)["text"] == " France is"
    assert choice(http, **body, truncate_prompt_tokens=2, truncation_side="right")["text"] == "The capital"
    usage = post(http, CHAT, truncate_prompt_tokens=5)["usage"]
    assert usage["prompt_tokens"] == 5


def test_special_tokens_of_the_tokenizer_are_added(http: httpx.Client) -> None:
    """The tokenizer of SmolLM2 adds none, so that both prompts are the same."""
    found = [choice(http, add_special_tokens=each, return_token_ids=True) for each in (True, False)]
    assert found[0]["prompt_token_ids"] == found[1]["prompt_token_ids"]


def test_length_penalty_changes_the_rank_of_beams(http: httpx.Client) -> None:
    body = {"prompt": "Question: Which season comes after winter?\nAnswer:", "use_beam_search": True, "n": 3}
    body |= {"temperature": None, "max_tokens": 12, "return_token_ids": True}
    short, long = (post(http, **body, length_penalty=each)["choices"][0]["token_ids"] for each in (-5.0, 5.0))
    assert len(short) < len(long)


def test_waiting_request_with_the_lower_priority_value_runs_first(server: Server, http: httpx.Client) -> None:
    """The server's log has the order in which they ended: threads of a test may wake up in any other."""

    def run(name: str, priority: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "priority": priority}
        http.post(COMPLETIONS, json=body, headers={"x-request-id": name})

    def ended() -> list[str]:
        return re.findall(r"syringa\.access: POST \S+ 200 .*\[(first|second|last)\]", server.log.read_text())

    def has_queued(count: int) -> bool:
        lines = http.get("/metrics").text.splitlines()
        found = [line.rpartition(" ")[2] for line in lines if line.startswith("syringa_num_requests_waiting{")]
        return [float(value) for value in found] == [count]  # none if the engine did not answer in time

    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    threads = []
    with http.stream("POST", COMPLETIONS, json=body) as running:
        lines = running.iter_lines()
        next(lines)  # the only running request, until the client disconnects
        for count, (name, priority) in enumerate([("last", 5), ("second", 0), ("first", -5)], 1):
            thread = threading.Thread(target=run, args=(name, priority))
            thread.start()
            threads.append(thread)
            wait_for(partial(has_queued, count))
    for thread in threads:
        thread.join(120)
    wait_for(lambda: len(ended()) == 3)
    assert ended() == ["first", "second", "last"]


def test_request_id_is_part_of_the_id(http: httpx.Client) -> None:
    assert post(http, request_id="mine")["id"] == "cmpl-mine"
    assert post(http, CHAT, request_id="mine")["id"] == "chatcmpl-mine"


def test_chat_echoes_and_continues_the_last_message(http: httpx.Client) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "The capital of France"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    rest = choice(http, CHAT, **body)["message"]["content"]
    assert rest.startswith(" is")
    assert choice(http, CHAT, **body, echo=True)["message"]["content"] == "The capital of France" + rest


def test_documents_are_part_of_the_prompt(http: httpx.Client) -> None:
    body = {"documents": [{"title": "Facts", "text": "The sky is green."}], "return_prompt_text": True}
    text = post(http, CHAT, **body)["prompt_text"]
    assert text.startswith("<|im_start|>system\nFacts: The sky is green.<|im_end|>\n")


def test_reasoning_is_left_out(http: httpx.Client) -> None:
    """SmolLM2 does not end what it thinks: all of the output is reasoning."""
    body = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True}
    shown, hidden = (post(http, CHAT, **body, include_reasoning=each) for each in (True, False))
    assert shown["choices"][0]["message"]["reasoning"]
    assert not hidden["choices"][0]["message"].get("reasoning")
    for whole in (shown, hidden):
        assert not whole["choices"][0]["message"]["content"]
        assert whole["usage"]["completion_tokens"] == 8
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_token_ids_and_offsets_are_those_of_the_texts(http: httpx.Client) -> None:
    body = {"return_token_ids": True, "return_token_offsets": True}
    whole = post(http, CHAT, **body, return_prompt_text=True)
    pieces = [whole["prompt_text"][start:end] for start, end in whole["prompt_token_offsets"]]
    assert "".join(pieces) == whole["prompt_text"]
    assert len(pieces) == len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    found = choice(http, **body)
    assert [PROMPT[start:end] for start, end in found["prompt_token_offsets"]] == [
        "The",
        " capital",
        " of",
        " France",
        " is",
    ]
    assert found["token_ids"][0] == PARIS
    text = http.post("/detokenize", json={"tokens": found["token_ids"]}).json()["prompt"]
    assert text == found["text"]


def test_log_probabilities_name_tokens_by_id(http: httpx.Client) -> None:
    scores = choice(http, logprobs=2, return_tokens_as_token_ids=True, max_tokens=1)["logprobs"]
    assert scores["tokens"] == [f"token_id:{PARIS}"]
    assert all(name.startswith("token_id:") for name in scores["top_logprobs"][0])


def test_log_probabilities_of_given_tokens_are_returned(http: httpx.Client) -> None:
    best = choice(http, logprobs=2, max_tokens=1, return_tokens_as_token_ids=True)["logprobs"]["top_logprobs"][0]
    tokens = [PARIS, END]
    body = {"logprobs": 0, "logprob_token_ids": tokens, "max_tokens": 1, "return_tokens_as_token_ids": True}
    given = choice(http, **body)["logprobs"]["top_logprobs"][0]
    assert given.keys() == {f"token_id:{token}" for token in tokens}
    assert given[f"token_id:{PARIS}"] == best[f"token_id:{PARIS}"] > given[f"token_id:{END}"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_prompt_log_probabilities_are_in_the_first_chunk(http: httpx.Client, path: str) -> None:
    whole = post(http, path, prompt_logprobs=1)
    expected = (whole if path == CHAT else whole["choices"][0])["prompt_logprobs"]
    default = {"messages": ASKED} if path == CHAT else {"prompt": PROMPT}
    body = {**default, "temperature": 0, "max_tokens": 8, "prompt_logprobs": 1, "stream": True}
    first, *rest = events(http.post(path, json=body).text)
    assert (first if path == CHAT else first["choices"][0])["prompt_logprobs"] == expected
    assert len(expected) == whole["usage"]["prompt_tokens"]
    assert not any("prompt_logprobs" in str(chunk) for chunk in rest)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_chunk_has_the_usage_so_far(http: httpx.Client, path: str) -> None:
    default = {"messages": ASKED} if path == CHAT else {"prompt": PROMPT}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**default, "max_tokens": 8, "ignore_eos": True, "stream": True, "stream_options": options}
    *chunks, done = events(http.post(path, json=body).text)
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0] <= 1, counts[-1]) == (True, 8)
