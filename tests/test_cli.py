from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import syringa.api.models.loading
from syringa.api.completions.request import CompletionRequest
from syringa.api.fields.constraint_fields import ConstraintFields
from syringa.api.fields.sampling import SamplingFields
from syringa.cli import main
from syringa.cli.fields import to_fields
from syringa.cli.options import SAMPLING
from syringa.config import FIELDS, Config, variable
from syringa.errors import ConfigError, EngineUnavailable
from syringa.modelfiles.catalog import CATALOG
from syringa.modelfiles.locate import models_dir
from syringa.prompt.chat.template import ChatTemplate
from tests.chat_models import reasoning_model
from tests.fake_engine import FakeEngine, fake_model


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SYRINGA_HOME", str(models_dir().parent))  # the folder of models prepared for tests
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for name in FIELDS:
        monkeypatch.delenv(variable(name), raising=False)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Replace the engine that commands would start."""
    fake = FakeEngine("hello")

    @contextlib.asynccontextmanager
    async def start_local(config: Config, free_memory: int = 0, on_progress: object = None):
        yield fake

    template = ChatTemplate("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}")
    module = types.SimpleNamespace(start_local=start_local)
    monkeypatch.setitem(sys.modules, "syringa.engine.client.local", module)
    monkeypatch.setattr(syringa.api.models.loading, "load_model", lambda config: fake_model(template=template))
    return fake


def test_help_imports_no_heavy_modules() -> None:
    code = (
        "import sys; from syringa.cli import main\ntry: main(['--help'])\n"
        "finally: print(sorted(sys.modules)); import time; print(time.process_time())"
    )
    root = Path(__file__).parents[1]
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout
    assert float(output.split()[-1]) < 3  # seconds of CPU time, usually 0.3
    assert "serve" in output
    for heavy in ("'torch'", "'transformers'", "'numpy'", "'tokenizers'", "'starlette'", "'httpx'", "'rich'"):
        assert heavy not in output


@pytest.mark.parametrize("command", ["serve", "complete", "run", "chat", "models", "pull", "remove", "bench"])
def test_command_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    output = capsys.readouterr().out
    assert "Usage" in output
    if command == "serve":
        assert all(variable(name) in output for name in FIELDS)


def test_models_available_lists_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "--available") == 0
    output = capsys.readouterr().out
    assert all(model.name in output for model in CATALOG)
    assert "Qwen/Qwen3-4B-GGUF:Q4_K_M" in output


def test_pull_offline_of_a_missing_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path))
    assert run("pull", "--offline", "qwen2.5-coder-1.5b") == 1
    assert "not here yet: run `syringa pull qwen2.5-coder-1.5b`" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("syringa")


def test_options_cover_all_sampling_fields() -> None:
    fields = set(SamplingFields.__struct_fields__) | {"max_tokens"}
    fields.remove("priority")  # orders the requests of a server
    # `--grammar` and `--response-format` cover what other servers have more fields for.
    fields -= set(ConstraintFields.__struct_fields__) - {"grammar", "response_format"}
    assert set(SAMPLING) == fields
    assert fields < set(CompletionRequest.__struct_fields__)


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("serve", "--port", "x"), "--port 'x': expected a whole number"),
        (("serve", "--host", "0.0.0.0"), "create one with `syringa keys create ORGANIZATION`"),
        (("serve", "--dtype", "int3"), "expected one of auto, int8, bf16, fp32"),
        (("serve", "--config", "missing.toml"), "missing.toml: no such file"),
        (("serve", "--model", "/no/such/file.gguf"), "no such file or folder"),
        (("complete", "x", "--model", "/no/such/file.gguf"), "no such file or folder"),
        (("complete", "x", "--url", "http://127.0.0.1:9"), "127.0.0.1:9"),
        (("complete", "x", "--logit-bias", "5"), "expected ID=BIAS"),
        (("bench", "--streams", "a"), "--streams"),
    ],
)
def test_startup_errors_are_one_line(
    arguments: tuple[str, ...], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 1
    error = capsys.readouterr().err
    assert output in error
    assert error.startswith("syringa: ")
    assert error.count("\n") == 1


def test_port_in_use_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run("serve", "--port", str(port)) == 1
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err


def test_complete(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("complete", "hi", "--temperature", "0", "--stop", "lo", "--stop", "x", "--seed", "7") == 0
    assert capsys.readouterr().out == "hel\n"
    assert engine.requests[0].prompt == [*b"hi"]
    assert (engine.requests[0].sampling.temperature, engine.requests[0].sampling.seed) == (0, 7)


def test_complete_several_and_echo(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("complete", "hi ", "--n", "2", "--echo") == 0
    assert capsys.readouterr().out == "[0] hi hello\n[1] hi hello\n"


def test_complete_reads_standard_input(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert run("complete") == 0
    assert engine.requests[0].prompt == [*b"piped"]


@pytest.mark.parametrize(
    ("arguments", "output"),
    [(("--temperature", "3"), "temperature"), (("--grammar", "regex:("), "regex"), (("--top-p", "0"), "top_p")],
)
def test_invalid_fields_are_one_line(
    engine: FakeEngine, arguments: tuple[str, ...], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("complete", "x", *arguments) == 1
    error = capsys.readouterr().err
    assert output in error
    assert "Traceback" not in error


def test_engine_failure_is_reported(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.fail = EngineUnavailable("the worker died")
    assert run("complete", "x") == 1
    assert "syringa: the worker died" in capsys.readouterr().err


def chat(monkeypatch: pytest.MonkeyPatch, *lines: Any) -> int:
    left = iter(lines)

    def answer(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("syringa.cli.chat._history", contextlib.nullcontext)  # not that of the user
    return run("chat", "--temperature", "0")


def test_chat(engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "one",
        "two \\",
        "lines",
        "/system be kind",
        "three",
        "/reset",
        "four",
        "/nonsense",
        "/help",
        "/exit",
        "no",
    ]
    assert chat(monkeypatch, *lines) == 0
    prompts = [bytes(request.prompt).decode() for request in engine.requests]
    assert prompts == [
        "u:one;",
        "u:one;a:hello;u:two \nlines;",
        "s:be kind;u:one;a:hello;u:two \nlines;a:hello;u:three;",
        "s:be kind;u:four;",
    ]
    output = capsys.readouterr().out
    assert output.count("hello") == 4
    assert "6 tokens" in output
    assert "Unknown command /nonsense" in output


def test_chat_help_lists_the_commands(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(monkeypatch, "/help", "/exit") == 0
    lines = capsys.readouterr().out.splitlines()
    for command, text in (
        ("/system TEXT", "set the system message; without TEXT, remove it"),
        ("/reset", "start a new conversation"),
        ("/save FILE", "write the conversation to a new file, as Markdown"),
        ("/help", "show this help"),
        ("/exit", "quit; so does Ctrl-D"),
    ):
        assert f"  {command:<15}{text}" in lines
    assert "  Ctrl-C stops an answer. A line that ends in \\ continues on the next line;" in lines
    assert '  """ begins and ends a message of several lines, or one that begins with /.' in lines
    assert not engine.requests


def test_chat_survives_interrupts_and_errors(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.fail, engine.fail_first = EngineUnavailable("the worker died"), True
    assert chat(monkeypatch, KeyboardInterrupt(), "", "one", "two") == 0
    assert [bytes(request.prompt) for request in engine.requests] == [b"u:one;", b"u:two;"]
    assert capsys.readouterr().out.count("the worker died") == 2


@pytest.fixture
def interrupt(engine: FakeEngine) -> Iterator[None]:
    """Send Ctrl-C after five tokens, also where SIGINT was ignored at start, as in background jobs."""
    done = threading.Event()

    def send() -> None:
        while engine.delivered < 5 and not done.wait(0.01):
            pass
        if not done.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=send)
    thread.start()
    yield
    done.set()
    thread.join()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupt")
def test_ctrl_c_stops_answer_but_not_chat(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script, engine.delay = b"0123456789" * 100, 0.02
    monkeypatch.setattr("syringa.cli.chat.ChatSession._command", lambda *_: setattr(engine, "script", b"!") or True)
    assert chat(monkeypatch, "one", "/next", "two") == 0
    assert "(stopped)" in capsys.readouterr().out
    assert engine.aborted
    assert re.fullmatch(rb"u:one;a:0123\d*;u:two;", bytes(engine.requests[1].prompt))


@pytest.mark.usefixtures("interrupt")
def test_ctrl_c_ends_complete(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.script, engine.delay = b"0123456789" * 100, 0.02
    assert run("complete", "x") == 130
    output = capsys.readouterr()
    assert output.out.startswith("0123")
    assert "Traceback" not in output.err
    assert not engine.running


@pytest.mark.usefixtures("interrupt")
def test_ctrl_c_ends_run(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.script, engine.delay = b"0123456789" * 100, 0.02
    assert run("run", "default", "x") == 130
    output = capsys.readouterr()
    assert output.out.startswith("0123")
    assert "Traceback" not in output.err
    assert not engine.running


def test_models_lists_known_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models") == 0
    assert "SmolLM2" in capsys.readouterr().out


def test_to_fields(tmp_path: Path) -> None:
    (tmp_path / "g").write_text("[a-z]")
    assert to_fields({"grammar": f"regex:@{tmp_path / 'g'}", "logit_bias": ["5=-1.5"]}) == {
        "grammar": {"type": "regex", "value": "[a-z]"},
        "logit_bias": {"5": -1.5},
    }
    assert to_fields({"response_format": "json_object"}) == {"response_format": {"type": "json_object"}}
    schema = to_fields({"response_format": '{"type": "null"}'})["response_format"]["json_schema"]["schema"]
    assert schema == {"type": "null"}
    for bad in ({"grammar": "bnf:x"}, {"grammar": "regex:@/no/such"}, {"response_format": "{"}):
        with pytest.raises(ConfigError):
            to_fields(bad)


def test_chat_shows_reasoning_and_excludes_it_from_messages(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reasoning_model("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}")
    monkeypatch.setattr(syringa.api.models.loading, "load_model", lambda config: model)
    engine.script = b"<think>let me see</think>\n\nhello"
    assert chat(monkeypatch, "one", "two") == 0
    assert bytes(engine.requests[1].prompt) == b"u:one;a:hello;u:two;"
    output = capsys.readouterr()
    assert output.err.count("let me see\n\n") == 2
    assert output.out.count("hello") == 2
    assert "let me see" not in output.out


def test_chat_saves_the_conversation_and_reads_several_lines(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "chat.md"
    quotes = '"' * 3
    assert chat(monkeypatch, f"{quotes}first", f"second{quotes}", f"/save {target}", "/save", "/save /no/such/x") == 0
    assert target.read_text().startswith("## user\n\nfirst\nsecond\n\n## assistant\n\n")


def test_chat_sends_a_quoted_message_that_begins_with_a_slash(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quotes = '"' * 3
    assert chat(monkeypatch, f"{quotes}/etc/hosts says{quotes}", f"{quotes}/exit", f"now{quotes}", "/exit", "no") == 0
    prompts = [bytes(request.prompt).decode() for request in engine.requests]
    assert prompts == ["u:/etc/hosts says;", "u:/etc/hosts says;a:hello;u:/exit\nnow;"]
    assert "Unknown command" not in capsys.readouterr().out


def test_run_prints_the_answer_alone(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "default", "What?", "--temperature", "0", "--max-tokens", "5") == 0
    output = capsys.readouterr()
    assert output.out == engine.script[:5].decode() + "\n"
    assert output.err == ""


def test_run_prints_reasoning_apart_from_the_answer(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reasoning_model("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}")
    monkeypatch.setattr(syringa.api.models.loading, "load_model", lambda config: model)
    engine.script = b"<think>let me see</think>\n\nhello"
    assert run("run", "default", "What?") == 0
    output = capsys.readouterr()
    assert output.out == "hello\n"
    assert "let me see\n\n" in output.err


def test_run_reads_standard_input(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What?"))
    assert run("run", "default", "--max-tokens", "3") == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(" "))
    assert run("run", "default") == 1


@pytest.mark.parametrize(
    ("piped", "prompt"),
    [("a text\n", "u:What is it?\n\na text\n;"), (" \n", "u:What is it?;"), (None, "u:What is it?;")],
)
def test_run_appends_standard_input_to_the_question(
    piped: str | None, prompt: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None if piped is None else io.StringIO(piped))
    assert run("run", "default", "What is it?", "--max-tokens", "3") == 0
    assert bytes(engine.requests[0].prompt).decode() == prompt


def test_run_does_not_read_a_terminal(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO("typed")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    assert run("run", "default", "What?", "--max-tokens", "3") == 0
    assert bytes(engine.requests[0].prompt) == b"u:What?;"


@pytest.mark.parametrize("command", ["run", "chat"])
def test_model_without_a_chat_template_is_refused_before_it_is_loaded(
    command: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[object] = []
    monkeypatch.setattr("syringa.engine.processes.startup_plan.plan_model", lambda *_: planned.append(_))
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("the chat has begun"))
    monkeypatch.setattr("syringa.cli.chat._history", contextlib.nullcontext)
    monkeypatch.setattr(syringa.api.models.loading, "load_model", lambda config: fake_model())
    question = ("hi",) if command == "run" else ()
    assert run(command, "default", *question) == 1
    assert capsys.readouterr().err == (
        f"syringa: {fake_model().id} has no chat template: use `syringa complete --model default`, or "
        "--chat-template FILE\n"
    )
    assert planned == []
    assert run("complete", "hi", "--model", "default") == 0


def test_run_and_complete_read_bytes_that_are_no_text(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (("run", "default"), ("complete",)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
        assert run(*arguments, "--max-tokens", "3") == 0
    assert [bytes(request.prompt).decode() for request in engine.requests] == ["u:caf\ufffd;", "caf\ufffd"]


def test_run_refuses_a_path_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "/no/such/model.gguf", "What?") == 1
    assert "no such file or folder" in capsys.readouterr().err


def test_chat_reports_full_context(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(monkeypatch, "x" * 5000) == 0
    assert not engine.requests
    assert "/reset starts a new conversation" in " ".join(capsys.readouterr().out.split())
