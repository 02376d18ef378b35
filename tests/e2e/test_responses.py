"""`/v1/responses` on the real model: stored state survives restarts and killed processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.e2e.server import Server, serve, wait_for
from tests.http.responses_client import stream_events, text_of
from tests.schemas import validate_openai

pytestmark = pytest.mark.model
FACTS = "Remember these facts for later. " + " ".join(f"Box number {n} holds {n * 7} marbles." for n in range(1, 25))
SHORT: dict[str, Any] = {"temperature": 0, "max_output_tokens": 24}
LONG: dict[str, Any] = {"background": True, "ignore_eos": True, "max_output_tokens": 6000}


def respond(server: Server, input: Any, key: str | None = None, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": input} | body, headers=_key(key), timeout=120)
    assert answer.status_code == 200, answer.text
    validate_openai(answer.json(), "Response")
    found: dict[str, Any] = answer.json()
    return found


def get(server: Server, path: str, key: str | None = None) -> httpx.Response:
    return httpx.get(f"{server.url}/v1/responses/{path}", headers=_key(key), timeout=120)


def running_requests(server: Server) -> float | None:
    """Return the metric, or None if the engine did not answer in time."""
    metrics = httpx.get(f"{server.url}/metrics", timeout=120).text
    found = [each for each in metrics.splitlines() if each.startswith("syringa_num_requests_running{")]
    return float(found[0].split()[-1]) if found else None


def _key(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


@pytest.mark.slow
def test_response_chain_continues_after_a_restart(database: str) -> None:
    with serve("--database", database) as server:
        one = respond(server, FACTS, **SHORT)
        two = respond(server, "How many boxes are there?", previous_response_id=one["id"], **SHORT)
        assert two["usage"]["input_tokens"] > one["usage"]["input_tokens"]
        assert two["usage"]["input_tokens_details"]["cached_tokens"] > one["usage"]["input_tokens"] // 2
        whole = [message for each in (one, two) for message in each["output"]]
    with serve("--database", database) as server:
        three = respond(server, "Thank you.", previous_response_id=two["id"], **SHORT)
        assert get(server, two["id"]).json() == two
        items = [
            {"role": "user", "content": FACTS},
            whole[0],
            {"role": "user", "content": "How many boxes are there?"},
            whole[1],
            {"role": "user", "content": "Thank you."},
        ]
        same = respond(server, items, store=False, **SHORT)
        assert same["usage"]["input_tokens"] == three["usage"]["input_tokens"]
        assert text_of(same) == text_of(three)
        assert same["usage"]["input_tokens_details"]["cached_tokens"] > 0


@pytest.mark.slow
def test_background_response_outlives_its_client_and_fails_with_its_server(database: str) -> None:
    with serve("--database", database) as server:
        url = f"{server.url}/v1/responses"
        seen: list[dict[str, Any]] = []
        with httpx.stream("POST", url, json={"input": "Tell a story.", "stream": True} | LONG, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line.removeprefix("data: ")))
                if len(seen) == 20:
                    break
        id = seen[0]["response"]["id"]
        assert get(server, id).json()["status"] == "in_progress"
        short = respond(server, "Say hello.", background=True, **SHORT)
        wait_for(lambda: get(server, short["id"]).json()["status"] == "completed")
        events = stream_events(get(server, f"{short['id']}?stream=true").text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        later = stream_events(get(server, f"{short['id']}?stream=true&starting_after=4").text)
        assert later == events[5:]
        with httpx.stream("GET", f"{url}/{id}?stream=true&starting_after=10", timeout=120) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            again = [json.loads(next(lines).removeprefix("data: ")) for _ in range(9)]
        assert again == seen[11:20]
        server.process.kill()
        server.process.wait()
    with serve("--database", database) as server:
        lost = get(server, id).json()
        assert lost["status"] == "failed"
        assert lost["error"]["code"] == "server_error"
        assert stream_events(get(server, f"{id}?stream=true").text)[-1]["type"] == "response.failed"
        assert get(server, short["id"]).json()["status"] == "completed"


def test_background_response_is_canceled_from_any_process(file: str) -> None:
    with serve("--database", file, "--workers", "2") as server:
        ids = [respond(server, "Tell a story.", **LONG)["id"] for _ in range(3)]
        for id in ids:
            answer = httpx.post(f"{server.url}/v1/responses/{id}/cancel", timeout=120)
            assert answer.json()["status"] == "cancelled"
        wait_for(lambda: running_requests(server) == 0)
        for id in ids:
            assert get(server, id).json()["status"] == "cancelled"
        respond(server, "Say hello.", **SHORT)


@pytest.mark.slow
def test_shutdown_stores_the_state_of_running_responses(file: str) -> None:
    with serve("--database", file, "--drain-timeout", "1") as server:
        id = respond(server, "Tell a story.", **LONG)["id"]
        server.process.terminate()
        assert server.process.wait(120) == 0
    with serve("--database", file) as server:
        lost = get(server, id).json()
        assert lost["status"] == "failed"
        assert "stopped" in lost["error"]["message"]


@pytest.mark.slow
def test_organizations_do_not_see_each_others_responses(file: str) -> None:
    with serve("--database", file, "--api-key", "one", "--api-key", "two") as server:
        mine = respond(server, "My secret is 42.", key="one", **SHORT)
        assert get(server, mine["id"], "two").status_code == 404
        assert get(server, mine["id"]).status_code == 401
        answer = httpx.post(
            f"{server.url}/v1/responses",
            json={"input": "What is it?", "previous_response_id": mine["id"]},
            headers=_key("two"),
            timeout=120,
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")
        respond(server, "What is it?", key="one", previous_response_id=mine["id"], **SHORT)


@pytest.mark.slow
def test_websocket_continues_its_last_response(file: str) -> None:
    with serve("--database", file) as server:
        url = server.url.replace("http", "ws") + "/v1/responses"
        with connect(url, proxy=None, open_timeout=120) as socket:

            def ask(input: str, **body: Any) -> dict[str, Any]:
                event = {"type": "response.create", "input": input, "store": False, **SHORT, **body}
                socket.send(json.dumps(event))
                while True:
                    seen: dict[str, Any] = json.loads(socket.recv(120))
                    validate_openai(seen, "ResponseStreamEvent")
                    if seen["type"] in ("response.completed", "response.incomplete"):
                        found: dict[str, Any] = seen["response"]
                        return found

            one = ask(FACTS)
            two = ask("How many boxes are there?", previous_response_id=one["id"])
            assert two["usage"]["input_tokens_details"]["cached_tokens"] > one["usage"]["input_tokens"] // 2
        assert not Path(file).exists(), "nothing must be stored"
        assert get(server, two["id"]).status_code == 404
