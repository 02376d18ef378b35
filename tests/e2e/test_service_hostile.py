"""Clients that mean no good, on a real server: each is refused cleanly, and none costs the others."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.server import wait_for
from tests.e2e.service import PROMPT, Place, books, command, create_key, start

pytestmark = pytest.mark.model

READ_TIMEOUT = 4
FRESH = re.compile(r"[0-9a-f]{32}")
LINE = re.compile(r"\d{4}-\d\d-\d\dT\S+Z (DEBUG|INFO|WARNING) syringa\.")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("hostile")
    database = str(folder / "syringa.db")
    admin = create_key(database, "ops", "--admin")
    settings = ("--served-model-name", MODEL, "--read-timeout", str(READ_TIMEOUT), "--log-level", "debug")
    with start(database, folder, *settings) as service:
        place = Place(service, admin)
        yield place
        service.wait_idle()
        assert service.server.stop() == 0
    log = service.log()
    assert '  File "' not in log  # a traceback
    assert PROMPT not in log
    assert not [key for key in (place.ours, place.theirs, place.admin) if key.text in log or key.text[7:20] in log]
    # Nobody has written a line of their own, nor anything that a terminal would obey.
    assert not re.search("[\x00-\x09\x0b-\x1f\u2028-\u202e]", log)
    lines = log.partition("Stop with Ctrl-C.\n")[2].splitlines()
    assert lines
    assert [line for line in lines if not LINE.match(line)] == []


@contextlib.contextmanager
def everyone_else_is_served(place: Place) -> Iterator[list[float]]:
    """Another client goes on meanwhile, and every request of it is answered. How long each took."""
    took: list[float] = []
    wrong: list[object] = []
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            began = time.monotonic()
            try:
                answer = place.complete()
                wrong.extend([] if answer.status_code == 200 else [answer.text])
            except httpx.HTTPError as error:
                wrong.append(error)
            took.append(time.monotonic() - began)

    other = threading.Thread(target=go_on)
    other.start()
    try:
        yield took
    finally:
        ended.set()
        other.join(60)
    assert took
    assert wrong == []
    assert max(took) < 10


@pytest.mark.parametrize(
    "sent",
    [
        b"a\tb",
        b"a b",
        b"caf\xe9",
        b"x" * 129,
        b"x" * 100_000,
        b"a\x00evil",
        b"a\nx-evil: 1",
        b"a\rx-evil: 1",
        b"a\r\n x-evil: 1",
        b"\x1b[31mevil",
    ],
)
def test_invalid_request_ids_are_replaced(place: Place, sent: bytes) -> None:
    key = b"authorization: " + place.ours.header.encode()
    answer = place.raw(b"GET /v1/models HTTP/1.1", b"host: a", key, b"x-request-id: " + sent)
    head = answer.partition(b"\r\n\r\n")[0].decode("latin-1")
    status = int(head.split()[1])
    names = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:])
    assert status in (200, 400, 431)
    assert "x-evil" not in names
    if status == 200:
        assert FRESH.fullmatch(names["x-request-id"])


@pytest.mark.parametrize("name", ["\r\nx-evil: 1", "evil\x00\x1b[31m", "../../etc/evil", "e" * 100_000, "\ud800", ""])
def test_hostile_model_names_are_refused(place: Place, name: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1, "model": name})
    answer = place.ask("POST", "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2000
    assert "x-evil" not in answer.headers


def test_hostile_field_and_user_names_are_handled(place: Place) -> None:
    answer = place.complete(**{"a\r\nx-evil: 1": 1, "e\x00vil": 2, "é" * 50_000: 3})
    assert answer.status_code == 200
    assert "x-evil" not in answer.headers
    assert len(answer.headers["x-syringa-ignored"]) < 8000
    for user in ("\r\nx-evil: 1", "evil\x00\x1b[31m\u202e", "u" * 100_000):
        answer = place.complete(user=user)
        assert answer.status_code == 200
        wait_for(lambda id=answer.headers["x-request-id"]: [r for r in books(place.database) if r.request_id == id])
        (row,) = [row for row in books(place.database) if row.request_id == answer.headers["x-request-id"]]
        assert row.user is not None
        assert row.user[:4] == user[:4].replace("\0", "\ufffd")
        assert len(row.user) <= 512
    shown = command(place.database, "usage", "--by", "user").stdout
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", shown)


@pytest.mark.parametrize("name", ["", "a\r\nb", "evil\x00", "a/b", "o" * 65, "o" * 100_000, "é", "a b"])
def test_hostile_organization_names_are_refused(place: Place, name: str) -> None:
    made = place.ask("POST", "/admin/keys", place.admin, json={"organization": name})
    assert made.status_code == 400, made.text
    assert made.json()["error"]["param"] == "organization"
    assert len(made.content) < 2000
    named = place.ask("PUT", f"/admin/organizations/{quote(name[:5000], safe='')}", place.admin, json={"concurrent": 1})
    assert named.status_code in (400, 404, 405)
    assert len(named.content) < 2000


AUTHORIZATIONS = [
    None,
    b"",
    b"Bearer",
    b"Bearer ",
    b"Bearer  \t ",
    b"Basic dXNlcjpwYXNz",
    b"bearer: KEY",
    b"KEY",
    b"Bearer KEYx",
    b"Bearer KEY KEY",
    b"Bearer KEY, Bearer KEY",
    b"Bearer 'KEY'",
    b"Bearer KEY\x00",
    b"Bearer \xff\xfe",
    b"Bearer " + "ключ".encode(),
    b"Bearer " + b"x" * 513,
    b"Bearer " + b"x" * 60_000,
    b"Bearer " + b"x" * 100_000,
    b"Bearer sk-syr-" + b"x" * 43,
    b"\x00\x01\x02",
]


@pytest.mark.parametrize("given", AUTHORIZATIONS)
def test_malformed_authorization_headers_are_refused(place: Place, given: bytes | None) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    lines = [b"POST /v1/completions HTTP/1.1", b"host: a", b"content-length: %d" % len(body)]
    if given is not None:
        lines.append(b"authorization: " + given.replace(b"KEY", place.ours.text.encode()))
    before = len(books(place.database))
    head, _, said = place.raw(*lines, body=body).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    code = json.loads(said)["error"]["code"]
    if status == 401:
        assert b"www-authenticate: bearer" in head.lower()
        assert code == "invalid_api_key"
    else:
        assert given is not None
        assert (status, code) == ((431, "headers_too_large") if len(given) > 65536 else (400, "malformed_request"))
    assert place.ours.text.encode() not in said
    assert len(books(place.database)) == before


def test_two_authorization_headers_are_refused(place: Place) -> None:
    """One of them counts, for all that is asked: nobody gets in with one key and is charged on another."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    lines = [b"POST /v1/completions HTTP/1.1", b"host: a", b"content-length: %d" % len(body), b"x-request-id: both"]
    both = [b"authorization: " + each for each in (b"Bearer nobody", place.theirs.header.encode())]
    assert place.raw(*lines, *both, body=body).startswith(b"HTTP/1.1 200 ")
    assert place.raw(*lines, *reversed(both), body=body).startswith(b"HTTP/1.1 401 ")
    wait_for(lambda: [row.key for row in books(place.database) if row.request_id == "both"] == [place.theirs.id])


def test_objects_of_another_organization_are_not_found(place: Place) -> None:
    made = place.ask("POST", "/v1/responses", json={"input": PROMPT, "max_output_tokens": 16}).json()
    path = f"/v1/responses/{made['id']}"
    assert place.ask("GET", path).status_code == 200
    for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel")):
        answer = place.ask(method, where, place.theirs)
        assert answer.status_code == 404, (method, where, answer.text)
        assert PROMPT not in answer.text
    going_on = {"input": "x", "previous_response_id": made["id"]}
    refused = place.ask("POST", "/v1/responses", place.theirs, json=going_on)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert place.ask("GET", path).status_code == 200

    talk = place.ask("POST", "/v1/conversations", json={}).json()
    assert place.ask("GET", f"/v1/conversations/{talk['id']}", place.theirs).status_code == 404
    assert place.ask("DELETE", f"/v1/conversations/{talk['id']}", place.theirs).status_code == 404

    place.complete()
    wait_for(lambda: place.ask("GET", "/v1/usage", place.ours).json()["data"])
    for query in ("", "?organization=ours", f"?key={place.ours.id}", "?by=key,organization&organization=ours"):
        shown = place.ask("GET", f"/v1/usage{query}", place.theirs).text
        assert place.ours.id not in shown
        assert '"ours"' not in shown
    for where in (
        "/admin/usage",
        "/admin/keys",
        "/admin/organizations",
        "/admin/models",
        f"/admin/keys/{place.ours.id}",
    ):
        assert place.ask("GET", where, place.theirs).status_code == 403
    assert place.ask("DELETE", f"/admin/keys/{place.ours.id}", place.theirs).status_code == 403
    assert place.ask("POST", "/admin/keys", place.theirs, json={"organization": "ours"}).status_code == 403


def test_unfinished_requests_time_out(place: Place) -> None:
    """A hundred of them: half with half a head, half with half a body."""
    files = place.service.files()
    key = b"authorization: " + place.ours.header.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + key + b"\r\n"
    with everyone_else_is_served(place) as took, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(place.connect()) for _ in range(100)]
        for number, each in enumerate(sockets):
            each.sendall(head if number % 2 else head + b'content-length: 1000\r\n\r\n{"prompt": "')
        began = time.monotonic()
        while time.monotonic() < began + READ_TIMEOUT - 2:
            for number, each in enumerate(sockets):
                each.sendall(b"x-a: b\r\n" if number % 2 else b"x")
            time.sleep(0.3)
        assert took
        for each in sockets:
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while part := each.recv(65536):
                    answer += part
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    wait_for(lambda: all(count <= files[pid] + 8 for pid, count in place.service.files().items()))


def test_clients_that_never_read_are_dropped(place: Place) -> None:
    """Twenty, of long answers. They leave in the end, and what they asked for ends with them."""
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 5}
    sent = json.dumps(body).encode()
    key = b"authorization: " + place.ours.header.encode()
    lines = [b"POST /v1/completions HTTP/1.1", b"host: a", key, b"content-length: %d" % len(sent), b"", b""]
    memory = place.service.memory()
    with everyone_else_is_served(place) as took:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                each = stack.enter_context(socket.socket())
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                each.connect(("127.0.0.1", place.service.port))
                each.sendall(b"\r\n".join(lines) + sent)
            wait_for(lambda: place.service.figure("num_requests_running") >= 20)
            served = len(took)
            wait_for(lambda: len(took) >= served + 10, 60)
        wait_for(lambda: place.service.figure("num_requests_running") <= 1)
    assert all(now < memory[pid] + (200 << 20) for pid, now in place.service.memory().items())
