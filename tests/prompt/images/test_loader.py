from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
import threading
import zlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from syringa.errors import InvalidRequest
from syringa.prompt.images import loader as module
from syringa.prompt.images.image_file import check_image
from syringa.prompt.images.loader import ImagePolicy, ImageSource, fetch_images
from tests.prompt.images.web_server import WebServer, animation, image_file, response, serving

HERE = ImagePolicy(allow_private=True, max_bytes=100_000, max_pixels=10_000)
KINDS = ["PNG", "JPEG", "WEBP", "GIF"]


@pytest.fixture
async def web() -> AsyncIterator[WebServer]:
    async with serving() as web:
        yield web


def sources(*urls: str) -> list[ImageSource]:
    return [ImageSource(url=url, param=f"messages[0].content[{index}].image_url.url") for index, url in enumerate(urls)]


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def rejected(*urls: str, policy: ImagePolicy = HERE, index: int = 0) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await fetch_images(sources(*urls), policy)
    assert caught.value.param == f"messages[0].content[{index}].image_url.url"
    assert caught.value.param in caught.value.message or "at most" in caught.value.message
    return caught.value


async def test_fetch_images_keeps_the_order(web: WebServer) -> None:
    data = [image_file(kind) for kind in KINDS]
    web.pages |= {f"/{index}": response(each, content_type="text/plain") for index, each in enumerate(data)}
    wanted = [
        *(msgspec.structs.replace(each, detail="low") for each in sources(*(web.url(f"/{n}") for n in range(4)))),
        *sources(data_uri(data[0])),
    ]
    got = await fetch_images(wanted, HERE)
    assert [each.data for each in got] == [*data, data[0]]
    assert [each.detail for each in got] == ["low"] * 4 + ["auto"]
    assert got[1].digest == hashlib.sha256(data[1]).digest()
    assert got[0].digest == got[4].digest


async def test_fetch_images_without_sources() -> None:
    assert await fetch_images([], HERE) == []


async def test_fetch_images_fetches_each_url_once(web: WebServer) -> None:
    web.pages["/a"] = response(image_file())
    first, second = sources(web.url("/a"), web.url("/a"))
    got = await fetch_images([first, msgspec.structs.replace(second, detail="high")], HERE)
    assert web.paths() == ["/a"]
    assert [each.detail for each in got] == ["auto", "high"]
    assert got[0].data is got[1].data
    error = await rejected(web.url("/b"), web.url("/b"))
    assert "status 404" in error.message


async def test_fetch_images_bounds_concurrency(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CONCURRENT_FETCHES", 3)

    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.write(response(image_file()))

    web.pages |= {f"/{n}": slow for n in range(7)}
    await fetch_images(sources(*(web.url(f"/{n}") for n in range(7))), HERE)
    assert web.max_concurrent == 3


async def test_first_failure_cancels_the_other_fetches(web: WebServer) -> None:
    async def forever(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    web.pages["/forever"] = forever
    async with asyncio.timeout(30):
        error = await rejected(web.url("/forever"), web.url("/missing"), index=1)
    assert "status 404" in error.message
    assert len(asyncio.all_tasks()) <= 2 + web.concurrent


async def test_fetch_images_bounds_the_number_of_images() -> None:
    uri = data_uri(image_file())
    policy = msgspec.structs.replace(HERE, max_images=2)
    assert len(await fetch_images(sources(uri, uri), policy)) == 2
    assert "at most 2 images" in (await rejected(uri, uri, uri, policy=policy, index=2)).message


async def test_private_addresses_require_permission(web: WebServer) -> None:
    web.pages["/a"] = response(image_file())
    assert "no public address" in (await rejected(web.url("/a"), policy=ImagePolicy())).message


async def test_error_does_not_contain_the_url(web: WebServer) -> None:
    assert "token=secret" not in (await rejected(web.url("/a?token=secret"))).message


@pytest.mark.parametrize(
    "uri",
    [
        data_uri(image_file()),
        data_uri(image_file("JPEG"), "image/png"),
        data_uri(image_file()).replace("data:image/png", "DATA:image/PNG;name=a.png"),
        data_uri(image_file())[:50] + "\r\n " + data_uri(image_file())[50:] + "\n",
    ],
)
async def test_data_uris_are_decoded(uri: str) -> None:
    (image,) = await fetch_images(sources(uri), HERE)
    assert len(image.data) > 100


@pytest.mark.parametrize(
    ("uri", "message", "code"),
    [
        ("data:text/plain;base64,aGk=", "expected data:image/", "invalid_image_url"),
        ("data:image/png,abc", "expected data:image/", "invalid_image_url"),
        ("data:;base64,abcd", "expected data:image/", "invalid_image_url"),
        ("data:image/png;base64", "expected data:image/", "invalid_image_url"),
        ("data:image/png;base64,", "empty", "empty_image_file"),
        ("data:image/png;base64,iVBOR", "not valid base64", "invalid_base64_image"),
        ("data:image/png;base64,iVBO=", "not valid base64", "invalid_base64_image"),
        ("data:image/png;base64,iV-_", "not valid base64", "invalid_base64_image"),
        ("data:image/png;base64,iVBO!!!!", "not valid base64", "invalid_base64_image"),
        ("data:image/png;base64,iVBOü", "not valid base64", "invalid_base64_image"),
        ("data:image/png;base64,aGk=aGk=", "not valid base64", "invalid_base64_image"),
        (data_uri(b"hello world, this is text"), "not a PNG, JPEG, WebP or GIF", "invalid_image_format"),
        (data_uri(b"<svg/>", "image/svg+xml"), "not a PNG, JPEG, WebP or GIF", "invalid_image_format"),
        (data_uri(b"x" * 100_001), "more than 100000 bytes", "image_file_too_large"),
        (data_uri(b"x" * 200_000), "more than 100000 bytes", "image_file_too_large"),
    ],
)
async def test_invalid_data_uris_are_rejected(uri: str, message: str, code: str) -> None:
    error = await rejected(uri)
    assert message in error.message
    assert error.code == code


async def test_large_data_uri_is_rejected_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.binascii, "a2b_base64", lambda *args, **kwargs: pytest.fail("decoded"))
    assert "more than 100000" in (await rejected(data_uri(b"x" * 200_000))).message


async def test_decoding_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(module, "check_image", lambda *args: threads.append(threading.get_ident()))
    await fetch_images(sources(data_uri(b"x")), HERE)
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize("kind", KINDS)
def test_check_image_accepts_all_formats_up_to_the_limit(kind: str) -> None:
    check_image(image_file(kind), 1200)
    with pytest.raises(InvalidRequest, match="more than 1199 pixels"):
        check_image(image_file(kind), 1199)


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 50}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0"}])
def test_check_image_reads_all_webp_headers(options: dict[str, Any]) -> None:
    check_image(image_file("WEBP", **options), 1200)
    with pytest.raises(InvalidRequest, match="pixels"):
        check_image(image_file("WEBP", **options), 1199)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_check_image_accepts_animations(kind: str) -> None:
    check_image(animation(kind), 200)


def test_check_image_accepts_progressive_jpeg() -> None:
    check_image(image_file("JPEG", (200, 100), progressive=True), 20_000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
def test_check_image_rejects_truncated_files(kind: str, share: float) -> None:
    whole = image_file(kind, (90, 80))
    with pytest.raises(InvalidRequest, match="damaged or cut off"):
        check_image(whole[: max(12, int(len(whole) * share))], 10_000)


@pytest.mark.parametrize("kind", KINDS)
def test_check_image_rejects_a_bare_signature(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="damaged or cut off"):
        check_image(image_file(kind)[:12] + b"and then something else, for a good while", 10_000)


@pytest.mark.parametrize(
    "data", [b"BM" + b"\0" * 100, b"II*\0" + b"\0" * 100, b"%PDF-1.7", b"RIFF\0\0\0\0WAVE", b"\x89PN"]
)
def test_check_image_rejects_other_file_types(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a PNG, JPEG, WebP or GIF"):
        check_image(data, 10_000)


def png_bomb(width: int, height: int) -> bytes:
    """Return a file of a few kilobytes that decodes to gigabytes."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1_000_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def webp_bomb() -> bytes:
    chunk = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + b"\xfe\x3f\0" * 2
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


@pytest.mark.parametrize(
    "bomb",
    [
        png_bomb(7000, 7000),
        png_bomb(60_000, 60_000),
        webp_bomb(),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + image_file("GIF")[10:],
    ],
)
def test_decompression_bombs_are_rejected_before_decoding(bomb: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(InvalidRequest, match="more than 40000000 pixels") as caught:
        check_image(bomb, 40_000_000)
    assert caught.value.code == "image_too_large"


async def test_pixel_budget_covers_all_images_of_a_request() -> None:
    policy = ImagePolicy(max_pixels=1200)
    few, many = ([data_uri(image_file("PNG") + bytes([each])) for each in range(count)] for count in (4, 5))
    assert len(await fetch_images(sources(*few), policy)) == 4
    with pytest.raises(InvalidRequest, match="4800 pixels in all"):
        await fetch_images(sources(*many), policy)
