from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from syringa import addresses
from syringa.errors import InvalidRequest
from syringa.prompt.images import fetch as module
from syringa.prompt.images.fetch import FetchLimits, fetch
from tests.network import certificate, patch_resolver
from tests.prompt.images.web_server import WebServer, redirect, rejected, response, serving

HERE = FetchLimits(allow_private=True, max_bytes=1000, timeout=60.0)
PUBLIC = FetchLimits(allow_private=False, max_bytes=1000, timeout=60.0)


@pytest.fixture
async def web() -> AsyncIterator[WebServer]:
    async with serving() as web:
        yield web


async def test_fetch_returns_the_body(web: WebServer) -> None:
    web.pages["/a.png?x=1"] = response(b"body")
    assert await fetch(web.url("/a.png?x=1#part"), HERE) == b"body"
    head = web.seen[0].lower()
    assert f"host: 127.0.0.1:{web.port}" in head
    assert "accept-encoding: identity" in head
    assert "cookie" not in head
    assert "authorization" not in head


async def test_fetch_ignores_proxy_environment_variables(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    web.pages["/a"] = response(b"body")
    assert await fetch(web.url("/a"), HERE) == b"body"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "127.1", "[::1]", "[::ffff:127.0.0.1]"]
)
async def test_fetch_rejects_loopback_hosts(web: WebServer, host: str) -> None:
    error = await rejected(fetch(web.url("/a", host), PUBLIC))
    assert "no public address" in error.message
    assert not web.seen


async def test_private_and_unknown_hosts_give_the_same_error(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_resolver(monkeypatch, {"inside.test": ["10.1.2.3"]})
    inside = await rejected(fetch("http://inside.test/", PUBLIC))
    unknown = await rejected(fetch("http://unknown.test/", PUBLIC))
    assert inside.message == unknown.message
    assert "10.1" not in inside.message


async def test_fetch_connects_to_the_checked_address(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = patch_resolver(monkeypatch, {"pictures.test": ["169.254.169.254", "127.0.0.1"]})
    web.pages["/a"] = response(b"body")
    assert await fetch(web.url("/a", "Pictures.test"), HERE) == b"body"
    assert looked_up == ["pictures.test"]
    assert f"host: pictures.test:{web.port}" in web.seen[0].lower()


async def test_fetch_tries_the_next_address(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_resolver(monkeypatch, {"pictures.test": ["127.0.0.2", "127.0.0.1"]})  # no server on the first
    web.pages["/a"] = response(b"body")
    assert await fetch(web.url("/a", "pictures.test"), HERE) == b"body"


async def test_fetch_verifies_the_certificate_of_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = certificate(tmp_path, "pictures.test")
    patch_resolver(monkeypatch, {"pictures.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]})
    monkeypatch.setattr(module, "_ssl_context", lambda: ssl.create_default_context(cafile=str(file)))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(file)
    names: list[str | None] = []
    tls.sni_callback = lambda connection, name, context: names.append(name)
    async with serving(tls) as web:
        web.pages["/a"] = response(b"body")
        assert await fetch(f"https://pictures.test:{web.port}/a", HERE) == b"body"
        error = await rejected(fetch(f"https://other.test:{web.port}/a", HERE))
    assert "no connection" in error.message
    assert names == ["pictures.test", "other.test"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://example.org/a.png", "only http, https and data"),
        ("file:///etc/passwd", "only http, https and data"),
        ("a.png", "only http, https and data"),
        ("", "only http, https and data"),
        ("http://", "no host"),
        ("http:///a.png", "no host"),
        ("http://user:secret@127.0.0.1/", "user name or a password"),
        ("http://[::1/", "not a URL"),
        ("http://a:b/", "not a URL"),
        ("http://a\n.test/", "not a URL"),
    ],
)
async def test_fetch_rejects_invalid_urls(url: str, message: str) -> None:
    error = await rejected(fetch(url, HERE))
    assert message in error.message
    assert error.code == "invalid_image_url"
    assert "secret" not in error.message


async def test_fetch_follows_redirects(web: WebServer) -> None:
    web.pages["/1"] = redirect("/2", "301 Moved Permanently")
    web.pages["/2"] = redirect(web.url("/3"), "307 Temporary Redirect")
    web.pages["/3"] = redirect("4", "303 See Other")
    web.pages["/4"] = response(b"body")
    web.pages["/0"] = redirect("/1")
    assert await fetch(web.url("/1"), HERE) == b"body"
    assert "more than 3 times" in (await rejected(fetch(web.url("/0"), HERE))).message


async def test_fetch_checks_every_redirect(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_resolver(monkeypatch, {"pictures.test": ["127.0.0.1"], "meta.test": ["169.254.169.254"]})
    for to, message in {
        "http://meta.test/": "no address that may be fetched",
        "http://169.254.169.254/latest": "no address that may be fetched",
        "file:///etc/passwd": "only http",
        "http://a:b@pictures.test/": "user name",
        "http://[::1": "no complete and valid response",
        "data:image/png;base64,AAAA": "not a URL",
        "javascript:alert(1)": "not a URL",
        "data:": "only http",
        "ftp://pictures.test/": "only http",
        "http://xn--a.b/": "not a URL",
        "http://pictures.test:99999/": "port 99999",
        "http://pictures.test:0/": "port 0",
    }.items():
        web.pages["/a"] = redirect(to)
        assert message in (await rejected(fetch(web.url("/a", "pictures.test"), HERE))).message


async def test_fetch_resolves_a_host_again_after_a_redirect(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that was public on the first request is resolved and checked again."""
    monkeypatch.setattr(addresses, "_PRIVATE", [])  # so that loopback counts as public here
    monkeypatch.setattr(addresses, "_SPECIAL", [ipaddress.ip_network("10.0.0.0/8")])
    names = {"moving.test": ["127.0.0.1"]}
    looked_up = patch_resolver(monkeypatch, names)

    async def move(writer: asyncio.StreamWriter) -> None:
        names["moving.test"] = ["10.0.0.1"]
        writer.write(redirect("/b"))

    web.pages["/a"] = move
    assert "no public address" in (await rejected(fetch(web.url("/a", "moving.test"), PUBLIC))).message
    assert looked_up == ["moving.test", "moving.test"]


async def test_fetch_carries_no_cookies_over_a_redirect(web: WebServer) -> None:
    web.pages["/a"] = response(b"", "302 Found", location="/b", set_cookie="a=b")
    web.pages["/b"] = response(b"body")
    assert await fetch(web.url("/a"), HERE) == b"body"
    assert "cookie" not in web.seen[1].lower()
    assert "referer" not in web.seen[1].lower()


@pytest.mark.parametrize(
    "status", ["204 No Content", "206 Partial Content", "304 Not Modified", "403 Forbidden", "500 Oops"]
)
async def test_fetch_reports_other_status_codes(web: WebServer, status: str) -> None:
    web.pages["/a"] = response(b"", status)
    assert f"status {status[:3]}" in (await rejected(fetch(web.url("/a"), HERE))).message


async def test_fetch_reports_a_redirect_without_location(web: WebServer) -> None:
    web.pages["/a"] = response(b"", "302 Found")
    assert "status 302" in (await rejected(fetch(web.url("/a"), HERE))).message


async def test_fetch_rejects_invalid_host_names() -> None:
    with pytest.raises(InvalidRequest, match="not a URL"):
        await fetch("http://xn--/", FetchLimits(allow_private=True, max_bytes=10, timeout=1))
