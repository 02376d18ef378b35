"""Tests of the `chat_template` field."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from syringa.api.chat.request_template import MAX_CHARACTERS
from syringa.config import Config
from syringa.prompt.chat import isolated_template
from tests.api.chat.helpers import HI, PATH, prompt_of, refused
from tests.api.fields.test_tools import TOOLS
from tests.chat_models import TOOLS as TOOL_TEMPLATE
from tests.chat_models import plain_model, tool_model
from tests.client import client
from tests.fake_engine import FakeEngine, fake_model

SHOUT = "{% for m in messages %}{{ m.content | upper }}!{% endfor %}{{ mood }}"
KEY = {"authorization": "Bearer k"}


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(isolated_template, "WALL_SECONDS", 300.0)  # on a busy machine only CPU time counts
    yield
    isolated_template._processes.close()


@pytest.mark.parametrize("model", [plain_model(), fake_model()])
async def test_chat_renders_with_the_template_of_the_request(model: Any) -> None:
    assert await prompt_of({"chat_template": SHOUT}, model=model) == "HI!"
    body = {"chat_template": SHOUT, "chat_template_kwargs": {"mood": "good"}}
    assert await prompt_of(body, model=model) == "HI!good"


async def test_chat_drops_old_turns_with_the_template_of_the_request() -> None:
    old = [{"role": role, "content": "x" * 3000} for role in ("user", "assistant")]
    body = {"messages": [*old, *HI], "chat_template": SHOUT, "truncate_sequence": True, "max_tokens": 10}
    assert await prompt_of(body) == "HI!"


async def test_tokenize_renders_with_the_template_of_the_request() -> None:
    async with client(model=plain_model()) as http:
        found = await http.post("/tokenize", json={"messages": HI, "chat_template": SHOUT})
        ignored = await http.post("/tokenize", json={"prompt": "hi", "chat_template": SHOUT})
    assert bytes(found.json()["tokens"]) == b"HI!"
    assert ignored.headers["x-syringa-ignored"] == "chat_template"


async def test_chat_describes_tools_where_the_template_of_the_request_does_not() -> None:
    plain = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
    assert "You can call these functions" in await prompt_of(
        {"chat_template": plain, "tools": TOOLS}, model=tool_model()
    )
    own = await prompt_of({"chat_template": TOOL_TEMPLATE + " ", "tools": TOOLS}, model=tool_model())
    assert own.startswith('[tools]{"name": "weather"')


@pytest.mark.parametrize(
    ("setting", "keys", "allowed"),
    [("auto", False, True), ("auto", True, False), ("allow", True, True), ("refuse", False, False)],
)
async def test_templates_of_requests_are_allowed_by_the_setting(setting: Any, keys: bool, allowed: bool) -> None:
    config = Config(api_key=("k",)) if keys else Config()
    model = plain_model(request_chat_templates=setting)
    engine = FakeEngine("x")
    async with client(engine, config, model) as http:
        body = {"messages": HI, "chat_template": SHOUT}
        for path in (PATH, "/tokenize"):
            answer = await http.post(path, json=body, headers=KEY if keys else {})
            assert answer.status_code == (200 if allowed else 403), answer.text
            if not allowed:
                error = answer.json()["error"]
                assert (error["param"], error["code"]) == ("chat_template", "chat_template_not_allowed")
        assert (await http.post(PATH, json={"messages": HI}, headers=KEY if keys else {})).status_code == 200
    assert len(engine.requests) == 1 + allowed


@pytest.mark.parametrize(
    "template",
    ["", " \n", "{% if %}", "{{ raise_exception('no') }}", "x" * (MAX_CHARACTERS + 1), 5, "{{ 'x' * 10**12 }}"],
)
async def test_chat_refuses_invalid_templates(template: Any) -> None:
    assert (await refused({"chat_template": template}))["param"] == "chat_template"


async def test_a_template_that_hangs_delays_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    started, release = threading.Semaphore(0), threading.Event()

    def hang(self: Any, method: str, arguments: Any) -> None:
        started.release()
        assert release.wait(60)

    monkeypatch.setattr(isolated_template._TemplateProcess, "call", hang)
    async with client(model=plain_model()) as http:
        body = {"messages": HI, "chat_template": SHOUT}
        hanging = [asyncio.create_task(http.post(PATH, json=body)) for _ in range(8)]
        assert await asyncio.to_thread(started.acquire, timeout=60)
        long = {"messages": [{"role": "user", "content": "x" * 3000}], "tools": TOOLS, "max_tokens": 1}
        for other in ({"messages": HI}, long):  # the second is rendered in a thread
            assert (await http.post(PATH, json=other)).status_code == 200
        assert not any(task.done() for task in hanging)
        release.set()
        answers = await asyncio.gather(*hanging)
    assert {answer.status_code for answer in answers} == {400}
