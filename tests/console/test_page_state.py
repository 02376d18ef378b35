"""What pages keep and what they leave out: drafts, chosen models, cursors, long tables and exact axes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, Page, Route, expect

from syringa.config import Config
from tests.chat_models import plain_model
from tests.client import server
from tests.console.browser import open_page
from tests.embedding_models import embedding_model
from tests.fake_engine import FakeEngine
from tests.http.routes.test_admin import stored_key

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

# The background of each level of a token's probability, on the pages that show them.
COLORS = """
async () => {
  await new Promise((done) => {
    const link = Object.assign(document.createElement('link'), { rel: 'stylesheet', onload: done });
    link.href = 'console/pages/chat/chat.css';
    document.head.append(link);
  });
  const color = (name) => {
    const probe = Object.assign(document.createElement('span'), { className: name });
    document.body.append(probe);
    return getComputedStyle(probe).backgroundColor;
  };
  return [0, 1, 2, 3, 4, 5].map((level) => [color(`heat heat-${level}`), color(`token level-${level}`)]);
}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(port=0, drain_timeout=1.0, database=str(tmp_path / "syringa.db"))


def address(http: httpx.AsyncClient) -> str:
    return str(http.base_url).rstrip("/")


async def go_to(page: Page, name: str) -> None:
    await page.get_by_role("navigation", name="Pages", exact=True).get_by_role("link", name=name, exact=True).click()
    await expect(page.get_by_role("heading", level=1, name=name, exact=True)).to_be_visible()


async def replace_models(page: Page, ids: list[str], kind: str) -> None:
    """List these models in the place of the server's, from the next time that the page looks."""

    async def answer(route: Route) -> None:
        data = [{"id": each, "object": "model", "kind": kind, "status": "loaded"} for each in ids]
        await route.fulfill(json={"object": "list", "data": data})

    await page.unroute("**/v1/models")
    await page.route("**/v1/models", answer)


# Completions


async def test_text_that_no_key_has_typed_moves_the_cursor(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("a + b"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions") as (page, _),
    ):
        await page.get_by_role("tab", name="Fill in the middle", exact=True).click()
        area = page.get_by_role("textbox", name="Text, with the cursor where something is missing", exact=True)
        await area.fill("add = ")
        await area.press("End")
        await page.keyboard.insert_text("1 + ")  # as an input method does: there is no event of a key
        await page.get_by_role("button", name="Fill in at the cursor", exact=True).click()
        await expect(area).to_have_value("add = 1 + a + b")


async def test_first_text_is_filled_in_where_something_is_missing(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("a + b"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions") as (page, _),
    ):
        await page.get_by_role("tab", name="Fill in the middle", exact=True).click()
        await page.get_by_role("button", name="Fill in at the cursor", exact=True).click()
        area = page.get_by_role("textbox", name="Text, with the cursor where something is missing", exact=True)
        await expect(area).to_have_value("def add(a, b):\n    return a + b\n\nprint(add(2, 3))\n")


async def test_failed_completion_has_no_probabilities(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions") as (page, watched),
    ):
        watched.allow("400")
        await page.get_by_label("Maximum tokens", exact=True).fill("-3")
        await page.get_by_role("button", name="Complete", exact=True).click()
        await expect(page.get_by_role("alert").filter(has_text="max_tokens")).to_be_visible()
        await expect(page.get_by_role("heading", name="Probabilities", exact=True)).to_have_count(0)


async def test_probabilities_have_the_colors_of_chats(browser: Browser, config: Config) -> None:
    async with server(FakeEngine("x"), config, model=plain_model()) as http:
        for dark in (False, True):
            async with open_page(browser, address(http), path="/completions", dark=dark) as (page, _):
                await expect(page.get_by_role("button", name="Complete", exact=True)).to_be_visible()
                colors = await page.evaluate(COLORS)
                assert all(ours == theirs for ours, theirs in colors)
                assert len({ours for ours, _ in colors}) == 6


@pytest.mark.parametrize("path", ["/completions", "/embeddings"])
async def test_model_that_was_removed_is_not_used(browser: Browser, config: Config, path: str) -> None:
    kind = "embed" if path == "/embeddings" else "generate"
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/status") as (page, watched),
    ):
        watched.allow("404")
        await page.clock.install()
        await replace_models(page, ["old", "new"], kind)
        await page.goto(f"{address(http)}/#{path}")
        await page.get_by_label("Model", exact=True).select_option("old")
        await replace_models(page, ["new"], kind)
        async with page.expect_response("**/v1/models"):
            await page.clock.fast_forward(20_000)
        shown = page.get_by_role("option", name="old", exact=True)
        await expect(shown).to_have_count(0)
        name = "Compare" if path == "/embeddings" else "Complete"
        async with page.expect_request(lambda each: each.method == "POST") as sent:
            await page.get_by_role("button", name=name, exact=True).click()
        assert json.loads((await sent.value).post_data or "")["model"] == "new"
        await expect(page.get_by_role("alert")).to_be_visible()  # the server has no such model
        await page.unroute_all(behavior="ignoreErrors")


# Drafts


async def test_drafts_stay_while_other_pages_are_shown_and_until_signing_out(browser: Browser, config: Config) -> None:
    admin = await stored_key(config.database, admin=True)
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions", key=admin) as (page, _),
    ):
        text = page.get_by_role("textbox", name="Text", exact=True)
        await text.fill("Lilacs bloom")
        await page.get_by_role("tab", name="Fill in the middle", exact=True).click()
        middle = page.get_by_role("textbox", name="Text, with the cursor where something is missing", exact=True)
        await middle.fill("one two")
        await middle.press("Home")
        await go_to(page, "Status")
        await go_to(page, "Completions")
        await expect(text).to_have_value("Lilacs bloom")
        await page.get_by_role("tab", name="Fill in the middle", exact=True).click()
        await expect(middle).to_have_value("one two")
        assert await middle.evaluate("(area) => area.selectionStart") == 0
        await page.get_by_role("button", name="Sign out", exact=True).click()
        await page.get_by_label("API key", exact=True).fill(admin)
        await page.get_by_role("button", name="Sign in", exact=True).click()
        await expect(text).to_have_value("The lilac is a shrub that")


async def test_lines_to_compare_stay_while_another_page_is_shown(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine(), config, model=embedding_model()) as http,
        open_page(browser, address(http), path="/embeddings") as (page, _),
    ):
        lines = page.get_by_label("Texts, one on each line", exact=True)
        await lines.fill("ab\nba")
        await go_to(page, "Status")
        await go_to(page, "Embeddings")
        await expect(lines).to_have_value("ab\nba")


# Usage


async def test_usage_of_many_users_is_shown_in_part(browser: Browser, config: Config) -> None:
    counts = ("ok", "cancelled", "refused", "failed", "input_tokens", "cached_tokens", "output_tokens")
    today = datetime.now(UTC).date().isoformat()
    rows = [
        {"day": today, "user": f"user-{each:04}", "requests": each, "reasoning_tokens": 0, "cost": 0}
        | dict.fromkeys(counts, 0)
        for each in range(1, 3001)
    ]

    async def answer(route: Route) -> None:
        await route.fulfill(json={"object": "list", "data": rows})

    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/status") as (page, _),
    ):
        await page.route("**/admin/usage?*", answer)
        await page.goto(f"{address(http)}/#/usage")
        await page.get_by_label("Group by", exact=True).select_option("user")
        table = page.get_by_role("table", name="Usage by user", exact=True)
        await expect(table.get_by_role("row")).to_have_count(101)
        await expect(table.get_by_role("row").nth(1)).to_contain_text("user-3000")
        await expect(page.get_by_text("2,900 more are in the CSV file.", exact=True)).to_be_visible()
        await table.get_by_role("button", name="Requests", exact=True).click()
        await expect(table.get_by_role("row").nth(1)).to_contain_text("user-0001")  # sorted before it is cut
        requests = page.locator(".stat", has=page.get_by_text("Requests", exact=True))
        await expect(requests.locator("dd")).to_contain_text("4.5M")
        await page.unroute_all(behavior="ignoreErrors")


# Figures


async def test_short_times_and_low_prices_have_the_digits_that_count(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/status") as (page, _),
    ):
        script = """async () => {
          const { money, seconds } = await import('./console/format.js');
          return [
            [0, 0.0004, 0.0025, 0.005, 0.0075, 0.00994, 0.00996, 0.0125].map(seconds),
            [0, 0.003, 0.15, 0.6, 0.1234, 2.5].map(money),
          ];
        }"""
        assert await page.evaluate(script) == [
            ["0 ms", "0.4 ms", "2.5 ms", "5 ms", "7.5 ms", "9.9 ms", "10 ms", "13 ms"],
            ["$0", "$0.003", "$0.15", "$0.60", "$0.1234", "$2.50"],
        ]  # fmt: skip


async def test_lines_of_the_grid_have_the_values_that_they_show(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/status") as (page, _),
    ):
        ticks = await page.evaluate(
            """async () => {
              const { html, render } = await import('./console/lib.js');
              const { Chart } = await import('./console/ui/chart.js');
              const found = [];
              for (const highest of [0.0001, 0.009, 0.0125, 0.04, 0.25, 1, 2.5, 700, 2.5e6]) {
                const box = document.createElement('div');
                document.body.append(box);
                const seen = new Set();
                render(html`<${Chart} label="x" times=${[1, 2]} series=${[{ label: 'a', values: [0, highest] }]}
                  format=${(value) => { seen.add(value); return ''; }} />`, box);
                await new Promise(requestAnimationFrame);
                found.push([...seen].filter((each) => each !== highest));
              }
              return found;
            }"""
        )
        for values in ticks:
            assert len(values) >= 3
            step = f"{values[1] - values[0]:.0e}"
            assert step[0] in "125"
            assert [f"{each:.6e}" for each in values] == [f"{n * float(step):.6e}" for n in range(len(values))]


async def test_counts_of_the_moment_have_no_decimals(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/status") as (page, _),
    ):
        running = page.locator(".stat", has=page.get_by_text("Running", exact=True))
        await expect(running.locator("small")).to_have_text("0 waiting")
        await expect(running.locator("dd")).to_have_text("00 waiting")  # the count, and the line below it


async def test_legend_of_a_chart_is_aligned_with_its_title(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("Hi!"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/status") as (page, _),
    ):
        assert (await http.post("/v1/completions", json={"prompt": "Hi"})).status_code == 200
        card = page.locator(".card", has=page.get_by_role("heading", name="Tokens per second", exact=True))
        label = card.locator(".u-series").first.locator("th > :not(.u-marker)")
        await expect(label).to_be_visible()
        title = await card.get_by_role("heading", name="Tokens per second", exact=True).bounding_box()
        legend = await label.bounding_box()
        assert title is not None
        assert legend is not None
        assert abs(title["x"] - legend["x"]) <= 1
        assert await label.evaluate("(each) => getComputedStyle(each).fontWeight") == "400"


async def test_card_of_the_only_model_is_as_wide_as_the_page(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/models", size=(1440, 900)) as (page, _),
    ):
        card = page.locator(".model-card")
        await expect(card).to_be_visible()
        widths = await card.evaluate("(each) => [each.offsetWidth, each.parentElement.offsetWidth]")
        assert widths[0] == widths[1] > 800
