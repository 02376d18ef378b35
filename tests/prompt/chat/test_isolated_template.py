"""Tests of chat templates of requests, in their processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.prompt.chat import isolated_template
from syringa.prompt.chat.isolated_template import IsolatedTemplate
from syringa.prompt.chat.template import ChatTemplate, Message

SOURCE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'florist' %}{{ raise_exception('no florists') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
SPECIAL = {"bos_token": "<s>"}
MESSAGES: list[Message] = [{"role": "system", "content": "Be kind. \ud800"}, {"role": "user", "content": "Zoë?\n"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(isolated_template, "WALL_SECONDS", 300.0)  # on a busy machine only CPU time counts
    monkeypatch.setattr(isolated_template, "IDLE_SECONDS", 300.0)
    yield
    isolated_template._processes.close()


async def render(template: IsolatedTemplate, messages: list[Message] = MESSAGES, **options: Any) -> str:
    return await template.run(lambda: template.render(messages, **options))


async def failure(source: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await render(await IsolatedTemplate.open(source, SPECIAL))
    return caught.value


def idle_processes() -> list[int]:
    return [process._process.pid for _, process in isolated_template._processes._idle.values()]


async def test_isolated_template_renders_like_a_chat_template() -> None:
    own, isolated = ChatTemplate(SOURCE, SPECIAL), await IsolatedTemplate.open(SOURCE, SPECIAL)
    assert isolated.variables == own.variables == {"bos_token", "tools", "messages", "add_generation_prompt", "mood"}
    assert isolated.capabilities == own.capabilities
    for options in (
        {},
        {"tools": TOOLS},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"kwargs": {"mood": "good"}},
    ):
        assert await render(isolated, **options) == own.render(MESSAGES, **options)
    for role in ("user", "florist"):
        assert await isolated.run(functools.partial(isolated.supports_role, role)) == own.supports_role(role)


async def test_isolated_template_reports_errors_of_other_fields_as_such() -> None:
    template = await IsolatedTemplate.open(SOURCE, SPECIAL)
    with pytest.raises(InvalidRequest) as caught:
        await render(template, kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        await render(template, kwargs={"mood": _nested(100_000)})
    assert await render(template)  # the process goes on


def _nested(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "the chat template is invalid"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "the chat template is invalid"),
        ("{{ raise_exception('boom') }}", "rejects these messages: boom"),
        ("{{ messages[0].content.__class__.__mro__ }}", "is unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ 'x' * 10**12 }}", "256 MB of memory"),
        ("{% set s = namespace(x='x') %}{% for i in range(99) %}{% set s.x = s.x ~ s.x %}{% endfor %}", "256 MB"),
    ],
)
async def test_isolated_template_refuses_invalid_and_hostile_templates(source: str, message: str) -> None:
    error = await failure(source)
    assert message in error.message
    assert (error.param, error.code) == ("chat_template", "invalid_chat_template")


async def test_isolated_template_is_ended_at_its_limit_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_template, "CPU_SECONDS", 1)
    loop = "{% for i in range(99999) %}"
    error = await failure(loop + loop + "{% endfor %}{% endfor %}")
    assert error.param == "chat_template"
    assert "CPU time" in error.message
    assert not idle_processes()


async def test_isolated_template_is_ended_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_template, "WALL_SECONDS", 0.0)
    assert "CPU time" in (await failure(SOURCE)).message
    assert not idle_processes()


async def test_isolated_template_reuses_the_process_of_a_template_and_tenant() -> None:
    first = await IsolatedTemplate.open(SOURCE, SPECIAL, "a")
    (used,) = idle_processes()
    await render(first)
    await IsolatedTemplate.open(SOURCE, SPECIAL, "a")
    assert idle_processes() == [used]
    await IsolatedTemplate.open(SOURCE, SPECIAL, "b")
    await IsolatedTemplate.open(SOURCE + " ", SPECIAL, "a")
    assert len(set(idle_processes())) == 3
    for number in range(isolated_template.MAX_IDLE):
        await IsolatedTemplate.open(f"{number}", SPECIAL, "a")
    assert len(idle_processes()) == isolated_template.MAX_IDLE
    assert used not in idle_processes()
    assert (await render(first)).startswith("<s><system>")


async def test_isolated_template_reports_that_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr("subprocess.Popen", fail)
    with pytest.raises(EngineOverloaded):
        await IsolatedTemplate.open(SOURCE, SPECIAL)


async def test_template_process_does_not_inherit_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYRINGA_API_KEY", "a-secret")
    await IsolatedTemplate.open(SOURCE, SPECIAL)
    (pid,) = idle_processes()
    assert b"a-secret" not in _environment(pid)


def _environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_template_process_ends_with_its_parent() -> None:
    await IsolatedTemplate.open(SOURCE, SPECIAL)
    ((_, process),) = isolated_template._processes._idle.values()
    process._process.stdin.close()  # type: ignore[union-attr] # as when this process exits
    assert process._process.wait(60) == 0
