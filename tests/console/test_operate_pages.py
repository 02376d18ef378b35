"""Models, status and fleet in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from playwright.async_api import Browser, Locator, Page, Route, expect

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import ReplicaState
from syringa.fleet.pools import PoolSpec
from syringa.fleet.schedule import PoolSchedule, PoolWindow
from syringa.http.server.listener import listen
from syringa.http.server.server import serve_api
from syringa.service.app_state import AppState
from tests.chat_models import plain_model
from tests.client import eventually, server
from tests.console.axe import check_page
from tests.console.browser import DESKTOP, PHONE, choose, open_page
from tests.e2e.server import Server, serve
from tests.embedding_models import embedding_model
from tests.fake_engine import FakeEngine
from tests.http.routes.test_admin import stored_key
from tests.http.routes.test_fleet import ClusterEngines

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(port=0, drain_timeout=1.0, database=str(tmp_path / "syringa.db"))


def address(http: httpx.AsyncClient) -> str:
    return str(http.base_url).rstrip("/")


# Models


def card_of(page: Page, model: str) -> Locator:
    return page.locator(".model-card", has=page.get_by_text(model, exact=True))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Server]:
    with serve("--served-model-name", "smollm2", "--max-model-len", "512", "--requests-per-minute", "0") as running:
        yield running


async def test_models_stay_in_their_places_when_they_are_loaded(browser: Browser, smollm2: Server) -> None:
    async with httpx.AsyncClient(base_url=smollm2.url, timeout=60) as http:
        added = await http.put("/admin/models/spare", json={"path": "default", "max_model_len": 256})
        assert added.status_code == 200, added.text
        async with open_page(browser, smollm2.url, path="/models") as (page, _):
            names = page.locator(".model-card .model-name")
            spare, released = card_of(page, "spare"), asyncio.Event()

            async def hold(route: Route) -> None:
                await released.wait()
                await route.continue_()

            await page.route("**/admin/models/*/load", hold)
            await expect(card_of(page, "smollm2").get_by_text("loaded", exact=True)).to_be_visible()
            await card_of(page, "smollm2").get_by_role("button", name="Unload smollm2", exact=True).click()
            await expect(card_of(page, "smollm2").get_by_text("cold", exact=True)).to_be_visible()
            await spare.get_by_role("button", name="Load spare", exact=True).click()
            await expect(spare.get_by_text("loading", exact=True)).to_be_visible()
            released.set()
            await expect(spare.get_by_text("loaded", exact=True)).to_be_visible()
            await expect(names).to_have_text(["smollm2", "spare"])
            await card_of(page, "smollm2").get_by_role("button", name="Load smollm2", exact=True).click()
            await expect(card_of(page, "smollm2").get_by_text("loaded", exact=True)).to_be_visible()
        assert (await http.delete("/admin/models/spare")).status_code == 200


class Pulls:
    """Answers in the place of `/admin/models/pull…`: no network is needed, and every look finds more."""

    def __init__(self) -> None:
        self.pulls: list[dict[str, Any]] = []
        self.started: list[dict[str, Any]] = []
        self.most = 900_000_000  # bytes that arrive
        self._ids = itertools.count(1)

    async def route(self, page: Page) -> None:
        await page.route("**/admin/models/pull*", self._answer)
        await page.route("**/admin/models/pulls/*", self._answer)

    async def _answer(self, route: Route) -> None:
        request = route.request
        if request.method == "POST":
            body = json.loads(request.post_data or "{}")
            self.started.append(body)
            pull = {
                "object": "pull", "id": f"pull_{next(self._ids)}", "model": body["model"],
                "serve_as": body.get("id") or body["model"], "status": "running", "stage": "downloading",
                "completed_bytes": 0, "total_bytes": 1_000_000_000, "bytes_per_second": 1e7, "files": [],
                "error": None, "created_at": 1, "updated_at": 1, "ended_at": None,
            }  # fmt: skip
            self.pulls.insert(0, pull)
            await route.fulfill(status=202, json=pull)
        elif request.method == "DELETE":
            id = request.url.rpartition("/")[2]
            (pull,) = [each for each in self.pulls if each["id"] == id]
            if pull["status"] == "running":
                pull["status"] = "cancelled"
            else:
                self.pulls.remove(pull)
            await route.fulfill(json=pull)
        else:
            for pull in self.pulls:
                if pull["status"] == "running":
                    pull["completed_bytes"] = min(pull["completed_bytes"] + 100_000_000, self.most)
            await route.fulfill(json={"object": "list", "data": self.pulls})


@SIZES
async def test_model_is_pulled_with_progress_and_canceled(
    browser: Browser, smollm2: Server, size: tuple[int, int]
) -> None:
    pulls = Pulls()
    async with open_page(browser, smollm2.url, path="/status", size=size) as (page, _):
        await pulls.route(page)
        await page.goto(f"{smollm2.url}/#/models")
        await page.get_by_role("button", name="Pull a model", exact=True).click()
        dialog = page.get_by_role("dialog", name="Pull a model")
        await expect(dialog.get_by_role("row").nth(1)).to_be_visible()
        await check_page(page)
        await dialog.get_by_label("From the Hugging Face Hub", exact=True).fill("lilac/some-GGUF:Q8_0")
        await dialog.get_by_label("Serve as", exact=True).fill("mine")
        await dialog.get_by_role("button", name="Pull", exact=True).click()
        await expect(dialog).to_have_count(0)
        assert pulls.started == [{"model": "lilac/some-GGUF:Q8_0", "id": "mine"}]
        progress = page.get_by_role("progressbar", name="Download of lilac/some-GGUF:Q8_0")
        await expect(progress).to_be_visible()
        await expect(page.get_by_text("900 MB of 1.0 GB, 10.0 MB/s, 10.0 s left")).to_be_visible()
        await expect(progress).to_have_attribute("value", "900000000")
        await check_page(page)
        await page.get_by_role("button", name="Cancel the download").click()
        await expect(page.get_by_text("cancelled", exact=True)).to_be_visible()
        await page.locator(".pull").get_by_role("button", name="Try again").click()
        await expect(progress).to_be_visible()
        await expect(page.locator(".pull")).to_have_count(1)  # it continues the one that was canceled
        pulls.most = 1_000_000_000
        await expect(page.locator(".pull").get_by_text("verifying", exact=True)).to_be_visible()
        await expect(page.locator(".pull-figures")).to_have_text("1.0 GB of 1.0 GB")
        pulls.pulls[0].update(status="failed", error="The host cannot be reached.")
        await expect(page.get_by_text("The host cannot be reached.")).to_be_visible()
        await page.get_by_role("button", name="Forget the download").click()
        await expect(page.locator(".pull")).to_have_count(0)
        await page.unroute_all(behavior="ignoreErrors")


# Status


@SIZES
async def test_status_shows_figures_of_the_chosen_time(browser: Browser, config: Config, size: tuple[int, int]) -> None:
    async with (
        server(FakeEngine("Hello."), config, model=plain_model(id="m")) as http,
        open_page(browser, address(http), path="/status", size=size) as (page, _),
    ):
        await expect(page.get_by_role("heading", name="No traffic in this time")).to_be_visible()
        await check_page(page)
        body = {"prompt": "Hi", "max_tokens": 4}
        for _ in range(3):
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": 3})).status_code == 400
        await expect(page.get_by_role("heading", name="Errors by kind")).to_be_visible()
        await expect(page.get_by_text("Invalid request: 1", exact=True)).to_be_visible()
        requests = page.locator(".stat", has=page.get_by_text("Requests", exact=True))
        await expect(requests.locator("dd")).to_have_text(re.compile("^4"))
        await expect(page.locator("figure.chart")).to_have_count(7)
        await expect(page.get_by_label("Requests that ended", exact=True).locator("figcaption")).to_contain_text("ok")
        await check_page(page)
        for name in ("1 hour", "6 hours", "24 hours", "7 days", "30 days"):
            tab = page.get_by_role("tab", name=name, exact=True)
            await tab.click()
            await expect(tab).to_have_attribute("aria-selected", "true")
            await expect(requests.locator("dd")).to_have_text(re.compile("^4"))
        await expect(page.get_by_role("table", name="Public status").get_by_role("row").nth(1)).to_contain_text("m")


async def test_model_that_generates_nothing_shows_the_tokens_that_it_reads(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=embedding_model(id="tiny")) as http,
        open_page(browser, address(http), path="/status") as (page, _),
    ):

        async def answer(route: Route) -> None:
            response = await route.fetch()
            body = await response.json()
            read = {"prompt_tokens_per_second": [42] * len(body["times"])}
            totals = body["all"]["totals"] | {"input_tokens": 321}
            body["models"] = [body["all"] | {"id": "tiny", "totals": totals} | read]
            await route.fulfill(response=response, json=body)

        await page.route("**/admin/series?*", answer)
        await page.goto(f"{address(http)}/#/models")
        card = card_of(page, "tiny")
        hour = card.locator(".stat", has=page.get_by_text("Last hour", exact=True))
        await expect(hour).to_contain_text("321 tokens in")
        await expect(card.locator(".u-series").nth(1).locator(".u-value")).to_have_text("42")
        await page.unroute_all(behavior="ignoreErrors")


async def test_status_of_now_does_not_depend_on_the_chosen_time(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/models") as (page, _),
    ):

        async def answer(route: Route) -> None:
            response = await route.fetch()
            body = await response.json()
            for name in ("tokens_per_second", "running"):
                body["all"][name][-1] = 42 if "range=5m" in route.request.url else 7
            await route.fulfill(response=response, json=body)

        await page.route("**/admin/series?*", answer)
        await page.goto(f"{address(http)}/#/status")
        for name in ("30 days", "5 minutes"):
            await page.get_by_role("tab", name=name, exact=True).click()
            for label in ("Generated now", "Running"):
                stat = page.locator(".stat", has=page.get_by_text(label, exact=True))
                await expect(stat.locator("dd")).to_contain_text("42")
        await page.unroute_all(behavior="ignoreErrors")


async def test_range_tabs_are_moved_through_by_arrow_keys(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/status") as (page, _),
    ):
        await page.get_by_role("tab", name="5 minutes", exact=True).press("ArrowRight")
        tab = page.get_by_role("tab", name="1 hour", exact=True)
        await expect(tab).to_be_focused()
        await expect(tab).to_have_attribute("aria-selected", "true")


# Fleet


class FleetEngines(ClusterEngines):
    """Engines of a cluster whose pools follow operators."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas_drained: list[tuple[str, float]] = []
        before = self.status_of_fleet
        self.status_of_fleet = replace(before, moves=[*before.moves] * 30)  # more than are visible at once

    def replicas(self, model: str) -> Sequence[ReplicaState]:
        ready = ReplicaState("m-1", "ready", node="gpu-1", fingerprint="5c0e9ab0f1dd3ab6")
        return [ready, ReplicaState("m-2", "loading", node="gpu-1")]

    def drain(self, replica: str, grace: float) -> None:
        self.replicas_drained.append((replica, grace))

    def set_pool(self, pool: str, open: bool | None) -> None:
        super().set_pool(pool, open)
        before = self.status_of_fleet
        pools = [replace(each, override=open) if each.name == pool else each for each in before.pools]
        self.status_of_fleet = replace(before, pools=pools)


@contextlib.asynccontextmanager
async def fleet_server(config: Config, engines: FleetEngines) -> AsyncIterator[str]:
    listener = listen(config)
    models = FixedModels([plain_model(id="m")])
    task = asyncio.create_task(serve_api(config, engines, models, listener, AppState(config)))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


@SIZES
async def test_fleet_shows_pools_nodes_replicas_and_moves(
    browser: Browser, tmp_path: Path, size: tuple[int, int]
) -> None:
    window = PoolWindow(days=("fri", "sun"), start="22:00", end="06:00")
    schedule = PoolSchedule(mode="scheduled", timezone="Europe/Berlin", windows=(window,))
    config = Config(
        port=0,
        drain_timeout=1.0,
        cluster=True,
        database=str(tmp_path / "syringa.db"),
        pools=(PoolSpec(name="night", schedule=schedule),),
    )
    engines = FleetEngines()
    async with (
        fleet_server(config, engines) as url,
        open_page(browser, url, path="/fleet", size=size) as (page, _),
    ):
        pools = page.get_by_role("table", name="Pools", exact=True)
        await expect(pools.get_by_role("row").nth(1)).to_contain_text("lost: gpu-2")
        names = page.locator(".timeline-names")
        await expect(names).to_contain_text("fri, sun 22:00–06:00 (Europe/Berlin)")
        bars = page.locator(".timeline-open.scheduled")
        await expect(bars).to_have_count(3)
        # Friday 22:00 to Saturday 06:00, and Sunday 22:00 to Monday 06:00, which is at both ends of the week.
        spans = [(await bar.get_attribute("x"), await bar.get_attribute("width")) for bar in await bars.all()]
        assert spans == [("0", "360"), (str(4 * 1440 + 1320), "480"), (str(6 * 1440 + 1320), "120")]
        await expect(page.get_by_text("node gpu-2 is lost").first).to_be_visible()
        await check_page(page)
        actions = page.get_by_role("button", name="Actions of pool night", exact=True)
        await choose(page, actions, "Open")
        await expect(pools.get_by_role("row").nth(1)).to_contain_text("open by an operator")
        await choose(page, actions, "Close")
        await expect(pools.get_by_role("row").nth(1)).to_contain_text("closed by an operator")
        await choose(page, actions, "Follow the schedule")
        await expect(pools.get_by_role("row").nth(1)).to_contain_text("scheduled")
        assert await eventually(lambda: engines.pools == [("night", True), ("night", False), ("night", None)])
        await page.get_by_role("button", name="Drain node gpu-1", exact=True).click()
        dialog = page.get_by_role("dialog", name="Drain node gpu-1?", exact=True)
        await dialog.get_by_label("Seconds to finish", exact=True).fill("60")
        await check_page(page)
        asked = time.monotonic()
        await dialog.get_by_role("button", name="Drain", exact=True).click()
        await expect(dialog).to_have_count(0)
        assert time.monotonic() - asked >= 1.0  # when the node is listed as draining, which takes most of a second
        assert engines.drained == [("gpu-1", 60.0)]
        await page.get_by_role("button", name="Drain replica m-1", exact=True).click()
        await page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
        await expect(page.get_by_role("dialog")).to_have_count(0)
        assert engines.replicas_drained == [("m-1", 1.0)]


async def test_fleet_is_for_administrators(browser: Browser, tmp_path: Path) -> None:
    config = Config(port=0, drain_timeout=1.0, cluster=True, database=str(tmp_path / "syringa.db"))
    admin, key = await stored_key(config.database, admin=True), await stored_key(config.database, "acme")
    engines = FleetEngines()
    async with fleet_server(config, engines) as url:
        async with open_page(browser, url, path="/fleet", key=admin) as (page, _):
            await choose(page, page.get_by_role("button", name="Actions of pool night", exact=True), "Close")
            pools = page.get_by_role("table", name="Pools", exact=True)
            await expect(pools.get_by_role("row").nth(1)).to_contain_text("closed by an operator")
        async with open_page(browser, url, path="/fleet", key=key) as (page, _):
            await expect(page.get_by_role("heading", name="There is no page /fleet")).to_be_visible()
            await expect(page.get_by_role("link", name="Fleet")).to_have_count(0)
    assert engines.pools == [("night", False)]


async def test_fleet_is_not_shown_without_a_cluster(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/status") as (page, _),
    ):
        pages = page.get_by_role("navigation", name="Pages")
        await expect(pages.get_by_role("link", name="Status", exact=True)).to_be_visible()
        await expect(page.get_by_role("link", name="Fleet")).to_have_count(0)
