"""The memory of images: sizes are checked from the header, and files count until they are freed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest

from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.fair_thread_pool import FairThreadPool
from syringa.prompt.images import image_file, loader
from syringa.prompt.images.image_file import check_image
from syringa.prompt.images.loader import ImagePolicy, ImageSource, fetch_images
from syringa.prompt.images.memory import ImageMemory, RequestBudget
from syringa.types import in_background
from tests.client import eventually
from tests.prompt.images.test_loader import data_uri, png_bomb, sources
from tests.prompt.images.web_server import WebServer, response, serving
from tests.prompt.images.web_server import image_file as make_file

HERE = ImagePolicy(allow_private=True, max_bytes=100_000, max_pixels=10_000)


@pytest.fixture
async def web() -> AsyncIterator[WebServer]:
    async with serving() as web:
        yield web


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((1, 39_999_999), "1 x 39999999 pixels; 16384 is the most for one side"),
        ((39_999_999, 1), "16384 is the most for one side"),
        ((16_385, 100), "16384 is the most for one side"),
        ((8_000, 8_000), "more than 40000000 pixels"),
        ((1, 201), "one side may be 200 times the other"),
        ((16_384, 81), "one side may be 200 times the other"),
        ((0, 5), "damaged|200 times"),
    ],
)
def test_extreme_image_is_refused_from_its_header(
    size: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_file, "_load", None)
    with pytest.raises(InvalidRequest, match=message):
        check_image(png_bomb(*size), 40_000_000)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_long_image_is_accepted_within_the_limits(kind: str) -> None:
    check_image(make_file(kind, (400, 2)), 10_000)
    check_image(make_file(kind, (100, 30)), 10_000, max_side=100)
    with pytest.raises(InvalidRequest, match="99 is the most for one side"):
        check_image(make_file(kind, (100, 30)), 10_000, max_side=99)


async def test_files_of_a_request_are_bounded_together(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_MAX_FULL_FILES", 3)
    data = make_file()
    policy = msgspec.structs.replace(HERE, max_bytes=len(data))
    web.pages |= {f"/{n}": response(data) for n in range(4)}
    memory = ImageMemory()
    urls = [web.url("/0"), web.url("/1"), data_uri(data)]
    assert len(await fetch_images(sources(*urls, *urls), policy, memory=memory)) == 6
    with pytest.raises(InvalidRequest, match=f"more than {3 * len(data)} bytes in all") as caught:
        await fetch_images(sources(*urls, web.url("/2")), policy, memory=memory)
    assert caught.value.code == "image_file_too_large"
    assert memory.held == 0


async def test_memory_is_held_until_the_images_are_freed(web: WebServer) -> None:
    data = make_file()
    web.pages["/a"] = response(data)
    memory = ImageMemory()
    images = await fetch_images(sources(web.url("/a"), web.url("/a"), data_uri(data)), HERE, "A", memory=memory)
    assert memory.held == 2 * len(data)
    del images[:2]
    assert memory.held
    images.clear()
    assert memory.held == 0


async def test_memory_of_one_organization_leaves_the_other_half() -> None:
    data = make_file()
    memory = ImageMemory()
    policy = msgspec.structs.replace(HERE, max_memory=2 * len(data))
    kept = [await fetch_images(sources(data_uri(data)), policy, "A", memory=memory)]
    with pytest.raises(EngineOverloaded) as caught:
        await fetch_images(sources(data_uri(data)), policy, "A", memory=memory)
    assert caught.value.status == 503
    kept.append(await fetch_images(sources(data_uri(data)), policy, "B", memory=memory))
    with pytest.raises(EngineOverloaded):
        await fetch_images(sources(data_uri(data)), policy, "C", memory=memory)
    kept.clear()
    assert await fetch_images(sources(data_uri(data)), policy, "A", memory=memory)


async def test_memory_is_released_when_an_image_fails(web: WebServer) -> None:
    web.pages |= {"/a": response(make_file()), "/b": response(b"no image")}
    memory = ImageMemory()
    with pytest.raises(InvalidRequest):
        await fetch_images(sources(web.url("/a"), web.url("/b")), HERE, memory=memory)
    assert memory.held == 0


def test_thread_of_an_ended_request_takes_no_memory() -> None:
    memory = ImageMemory()
    budget = RequestBudget(memory, "A", max_pixels=10, max_bytes=10, max_memory=100)
    budget.spend_bytes(5)
    budget.release_with([])
    with pytest.raises(InvalidRequest, match="has ended"):
        budget.spend_bytes(1)
    assert memory.held == 0


async def test_decoding_is_shared_between_organizations(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, order = threading.Event(), []

    def check(data: bytes, *args: object) -> None:
        assert begin.wait(60)
        order.append(data[:1])

    monkeypatch.setattr(loader, "check_image", check)

    async def load(tenant: str, name: bytes, count: int) -> None:
        urls = [data_uri(name + bytes([n])) for n in range(count)]
        await fetch_images([ImageSource(url=url, param="p") for url in urls], HERE, tenant)

    first = asyncio.create_task(load("A", b"a", 8))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.create_task(load("B", b"b", 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    begin.set()
    async with asyncio.timeout(60):
        await asyncio.gather(first, second)
    # Two of the eight were running, and two threads take turns with what waits.
    assert order.index(b"b") <= 4


async def test_images_of_batches_are_decoded_last_and_take_no_memory_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin, begun, order = threading.Event(), threading.Event(), []

    def check(data: bytes, *args: object) -> None:
        begun.set()
        assert begin.wait(60)
        order.append(data[:1])

    pool = FairThreadPool(1, "test")
    monkeypatch.setattr(loader, "_DECODER_THREADS", pool)
    monkeypatch.setattr(loader, "check_image", check)
    memory = ImageMemory()
    policy = msgspec.structs.replace(HERE, max_memory=18)

    async def load(name: bytes, *, background: bool) -> None:
        in_background.set(background)
        urls = [data_uri(name + bytes([n])) for n in range(4)]
        await fetch_images([ImageSource(url=url, param="p") for url in urls], policy, "A", memory=memory)

    batch = asyncio.create_task(load(b"b", background=True))
    assert await asyncio.to_thread(begun.wait, 60)
    interactive = asyncio.create_task(load(b"i", background=False))
    assert await eventually(lambda: sum(map(len, pool._queues.values())) == 7)
    begin.set()
    async with asyncio.timeout(60):
        await asyncio.gather(batch, interactive)
    assert b"".join(order) == b"biiiibbb"
    assert memory.held == 0
    pool.close()
