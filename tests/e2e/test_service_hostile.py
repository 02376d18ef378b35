"""Hostile clients on a real server: each gets an error, and other clients are not affected."""

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
from tests.e2e.service import PROMPT, Key, Tenants, command, create_key, start, usage_records

pytestmark = pytest.mark.model

READ_TIMEOUT = 15
FRESH = re.compile(r"[0-9a-f]{32}")
LINE = re.compile(r"\d{4}-\d\d-\d\dT\S+Z (DEBUG|INFO|WARNING) syringa\.")


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("hostile")
    database = str(folder / "syringa.db")
    admin = create_key(database, "ops", "--admin")
    settings = ("--served-model-name", MODEL, "--read-timeout", str(READ_TIMEOUT), "--log-level", "debug")
    with start(database, folder, *settings) as service:
        tenants = Tenants(service, admin)
        yield tenants
        service.wait_idle()
        assert service.server.stop() == 0
    log = service.log()
    assert '  File "' not in log  # a traceback
    assert PROMPT not in log
    assert not [
        key for key in (tenants.ours, tenants.theirs, tenants.admin) if key.text in log or key.text[7:20] in log
    ]
    # No client has injected a line or a control character.
    assert not re.search("[\x00-\x09\x0b-\x1f\u2028-\u202e]", log)
    lines = log.partition("Stop with Ctrl-C.\n")[2].splitlines()
    assert lines
    assert [line for line in lines if not LINE.match(line)] == []


@contextlib.contextmanager
def other_client_is_served(tenants: Tenants) -> Iterator[list[float]]:
    """Send requests of another client in the meantime, all of which must succeed. Return the seconds of each."""
    took: list[float] = []
    errors: list[object] = []
    ended = threading.Event()

    def send_requests() -> None:
        while not ended.is_set():
            began = time.monotonic()
            try:
                answer = tenants.complete()
                errors.extend([] if answer.status_code == 200 else [answer.text])
            except httpx.HTTPError as error:
                errors.append(error)
            took.append(time.monotonic() - began)

    other = threading.Thread(target=send_requests)
    other.start()
    try:
        yield took
    finally:
        ended.set()
        other.join(180)
    assert took
    assert errors == []
    assert max(took) < 60


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
def test_invalid_request_ids_are_replaced(tenants: Tenants, sent: bytes) -> None:
    key = b"authorization: " + tenants.ours.header.encode()
    answer = tenants.raw(b"GET /v1/models HTTP/1.1", b"host: a", key, b"x-request-id: " + sent)
    head = answer.partition(b"\r\n\r\n")[0].decode("latin-1")
    status = int(head.split()[1])
    names = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:])
    assert status in (200, 400, 431)
    assert "x-evil" not in names
    if status == 200:
        assert FRESH.fullmatch(names["x-request-id"])


def test_prompt_of_another_organization_cannot_be_guessed_by_cached_tokens(tenants: Tenants) -> None:
    prompt = "The secret of this system prompt is a number that nobody may ever learn, and its digits are 4 8 2."

    def cached(key: Key, **fields: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1, **fields}
        answer = tenants.ask("POST", "/v1/completions", key, json=body).json()
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(tenants.ours) == 0
    assert cached(tenants.theirs) == 0
    assert cached(tenants.ours) >= 16
    assert cached(tenants.ours, cache_salt="of one user") == 0
    assert cached(tenants.ours, cache_salt="of one user") >= 16


@pytest.mark.parametrize("name", ["\r\nx-evil: 1", "evil\x00\x1b[31m", "../../etc/evil", "e" * 100_000, "\ud800", " "])
def test_hostile_model_names_are_refused(tenants: Tenants, name: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1, "model": name})
    answer = tenants.ask("POST", "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2000
    assert "x-evil" not in answer.headers


def test_hostile_field_and_user_names_are_handled(tenants: Tenants) -> None:
    answer = tenants.complete(**{"a\r\nx-evil: 1": 1, "e\x00vil": 2, "é" * 50_000: 3})
    assert answer.status_code == 200
    assert "x-evil" not in answer.headers
    assert len(answer.headers["x-syringa-ignored"]) < 8000
    for user in ("\r\nx-evil: 1", "evil\x00\x1b[31m\u202e", "u" * 100_000):
        answer = tenants.complete(user=user)
        assert answer.status_code == 200
        wait_for(
            lambda id=answer.headers["x-request-id"]: [r for r in usage_records(tenants.database) if r.request_id == id]
        )
        (row,) = [row for row in usage_records(tenants.database) if row.request_id == answer.headers["x-request-id"]]
        assert row.user is not None
        assert row.user[:4] == user[:4].replace("\0", "\ufffd")
        assert len(row.user) <= 512
    shown = command(tenants.database, "usage", "--by", "user").stdout
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", shown)


@pytest.mark.parametrize("name", ["", "a\r\nb", "evil\x00", "a/b", "o" * 65, "o" * 100_000, "é", "a b"])
def test_hostile_organization_names_are_refused(tenants: Tenants, name: str) -> None:
    made = tenants.ask("POST", "/admin/keys", tenants.admin, json={"organization": name})
    assert made.status_code == 400, made.text
    assert made.json()["error"]["param"] == "organization"
    assert len(made.content) < 2000
    named = tenants.ask(
        "PUT", f"/admin/organizations/{quote(name[:5000], safe='')}", tenants.admin, json={"concurrent": 1}
    )
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
def test_malformed_authorization_headers_are_refused(tenants: Tenants, given: bytes | None) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    lines = [b"POST /v1/completions HTTP/1.1", b"host: a", b"content-length: %d" % len(body)]
    if given is not None:
        lines.append(b"authorization: " + given.replace(b"KEY", tenants.ours.text.encode()))
    began = time.time()
    head, _, content = tenants.raw(*lines, body=body).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    code = json.loads(content)["error"]["code"]
    if status == 401:
        assert b"www-authenticate: bearer" in head.lower()
        assert code == "invalid_api_key"
    else:
        assert given is not None
        assert (status, code) == ((431, "headers_too_large") if len(given) > 65536 else (400, "malformed_request"))
    assert tenants.ours.text.encode() not in content
    assert not [row for row in usage_records(tenants.database) if row.at >= began]


def test_two_authorization_headers_are_refused(tenants: Tenants) -> None:
    """One header is used throughout: a request cannot authenticate with one key and be charged to another."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    lines = [b"POST /v1/completions HTTP/1.1", b"host: a", b"content-length: %d" % len(body), b"x-request-id: both"]
    both = [b"authorization: " + each for each in (b"Bearer unknown", tenants.theirs.header.encode())]
    assert tenants.raw(*lines, *both, body=body).startswith(b"HTTP/1.1 200 ")
    assert tenants.raw(*lines, *reversed(both), body=body).startswith(b"HTTP/1.1 401 ")
    wait_for(
        lambda: [row.key for row in usage_records(tenants.database) if row.request_id == "both"] == [tenants.theirs.id]
    )


def test_objects_of_another_organization_are_not_found(tenants: Tenants) -> None:
    made = tenants.ask("POST", "/v1/responses", json={"input": PROMPT, "max_output_tokens": 16}).json()
    path = f"/v1/responses/{made['id']}"
    assert tenants.ask("GET", path).status_code == 200
    for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel")):
        answer = tenants.ask(method, where, tenants.theirs)
        assert answer.status_code == 404, (method, where, answer.text)
        assert PROMPT not in answer.text
    continued = {"input": "x", "previous_response_id": made["id"]}
    refused = tenants.ask("POST", "/v1/responses", tenants.theirs, json=continued)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert tenants.ask("GET", path).status_code == 200

    talk = tenants.ask("POST", "/v1/conversations", json={}).json()
    assert tenants.ask("GET", f"/v1/conversations/{talk['id']}", tenants.theirs).status_code == 404
    assert tenants.ask("DELETE", f"/v1/conversations/{talk['id']}", tenants.theirs).status_code == 404

    tenants.complete()
    wait_for(lambda: tenants.ask("GET", "/v1/usage", tenants.ours).json()["data"])
    for query in ("", "?organization=ours", f"?key={tenants.ours.id}", "?by=key,organization&organization=ours"):
        shown = tenants.ask("GET", f"/v1/usage{query}", tenants.theirs).text
        assert tenants.ours.id not in shown
        assert '"ours"' not in shown
    for where in (
        "/admin/usage",
        "/admin/keys",
        "/admin/organizations",
        "/admin/models",
        f"/admin/keys/{tenants.ours.id}",
    ):
        assert tenants.ask("GET", where, tenants.theirs).status_code == 403
    assert tenants.ask("DELETE", f"/admin/keys/{tenants.ours.id}", tenants.theirs).status_code == 403
    assert tenants.ask("POST", "/admin/keys", tenants.theirs, json={"organization": "ours"}).status_code == 403


@pytest.mark.slow
def test_unfinished_requests_time_out(tenants: Tenants) -> None:
    """A hundred requests, half with an incomplete head, half with an incomplete body."""
    files = tenants.service.files()
    key = b"authorization: " + tenants.ours.header.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + key + b"\r\n"
    with other_client_is_served(tenants) as took, contextlib.ExitStack() as stack:
        began = time.monotonic()
        sockets = [stack.enter_context(tenants.connect()) for _ in range(100)]
        for number, each in enumerate(sockets):
            each.sendall(head if number % 2 else head + b'content-length: 1000\r\n\r\n{"prompt": "')
        # Long before the server closes them: what is sent then would reset a connection before its answer is read.
        while time.monotonic() < began + READ_TIMEOUT / 5:
            for number, each in enumerate(sockets):
                each.sendall(b"x-a: b\r\n" if number % 2 else b"x")
            time.sleep(0.3)
        wait_for(lambda: took)
        for each in sockets:
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while part := each.recv(65536):
                    answer += part
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    wait_for(lambda: all(count <= files[pid] + 8 for pid, count in tenants.service.files().items()))


def test_clients_that_never_read_are_dropped(tenants: Tenants) -> None:
    """Twenty clients request long responses, do not read them, and disconnect, which ends their requests."""
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 5}
    sent = json.dumps(body).encode()
    key = b"authorization: " + tenants.ours.header.encode()
    lines = [b"POST /v1/completions HTTP/1.1", b"host: a", key, b"content-length: %d" % len(sent), b"", b""]
    memory = tenants.service.memory()
    with other_client_is_served(tenants) as took:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                each = stack.enter_context(socket.socket())
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                each.connect(("127.0.0.1", tenants.service.port))
                each.sendall(b"\r\n".join(lines) + sent)
            wait_for(lambda: tenants.service.metric("num_requests_running") >= 20)
            served = len(took)
            wait_for(lambda: len(took) >= served + 10)
        wait_for(lambda: tenants.service.metric("num_requests_running") <= 1)
    assert all(now < memory[pid] + (200 << 20) for pid, now in tenants.service.memory().items())
