"""The Fleet page with a real cluster: Ray, nodes on this machine, and replicas of a real model on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from tests.console.axe import check_page
from tests.console.browser import DESKTOP, PHONE, choose
from tests.console.real_server import ORGANIZATION, RealServer, create_key
from tests.e2e.replica_server import ready_replicas
from tests.e2e.server import serve, wait_for
from tests.ray.harness import GUARD_SECONDS
from tests.ray.test_cluster import POOL, SETTINGS, cluster_settings, cluster_with_nodes

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server with two replicas on the nodes of a cluster: a, b and c, and n in a pool of its own."""
    config = tmp_path / "syringa.toml"
    config.write_text(POOL)
    with cluster_with_nodes(tmp_path, "a", "b", "c") as cluster:
        settings = (*SETTINGS, "--config", str(config), "--replicas", "2", *cluster_settings(cluster))
        with serve(*settings, ready=False) as running:
            wait_for(lambda: len(ready_replicas(running)) == 2, GUARD_SECONDS)
            yield running.url


def row_of(page: Page, table: str, name: str) -> Locator:
    """Return the row of a table that is about something, by the name in its first cell."""
    named = page.locator("strong", has_text=re.compile(f"^{re.escape(name)}$"))
    return page.get_by_role("table", name=table, exact=True).get_by_role("row").filter(has=named)


async def ready(real: RealServer) -> list[dict[str, Any]]:
    """Return the replicas that are ready."""
    async with real.http() as http:
        found = (await http.get("/admin/replicas")).raise_for_status().json()["data"]
    return [each for each in found if each["status"] == "ready"]


async def check_ready(page: Page, count: int) -> None:
    table = page.get_by_role("table", name="Replicas", exact=True)
    await expect(table.locator("tbody").get_by_role("row")).to_have_count(count)
    await expect(table.get_by_text("ready", exact=True)).to_have_count(count)


async def drain_node(page: Page, real: RealServer) -> None:
    """Drain the node of a replica, and see another one start elsewhere."""
    replica = min(await ready(real), key=lambda each: each["node"])
    node, row = replica["node"], row_of(page, "Replicas", replica["id"])
    await expect(row.get_by_text("ready", exact=True)).to_be_attached()
    await expect(row.get_by_role("cell", name=node, exact=True)).to_be_attached()
    await page.get_by_role("button", name=f"Drain node {node}", exact=True).click()
    dialog = page.get_by_role("dialog", name=f"Drain node {node}?", exact=True)
    await dialog.get_by_label("Seconds to finish", exact=True).fill("1")
    await check_page(page)
    await dialog.get_by_role("button", name="Drain", exact=True).click()
    await expect(dialog).to_have_count(0)
    await expect(row).to_have_count(0)
    await expect(row_of(page, "Nodes", node)).to_have_count(0)  # it leaves the cluster
    await check_ready(page, 2)
    assert node not in {each["node"] for each in await ready(real)}
    moves = page.get_by_role("list", name="Recent moves", exact=True).get_by_role("listitem")
    await expect(moves.filter(has_text=replica["id"]).first).to_contain_text(f"stop{replica['id']} on {node}")
    await expect(moves.filter(has_text=replica["id"]).first).to_contain_text(f"node {node} is drained")
    await check_page(page)


async def test_node_of_a_cluster_is_seen_and_drained(browser: Browser, url: str) -> None:
    """On a desktop without keys, then on a phone with an administrator's key, which the server needs from then on."""
    real = RealServer(url, "", "")
    async with real.page(browser, DESKTOP, path="/fleet") as (page, _):
        for name in ("a", "b", "c", "n"):
            await expect(row_of(page, "Nodes", name).get_by_text("ready", exact=True)).to_be_attached()
        await expect(row_of(page, "Nodes", "n").get_by_role("cell", name="night", exact=True)).to_be_attached()
        names = page.get_by_role("table", name="Nodes", exact=True).locator("strong")
        await expect(names).to_have_text(["a", "b", "c", "n"])  # in this order, whichever has joined first
        for name in ("default", "night"):
            await expect(row_of(page, "Pools", name).get_by_text("active", exact=True)).to_be_attached()
        await expect(page.locator(".timeline-open")).to_have_count(2)
        await check_ready(page, 2)
        await drain_node(page, real)

    admin = create_key(url, "operators", admin=True)
    real = RealServer(url, create_key(url, ORGANIZATION, signed_in=admin), admin)
    async with real.page(browser, PHONE, path="/fleet", admin=True) as (page, _):
        await drain_node(page, real)
        await choose(page, page.get_by_role("button", name="Actions of pool night", exact=True), "Close")
        night = row_of(page, "Pools", "night")
        await expect(night.get_by_text("inactive", exact=True)).to_be_attached()
        await expect(night).to_contain_text("closed by an operator")
        await check_ready(page, 2)
        assert "n" not in {each["node"] for each in await ready(real)}
    async with real.page(browser, PHONE, path="/fleet") as (page, _):
        await expect(page.get_by_role("heading", name="There is no page /fleet")).to_be_visible()
