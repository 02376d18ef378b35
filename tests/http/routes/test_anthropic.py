"""`/v1/messages` without streaming: fields, prompts and answers."""

from __future__ import annotations

from typing import Any

import pytest

from syringa.api.fields.constraints import compose_grammar
from syringa.config import Config
from syringa.errors import EngineUnavailable
from syringa.prompt.images.loader import ImagePolicy
from syringa.service.app_state import AppState
from tests.chat_models import plain_model, tool_model, vision_model
from tests.fake_engine import FakeEngine
from tests.http.anthropic_client import ASKED, CALLED, IMAGE, PATH, TOOL, anthropic_client
from tests.prompt.images.web_server import image_file, response, serving

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def test_message_has_the_shape_of_anthropics_api() -> None:
    async with anthropic_client() as http:
        answer = await http.send_body(model="alias", metadata={"user_id": "u"}, service_tier="auto")
    assert "x-syringa-ignored" not in answer.headers
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    body = answer.json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,  # half of [u]hi[a]
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "service_tier": "standard",
        },
    }


async def test_message_request_sets_sampling_stopping_and_user() -> None:
    async with anthropic_client() as http:
        await http.create(temperature=0.5, top_p=0.9, top_k=3, max_tokens=7, seed=5, min_p=0.1)
        (request,) = http.engine.requests
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 3, 0.1)
        assert (sampling.seed, request.stopping.max_tokens) == (5, 7)


async def test_metadata_user_id_is_stored_with_the_usage_record() -> None:
    users: list[str | None] = []
    state = AppState(Config())
    state.observers.append(lambda accounting: users.append(accounting.user))
    async with anthropic_client(app_state=state) as http:
        await http.create(metadata={"user_id": "someone"})
    assert users == ["someone"]


@pytest.mark.parametrize(
    ("system", "messages", "prompt"),
    [
        ("Be brief.", ASKED, "[s]Be brief.[u]hi[a]"),
        ([{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], ASKED, "[s]A\nB[u]hi[a]"),
        (None, [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "[u]hi[a]"),
        # Consecutive messages of a role are one turn.
        (None, [*ASKED, {"role": "user", "content": "you"}], "[u]hi\nyou[a]"),
        (None, [*ASKED, {"role": "assistant", "content": "yes"}, *ASKED], "[u]hi[a]yes[u]hi[a]"),
        (None, [*ASKED, {"role": "system", "content": "Now be long."}], "[u]hi[s]Now be long.[a]"),
        # The last message of the assistant is continued, unless it is empty.
        (None, [*ASKED, {"role": "assistant", "content": "The answer is ("}], "[u]hi[a]The answer is ("),
        (None, [*ASKED, {"role": "assistant", "content": []}], "[u]hi[a]"),
        (None, [*ASKED, {"role": "assistant", "content": ""}], "[u]hi[a]"),
    ],
)
async def test_messages_become_a_prompt(system: Any, messages: list[Any], prompt: str) -> None:
    async with anthropic_client() as http:
        await http.create(system=system, messages=messages)
        assert http.prompt() == prompt


async def test_documents_and_search_results_become_text() -> None:
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "Lilac."},
        "title": "Shrubs",
        "citations": {"enabled": True},
    }
    result = {"type": "search_result", "source": "a.example", "title": "T", "content": [{"type": "text", "text": "x"}]}
    async with anthropic_client() as http:
        ignored = await http.ignored(messages=[{"role": "user", "content": [document, result]}])
        assert ignored == ["messages[0].content[0].citations"]
        assert http.prompt() == (
            "[u]<document>\nTitle: Shrubs\nLilac.\n</document>\n"
            "<search_result>\nTitle: T\nSource: a.example\nx\n</search_result>[a]"
        )


async def test_tool_use_and_results_become_calls_and_tool_messages() -> None:
    second = CALLED | {"id": "toolu_2"}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": "toolu_2",
            "is_error": True,
            "content": [{"type": "text", "text": "no"}],
        },
        {"type": "text", "text": "well?"},
    ]
    messages = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALLED, second]},
        {"role": "user", "content": results},
    ]
    async with anthropic_client(model=tool_model()) as http:
        await http.create(messages=messages, tools=[TOOL])
        assert http.prompt().endswith(
            "[user]hi[assistant]I look."
            '<call>get_weather{"city": "Paris"}<call>get_weather{"city": "Paris"}'
            "[tool:get_weather]sunny#toolu_1[tool:get_weather]Error:\nno#toolu_2[user]well?[assistant]"
        )
        assert '"name": "get_weather"' in http.prompt()


async def test_tool_call_becomes_a_tool_use_block() -> None:
    async with anthropic_client(FakeEngine(CALL), model=tool_model()) as http:
        body = await http.create(tools=[TOOL])
    (block,) = body["content"]
    assert block.pop("id").startswith("toolu_")
    direct = {"type": "direct"}
    assert block == {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}, "caller": direct}
    assert body["stop_reason"] == "tool_use"


async def test_tool_call_that_max_tokens_cuts_has_an_empty_input() -> None:
    async with anthropic_client(FakeEngine(CALL), model=tool_model()) as http:
        body = await http.create(tools=[TOOL], max_tokens=len(CALL) - 25)
    assert [block["input"] for block in body["content"]] == [{}]
    assert body["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "get_weather"}, "required", False),
    ],
)
async def test_tool_choice_constrains_the_output(
    choice: dict[str, Any] | None, mode: str, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []

    async def record(*arguments: Any, **fields: Any) -> Any:
        used.append(fields["tools"])
        return await compose_grammar(*arguments, **fields)

    monkeypatch.setattr("syringa.api.anthropic.prepare.compose_grammar", record)
    async with anthropic_client(FakeEngine(CALL), model=tool_model()) as http:
        await http.create(tools=[TOOL], tool_choice=choice)
    assert (used[0].mode, used[0].parallel) == (mode, parallel)


async def test_tool_choice_none_leaves_out_the_tools() -> None:
    async with anthropic_client(model=tool_model()) as http:
        await http.create(tools=[TOOL], tool_choice={"type": "none"})
        assert "get_weather" not in http.prompt()


async def test_server_tools_are_named_and_left_out() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, TOOL, {"type": "tool_search_tool_bm25"}]
    history = [
        *ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
                {"type": "text", "text": "found"},
            ],
        },
        *ASKED,
    ]
    async with anthropic_client(model=tool_model()) as http:
        ignored = await http.ignored(tools=tools, messages=history)
        assert ignored == [
            "messages[1].content[0] (server_tool_use)",
            "messages[1].content[1] (web_search_tool_result)",
            "tools[0] (web_search_20250305)",
            "tools[2] (tool_search_tool_bm25)",
        ]
        assert "web_search" not in http.prompt()
    async with anthropic_client(model=tool_model(unsupported_tools="refuse")) as http:
        error = await http.error(400, tools=tools)
        assert error["message"].startswith("tools[0].type: this server has no web_search_20250305 tool")


async def test_deferred_tool_is_offered_once_a_reference_names_it() -> None:
    search, deferred = TOOL | {"name": "search"}, TOOL | {"defer_loading": True}
    call = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "get_weather"}]
    messages = [
        *ASKED,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": found}]},
    ]
    async with anthropic_client(model=tool_model()) as http:
        await http.create(tools=[search, deferred])
        assert "get_weather" not in http.prompt()
        await http.create(tools=[search, deferred], messages=messages)
        assert '"name": "get_weather"' in http.prompt()
        # Without a tool that searches, it would never be found.
        await http.create(tools=[{"type": "tool_search_tool_regex_20251119", "name": "s"}, deferred])
        assert '"name": "get_weather"' in http.prompt()


async def test_tool_fields_without_effect_are_named_and_examples_described() -> None:
    tool = TOOL | {
        "type": "custom",
        "input_examples": [{"city": "Rome"}],
        "allowed_callers": ["code_execution_20250825"],
        "eager_input_streaming": False,
        "cache_control": {"type": "ephemeral"},
    }
    async with anthropic_client(model=tool_model()) as http:
        ignored = await http.ignored(tools=[tool])
        assert ignored == ["tools[0].allowed_callers", "tools[0].eager_input_streaming"]
        assert 'Return the weather.\\nExample input: {\\"city\\": \\"Rome\\"}' in http.prompt()


async def test_unknown_beta_fields_are_named_and_not_refused() -> None:
    async with anthropic_client() as http:
        answer = await http.post(
            PATH + "?beta=true",
            json={"messages": ASKED, "max_tokens": 5, "context_management": {"edits": []}, "speed": "fast"},
            headers={"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"},
        )
        assert answer.status_code == 200
        assert answer.headers["x-syringa-ignored"] == "context_management, speed"  # the latter is known, too
    async with anthropic_client(unknown_fields="refuse") as http:
        error = await http.error(400, speed="fast")
        assert "'speed' is not supported" in error["message"]


@pytest.mark.parametrize("name", ["output_config", "output_format"])
async def test_output_format_constrains_the_text(name: str) -> None:
    format = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    body: dict[str, Any] = {name: {"format": format} if name == "output_config" else format}
    async with anthropic_client(FakeEngine('{"a": 1}')) as http:
        await http.create(**body)
        grammar = http.engine.requests[0].sampling.grammar
        assert grammar is not None
        assert (grammar.kind, '"integer"' in grammar.value) == ("json_schema", True)
        messages = [*ASKED, {"role": "assistant", "content": "{"}]
        error = await http.error(400, **body, messages=messages)
        assert "cannot be combined with a last message of the assistant" in error["message"]
        error = await http.error(400, **body, guided_regex="a")
        assert "guided_regex and output_" in error["message"]


@pytest.mark.parametrize(
    ("stop", "body", "text", "reason", "sequence"),
    [
        (["x", "l"], {}, "he", "stop_sequence", "l"),
        (["y"], {}, "hello", "end_turn", None),
        (["y"], {"stop": "ll"}, "he", "stop_sequence", "ll"),
        (None, {"max_tokens": 2}, "he", "max_tokens", None),
    ],
)
async def test_stop_reason_and_stop_sequence(
    stop: list[str] | None, body: dict[str, Any], text: str, reason: str, sequence: str | None
) -> None:
    async with anthropic_client() as http:
        message = await http.create(stop_sequences=stop, **body)
    assert [block["text"] for block in message["content"]] == [text]
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_max_tokens_beyond_the_context_is_clamped() -> None:
    async with anthropic_client(FakeEngine("x" * 100), model=plain_model(max_model_len=30)) as http:
        message = await http.create(max_tokens=1_000_000)
        assert http.engine.requests[0].stopping.max_tokens == 22
        assert message["stop_reason"] == "model_context_window_exceeded"
        assert message["usage"]["output_tokens"] == 22
        message = await http.create(max_tokens=22)
        assert message["stop_reason"] == "max_tokens"


async def test_max_tokens_zero_only_computes_the_prompt() -> None:
    async with anthropic_client() as http:
        message = await http.create(max_tokens=0)
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["output_tokens"] == 0


async def test_prompt_that_fills_the_context_is_refused_in_words_that_clients_know() -> None:
    async with anthropic_client(model=plain_model(max_model_len=20)) as http:
        error = await http.error(400, messages=[{"role": "user", "content": "x" * 50}])
        assert error == {"type": "invalid_request_error", "message": "prompt is too long: 56 tokens > 19 maximum"}
        error = await http.error(400, messages=[{"role": "user", "content": "x" * 5000}])
        assert error["message"].startswith("prompt is too long: This model's maximum context length is 20 tokens")
        assert await http.count(messages=[{"role": "user", "content": "x" * 50}]) == 56


async def test_images_in_messages_and_results_reach_the_engine() -> None:
    model = vision_model()
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "see"}, IMAGE]}
    async with anthropic_client(model=model) as http:
        await http.create(messages=[{"role": "user", "content": [IMAGE, {"type": "text", "text": "What?"}]}])
        assert http.prompt() == "[user]<image>What?[assistant]"
        assert len(http.engine.requests[0].images) == 1
        await http.create(
            messages=[
                *ASKED,
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result, {"type": "text", "text": "What is it?"}]},
            ]
        )
        assert "see\n[image]" in http.prompt()
        assert http.prompt().endswith("<image>What is it?[assistant]")
        assert len(http.engine.requests[1].images) == 1
        url = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}
        error = await http.error(400, messages=[{"role": "user", "content": [url]}])
        assert error["message"].startswith("messages[0].content[0].source.url: ")
    async with anthropic_client() as http:
        error = await http.error(400, messages=[{"role": "user", "content": [IMAGE]}])
        assert error["message"] == "messages[0].content[0].source: this model does not support images."


async def test_image_of_a_url_reaches_the_engine() -> None:
    file = image_file()
    policy = ImagePolicy(allow_private=True)  # what the setting `image_hosts_private` makes
    async with serving() as web, anthropic_client(model=vision_model(image_policy=policy)) as http:
        web.pages["/a.png"] = response(file)
        image = {"type": "image", "source": {"type": "url", "url": web.url("/a.png")}}
        content = [image, {"type": "text", "text": "What?"}]
        await http.create(messages=[{"role": "user", "content": content}])
        assert http.prompt() == "[user]<image>What?[assistant]"
        assert [each.data for each in http.engine.requests[0].images] == [file]
        assert web.paths() == ["/a.png"]
        missing = image | {"source": {"type": "url", "url": web.url("/b.png")}}
        error = await http.error(400, messages=[{"role": "user", "content": [missing]}])
        assert error["message"].startswith("messages[0].content[0].source.url: ")


async def test_images_are_counted_as_in_the_request() -> None:
    engine = FakeEngine("hello")
    engine.image_tokens = 50
    content = [IMAGE, {"type": "text", "text": "Which is darker?"}, IMAGE]
    async with anthropic_client(engine, model=vision_model()) as http:
        messages = [{"role": "user", "content": content}]
        counted = await http.count(messages=messages)
        assert counted == len("[user]XWhich is darker?X[assistant]".replace("X", "<image>")) + 2 * 49
        usage = (await http.create(messages=messages))["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
        broken = IMAGE | {"source": IMAGE["source"] | {"data": "eA=="}}
        error = await http.error(400, PATH + "/count_tokens", messages=[{"role": "user", "content": [broken]}])
        assert error["message"].startswith("messages[0].content[0].source.data: ")
        engine.fail = EngineUnavailable("The worker died.")
        engine.fail_first = True
        error = await http.error(503, PATH + "/count_tokens", messages=messages)
        assert error["type"] == "overloaded_error"


async def test_billing_line_of_claude_code_is_left_out() -> None:
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cch=abc12;"}
    async with anthropic_client() as http:
        assert await http.ignored(system=[line, {"type": "text", "text": "Be brief."}]) == ["system[0]"]
        assert http.prompt() == "[s]Be brief.[u]hi[a]"
        assert await http.ignored(system=line["text"] + "\nBe brief.") == ["system"]
        assert http.prompt() == "[s]Be brief.[u]hi[a]"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"system": "Be brief.", "tools": [TOOL], "tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"messages": [*ASKED, {"role": "assistant", "content": "It is"}]},
        {"system": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}]},
    ],
)
async def test_count_tokens_equals_what_the_request_counts(body: dict[str, Any]) -> None:
    async with anthropic_client(FakeEngine(CALL), model=tool_model()) as http:
        usage = (await http.create(**body))["usage"]
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert await http.count(**body) == sum(usage[name] for name in names) == len(http.engine.requests[0].prompt)


async def test_count_tokens_equals_what_the_request_counts_where_the_model_truncates() -> None:
    turns = [{"role": "user" if n % 2 else "assistant", "content": f"turn {n} " + "x" * 40} for n in range(1, 12)]
    model = plain_model(max_model_len=200, defaults={"truncate_sequence": True})
    async with anthropic_client(model=model) as http:
        counted = await http.count(messages=turns)
        usage = (await http.create(messages=turns))["usage"]
        assert (
            counted == usage["input_tokens"] + usage["cache_read_input_tokens"] == len(http.engine.requests[0].prompt)
        )
        assert counted < 200
        assert await http.count(messages=ASKED) == len("[u]hi[a]")
    async with anthropic_client(model=plain_model(max_model_len=200)) as http:
        assert await http.count(messages=turns) > 200
