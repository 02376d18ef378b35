"""The official `openai` package for Python against `syringa serve`, on the real model."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import KEY, MODEL
from tests.e2e.sdk import OPENAI_PYTHON, python_with
from tests.e2e.server import Server

pytestmark = pytest.mark.model

SCRIPT = Path(__file__).with_name("openai_client.py")
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)

# The example of Lilac's documentation, verbatim.
LILAC = """
from openai import OpenAI

client = OpenAI(
    base_url="https://api.getlilac.com/v1",
    api_key="your-lilac-api-key",
)

response = client.completions.create(
    model="moonshotai/kimi-k2.5",
    prompt="The capital of France is",
    max_tokens=50,
)

print(response.choices[0].text)
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_with(*OPENAI_PYTHON)


@pytest.fixture(scope="module")
def results(python: Path, shared_server: Server) -> dict[str, str | None]:
    """The error or None of each check. One interpreter runs all, since importing the package takes a second."""
    output = _run(python, str(SCRIPT), shared_server.url, KEY, MODEL)
    return {line["name"]: line["error"] for line in map(json.loads, output.splitlines())}


@pytest.mark.parametrize("check", CHECKS)
def test_openai_python_package_passes_its_check(results: dict[str, str | None], check: str) -> None:
    if error := results[check]:
        pytest.fail(error, pytrace=False)


def test_lilac_completions_example(python: Path, shared_server: Server) -> None:
    """Only the address, the key and the model differ."""
    example = LILAC
    for theirs, ours in {
        "https://api.getlilac.com/v1": shared_server.url + "/v1",
        "your-lilac-api-key": KEY,
        "moonshotai/kimi-k2.5": MODEL,
    }.items():
        assert example.count(theirs) == 1
        example = example.replace(theirs, ours)
    # Without a seed the text varies, but not its length and the reason of its end.
    output = _run(python, "-c", f"{example}\nprint('----')\nprint(response.model_dump_json())")
    text, _, dump = output.rpartition("----\n")
    response = json.loads(dump)
    (choice,) = response["choices"]
    assert text == choice["text"] + "\n"
    tokens, reason = response["usage"]["completion_tokens"], choice["finish_reason"]
    assert (reason == "length" and tokens == 50) or (reason == "stop" and 0 < tokens <= 50)


def _run(python: Path, *arguments: str) -> str:
    result = subprocess.run([str(python), *arguments], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout
