"""The console's files: what is served, with which headers, and what is not."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from syringa.config import Config
from syringa.http.routes.console import MEDIA_TYPES, STATIC, ConsoleFiles
from tests.client import client

POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


def files(folder: Path, **content: str) -> ConsoleFiles:
    for name, text in content.items():
        (folder / name.replace("_", ".")).write_text(text)
    return ConsoleFiles(folder)


async def test_root_is_the_console_without_a_key() -> None:
    async with client(config=Config(api_key=("secret",))) as http:
        page = await http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.content == (STATIC / "index.html").read_bytes()
        assert (await http.get("/console")).content == page.content
        assert (await http.get("/v1/me")).status_code == 401  # the API is not public


async def test_head_of_root_answers_without_a_body() -> None:
    async with client() as http:
        answer = await http.head("/", headers={"x-api-key": "any", "anthropic-version": "2023-06-01"})
        assert answer.status_code == 200


async def test_every_file_is_served_with_its_type_and_strict_headers() -> None:
    async with client(config=Config(api_key=("secret",))) as http:
        types = ".ts"  # for editors and checks: browsers do not need them
        paths = [path for path in STATIC.rglob("*") if path.is_file() and path.suffix != types]
        assert paths
        for path in paths:
            answer = await http.get(f"/console/{path.relative_to(STATIC).as_posix()}")
            assert answer.status_code == 200, path
            assert answer.content == path.read_bytes()
            assert answer.headers["content-type"] == MEDIA_TYPES[path.suffix]
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["vary"] == "accept-encoding"


async def test_file_is_compressed_for_clients_that_accept_it() -> None:
    content = (STATIC / "index.html").read_bytes()
    async with client() as http:
        async with http.stream("GET", "/", headers={"accept-encoding": "br, gzip;q=0.5"}) as answer:
            raw = b"".join([chunk async for chunk in answer.aiter_raw()])
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(raw) == content
        assert len(raw) < len(content)
        for accepted in ("identity", "gzip;q=0, br", ""):
            plain = await http.get("/", headers={"accept-encoding": accepted})
            assert "content-encoding" not in plain.headers
            assert plain.content == content


async def test_file_is_not_sent_again_while_it_is_the_same() -> None:
    async with client() as http:
        for encoding in ("gzip", "identity"):
            headers = {"accept-encoding": encoding}
            etag = (await http.get("/", headers=headers)).headers["etag"]
            for given in (etag, f"W/{etag}", f'"other", {etag}', "*"):
                again = await http.get("/", headers=headers | {"if-none-match": given})
                assert (again.status_code, again.content) == (304, b"")
                assert again.headers["etag"] == etag
            other = await http.get("/", headers=headers | {"if-none-match": '"other"'})
            assert other.status_code == 200


async def test_changed_file_has_another_etag(tmp_path: Path) -> None:
    found = files(tmp_path, app_js="let a = 1;")
    first = await found.find("app.js")
    (tmp_path / "app.js").write_text("let b = 22;")
    second = await found.find("app.js")
    assert first is not None
    assert second is not None
    assert (first.content, second.content) == (b"let a = 1;", b"let b = 22;")
    assert first.digest != second.digest
    (tmp_path / "app.js").unlink()
    assert await found.find("app.js") is None


@pytest.mark.parametrize(
    "path",
    [
        *("", ".", "..", "../secret.js", "a/../../secret.js", "/etc/passwd", "//app.js", "app.js/", "a//app.js"),
        *("..\\secret.js", ".hidden.js", "_private.js", "app.py", "README.md", "app.js\0", "a", "missing.js", "%2e%2e"),
        *("link.js", "APP.JS", "app.js\n"),
    ],
)
async def test_nothing_else_is_found(path: str, tmp_path: Path) -> None:
    (tmp_path / "secret.js").write_text("secret")
    folder = tmp_path / "static"
    (folder / "a").mkdir(parents=True)
    for name in ("app.js", ".hidden.js", "_private.js", "app.py", "README.md", "a/app.js"):
        (folder / name).write_text("text")
    os.symlink(tmp_path / "secret.js", folder / "link.js")
    found = ConsoleFiles(folder)
    assert await found.find("app.js") is not None
    assert await found.find("a/app.js") is not None
    assert await found.find(path) is None


@pytest.mark.parametrize("path", ["..%2f__init__.py", "css%2f..%2f..%2f__init__.py", "__init__.py", "none.js"])
async def test_server_answers_404_for_paths_outside(path: str) -> None:
    async with client() as http:
        answer = await http.get(f"/console/{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "file_not_found"


async def test_folder_redirects_to_the_page_relative_to_it() -> None:
    async with client(config=Config(root_path="/llm")) as http:
        answer = await http.get("/llm/console/")
        assert (answer.status_code, answer.headers["location"]) == (307, "../")
        assert (await http.get("/llm/")).content == (await http.get("/")).content
        assert (await http.get("/llm/console/index.html")).status_code == 200


async def test_page_has_no_absolute_urls_and_nothing_inline() -> None:
    """A proxy may serve it below another path, and the policy forbids inline scripts and styles."""
    page = (STATIC / "index.html").read_text()
    assert '="/' not in page
    assert "http:" not in page
    assert "style=" not in page
    assert "<style" not in page
    assert page.count("<script") == page.count("<script src=") + page.count('<script type="module" src=')


async def test_without_the_console_root_is_text_and_files_are_missing() -> None:
    async with client(config=Config(console=False)) as http:
        page = await http.get("/")
        assert (page.text, page.headers["content-type"]) == ("Syringa is running\n", "text/plain; charset=utf-8")
        for path in ("/console/index.html", "/console/"):
            assert (await http.get(path)).status_code == 404


async def test_console_is_not_served_to_pages_of_other_hosts_without_keys() -> None:
    async with client() as http:
        assert (await http.get("/console/index.html", headers={"host": "evil.example"})).status_code == 403
