from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from syringa.errors import InvalidRequest
from syringa.prompt.images import fetch as module
from syringa.prompt.images.fetch import FetchLimits, fetch, is_allowed_address
from tests.prompt.images.web import Web, redirect, refused, response, serving

HERE = FetchLimits(allow_private=True, max_bytes=1000, timeout=5.0)
PUBLIC = FetchLimits(allow_private=False, max_bytes=1000, timeout=5.0)


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    async with serving() as web:
        yield web


def resolving(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> list[str]:
    """Makes names resolve to addresses, one list a lookup; the names that were looked up."""
    looked_up: list[str] = []

    def getaddrinfo(host: str, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        looked_up.append(host)
        if host not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in names[host]]

    monkeypatch.setattr(module.socket, "getaddrinfo", getaddrinfo)
    return looked_up


@pytest.mark.parametrize(
    "address",
    [
        *(
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "192.0.0.8",
            "192.0.2.1",
            "192.88.99.1",
            "198.18.0.1",
            "198.51.100.7",
        ),
        *("203.0.113.9", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
        *("::", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "100::1"),
        *("2001::1", "2001:0:4136:e378::1", "2001:db8::1", "2002:7f00:1::1", "3fff::1", "5f00::1"),
        *("fe80::1", "fe80::1%eth0", "2606:4700::1%eth0", "fec0::1", "ff02::1", "4000::1"),
    ],
)
def test_addresses_that_nobody_may_reach(address: str) -> None:
    assert not is_allowed_address(address, allow_private=False)
    assert not is_allowed_address(address, allow_private=True)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "127.8.8.8",
        "172.16.5.4",
        "172.31.255.255",
        "192.168.1.1",
        "::1",
        "fd00::1",
    ],
)
def test_private_addresses_have_to_be_allowed(address: str) -> None:
    assert not is_allowed_address(address, allow_private=False)
    assert is_allowed_address(address, allow_private=True)


@pytest.mark.parametrize("address", ["8.8.8.8", "100.63.0.1", "172.32.0.1", "192.0.1.1", "2606:4700:4700::1111"])
def test_public_addresses(address: str) -> None:
    assert is_allowed_address(address, allow_private=False)


async def test_a_body(web: Web) -> None:
    web.pages["/a.png?x=1"] = response(b"body")
    assert await fetch(web.url("/a.png?x=1#part"), HERE) == b"body"
    head = web.seen[0].lower()
    assert f"host: 127.0.0.1:{web.port}" in head
    assert "accept-encoding: identity" in head
    assert "cookie" not in head
    assert "authorization" not in head


async def test_nothing_is_taken_from_the_environment(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    web.pages["/a"] = response(b"body")
    assert await fetch(web.url("/a"), HERE) == b"body"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "127.1", "[::1]", "[::ffff:127.0.0.1]"]
)
async def test_this_machine_is_not_public(web: Web, host: str) -> None:
    error = await refused(fetch(web.url("/a", host), PUBLIC))
    assert "no public address" in error.message
    assert not web.seen


async def test_a_private_name_and_an_unknown_one_look_the_same(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {"inside.test": ["10.1.2.3"]})
    inside = await refused(fetch("http://inside.test/", PUBLIC))
    unknown = await refused(fetch("http://unknown.test/", PUBLIC))
    assert inside.message == unknown.message
    assert "10.1" not in inside.message


async def test_the_connection_goes_to_the_address_that_was_checked(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = resolving(monkeypatch, {"pictures.test": ["169.254.169.254", "127.0.0.1"]})
    web.pages["/a"] = response(b"body")
    assert await fetch(web.url("/a", "Pictures.test"), HERE) == b"body"
    assert looked_up == ["pictures.test"]
    assert f"host: pictures.test:{web.port}" in web.seen[0].lower()


async def test_the_next_address_is_tried(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {"pictures.test": ["127.0.0.2", "127.0.0.1"]})  # nothing listens on the first
    web.pages["/a"] = response(b"body")
    assert await fetch(web.url("/a", "pictures.test"), HERE) == b"body"


def certificate(folder: Path, name: str) -> Path:
    """A key and a certificate for it that nobody signed."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -keyout a.pem -out b.pem"
    )
    options = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    subprocess.run([*command.split(), *options], cwd=folder, check=True, capture_output=True)
    file = folder / "both.pem"
    file.write_bytes((folder / "a.pem").read_bytes() + (folder / "b.pem").read_bytes())
    return file


async def test_a_certificate_is_the_host_s_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = certificate(tmp_path, "pictures.test")
    resolving(monkeypatch, {"pictures.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]})
    monkeypatch.setattr(module, "_tls", lambda: ssl.create_default_context(cafile=str(file)))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(file)
    names: list[str | None] = []
    tls.sni_callback = lambda connection, name, context: names.append(name)
    async with serving(tls) as web:
        web.pages["/a"] = response(b"body")
        assert await fetch(f"https://pictures.test:{web.port}/a", HERE) == b"body"
        error = await refused(fetch(f"https://other.test:{web.port}/a", HERE))
    assert "no connection" in error.message
    assert names == ["pictures.test", "other.test"]


@pytest.mark.parametrize(
    ("url", "said"),
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
async def test_urls_that_are_not_fetched(url: str, said: str) -> None:
    error = await refused(fetch(url, HERE))
    assert said in error.message
    assert error.code == "invalid_image_url"
    assert "secret" not in error.message


async def test_redirects_are_followed(web: Web) -> None:
    web.pages["/1"] = redirect("/2", "301 Moved Permanently")
    web.pages["/2"] = redirect(web.url("/3"), "307 Temporary Redirect")
    web.pages["/3"] = redirect("4", "303 See Other")
    web.pages["/4"] = response(b"body")
    web.pages["/0"] = redirect("/1")
    assert await fetch(web.url("/1"), HERE) == b"body"
    assert "more than 3 times" in (await refused(fetch(web.url("/0"), HERE))).message


async def test_every_redirect_is_checked(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {"pictures.test": ["127.0.0.1"], "meta.test": ["169.254.169.254"]})
    for to, said in {
        "http://meta.test/": "no address that may be fetched",
        "http://169.254.169.254/latest": "no address that may be fetched",
        "file:///etc/passwd": "only http",
        "http://a:b@pictures.test/": "user name",
        "http://[::1": "no complete and valid answer",
    }.items():
        web.pages["/a"] = redirect(to)
        assert said in (await refused(fetch(web.url("/a", "pictures.test"), HERE))).message


async def test_a_name_that_moves_between_redirects(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is one for all hops: what was public at first is looked up and checked again."""
    monkeypatch.setattr(module, "_PRIVATE", [])  # so that this server counts as public, and only 10.0.0.0/8 does not
    monkeypatch.setattr(module, "_SPECIAL", [module.ipaddress.ip_network("10.0.0.0/8")])
    names = {"moving.test": ["127.0.0.1"]}
    looked_up = resolving(monkeypatch, names)

    async def move(writer: asyncio.StreamWriter) -> None:
        names["moving.test"] = ["10.0.0.1"]
        writer.write(redirect("/b"))

    web.pages["/a"] = move
    assert "no public address" in (await refused(fetch(web.url("/a", "moving.test"), PUBLIC))).message
    assert looked_up == ["moving.test", "moving.test"]


async def test_nothing_is_carried_over_a_redirect(web: Web) -> None:
    web.pages["/a"] = response(b"", "302 Found", location="/b", set_cookie="a=b")
    web.pages["/b"] = response(b"body")
    assert await fetch(web.url("/a"), HERE) == b"body"
    assert "cookie" not in web.seen[1].lower()
    assert "referer" not in web.seen[1].lower()


@pytest.mark.parametrize(
    "status", ["204 No Content", "206 Partial Content", "304 Not Modified", "403 Forbidden", "500 Oops"]
)
async def test_other_answers_are_named(web: Web, status: str) -> None:
    web.pages["/a"] = response(b"", status)
    assert f"status {status[:3]}" in (await refused(fetch(web.url("/a"), HERE))).message


async def test_a_redirect_to_nowhere(web: Web) -> None:
    web.pages["/a"] = response(b"", "302 Found")
    assert "status 302" in (await refused(fetch(web.url("/a"), HERE))).message


async def test_a_host_that_is_no_name() -> None:
    with pytest.raises(InvalidRequest, match="not a URL"):
        await fetch("http://xn--/", FetchLimits(allow_private=True, max_bytes=10, timeout=1))
