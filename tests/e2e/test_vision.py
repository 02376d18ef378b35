"""Images through the whole server, with a small SmolVLM of random weights."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.types import Image
from tests.e2e.server import Server, serve
from tests.engine.vision.tiny_models import make_image, save

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<turn>"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
FIRST, SECOND = make_image(1, 64, 48), make_image(2, 64, 48)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("smolvlm")
    save("smolvlm", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serve("--model", str(folder), "--dtype", "fp32", "--image-hosts-private") as running:
        yield running


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A web server with the first image."""
    folder: Path = tmp_path_factory.mktemp("web")
    (folder / "one.png").write_bytes(FIRST.data)
    (folder / "page.html").write_text("<html>no image</html>")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, directory=str(folder), **kwargs)

        def log_message(self, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image(url: str, detail: str = "auto") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


def ask(server: Server, *parts: dict[str, Any], **more: Any) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, "logprobs": True}
    return httpx.post(server.url + "/v1/chat/completions", json=body | more, timeout=300)


def seen(answer: httpx.Response) -> tuple[int, list[float]]:
    """Return the prompt tokens and the log-probabilities of the response, which differ from image to image."""
    body = answer.raise_for_status().json()
    return body["usage"]["prompt_tokens"], [each["logprob"] for each in body["choices"][0]["logprobs"]["content"]]


def test_responses_api_sees_images_and_remembers_them(server: Server) -> None:
    parts = [
        {"type": "input_image", "image_url": data_uri(FIRST.data)},
        {"type": "input_text", "text": "What is this?"},
    ]

    def respond(input: Any, **more: Any) -> Any:
        scored = {"include": ["message.output_text.logprobs"], "temperature": 0, "max_output_tokens": 8}
        answer = httpx.post(server.url + "/v1/responses", json={"input": input} | scored | more, timeout=300)
        return answer.raise_for_status().json()

    one = respond([{"role": "user", "content": parts}])
    scores = [each["logprob"] for each in one["output"][0]["content"][0]["logprobs"]]
    assert (one["usage"]["input_tokens"], scores) == seen(ask(server, image(data_uri(FIRST.data))))
    two = respond("And now?", previous_response_id=one["id"])["usage"]
    assert two["input_tokens"] > one["usage"]["input_tokens"]
    assert two["input_tokens_details"]["cached_tokens"] > 0, "the same image is a prefix cache hit"
    other = [{"type": "input_image", "image_url": data_uri(SECOND.data)}, parts[1]]
    third = respond([{"role": "user", "content": other}])["output"][0]["content"][0]["logprobs"]
    assert [each["logprob"] for each in third] != scores


def test_images_are_seen_and_counted(server: Server) -> None:
    without, blind = seen(ask(server))
    tokens, first = seen(ask(server, image(data_uri(FIRST.data))))
    assert tokens > without + 4
    assert first != blind
    assert seen(ask(server, image(data_uri(SECOND.data))))[1] != first
    both, _ = seen(ask(server, image(data_uri(FIRST.data)), image(data_uri(SECOND.data))))
    assert both > tokens


def test_same_image_is_a_prefix_cache_hit_and_another_is_not(server: Server) -> None:
    text = {"type": "text", "text": "Look closely at this, please. " * 3}
    parts = image(data_uri(make_image(7, 64, 64).data)), text
    first = ask(server, *parts).json()
    again = ask(server, *parts).json()
    other = ask(server, image(data_uri(make_image(8, 64, 64).data)), text).json()
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, again, other)]
    assert cached[0] < 16
    assert cached[1] > 64
    assert cached[2] < 16
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def test_low_detail_takes_fewer_tokens(server: Server) -> None:
    url = data_uri(make_image(3, 200, 200).data)
    assert seen(ask(server, image(url, "low")))[0] < seen(ask(server, image(url, "high")))[0]


def test_image_is_fetched_by_its_url(server: Server, web: str) -> None:
    assert seen(ask(server, image(web + "/one.png"))) == seen(ask(server, image(data_uri(FIRST.data))))


def test_stream_with_an_image(server: Server) -> None:
    answer = ask(server, image(data_uri(FIRST.data)), stream=True, stream_options={"include_usage": True})
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("[DONE]")
    assert '"prompt_tokens":' in answer.text


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,AAAA", "image"),
        ("data:image/png;base64,!!", "base64"),
        ("data:text/plain;base64,AAAA", "image"),
        ("ftp://example.com/x.png", "http"),
        ("{web}/none.png", "404"),
        ("{web}/page.html", "image"),
        ("http://169.254.169.254/latest", "address"),
        (data_uri(FIRST.data[:-30]), "image"),
    ],
)
def test_invalid_image_is_refused(server: Server, web: str, url: str, message: str) -> None:
    answer = ask(server, image(data_uri(FIRST.data)), image(url.format(web=web)))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert message in error["message"]


def test_prompt_too_long_because_of_images_is_refused(server: Server) -> None:
    many = [image(data_uri(make_image(each, 256, 256).data), "high") for each in range(20)]
    answer = ask(server, *many)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert httpx.get(server.url + "/health", timeout=120).status_code == 200


def test_anthropic_count_of_images_is_that_of_the_message(server: Server) -> None:
    def shown(image: Image) -> dict[str, Any]:
        data = base64.b64encode(image.data).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    content = [shown(FIRST), {"type": "text", "text": "Which?"}, shown(SECOND)]
    body = {"messages": [{"role": "user", "content": content}]}
    counts = []
    for _ in range(2):  # without and with the images in the cache
        answer = httpx.post(server.url + "/v1/messages/count_tokens", json=body, timeout=120)
        counts.append(answer.raise_for_status().json()["input_tokens"])
        answer = httpx.post(server.url + "/v1/messages", json=body | {"max_tokens": 2}, timeout=120)
        usage = answer.raise_for_status().json()["usage"]
        counts.append(usage["input_tokens"] + usage["cache_read_input_tokens"])
    assert len(set(counts)) == 1
    assert counts[0] > len("user:Which?<turn>assistant:") + 2
