"""Speed of the console in Chromium: opening it, streaming a long answer, scrolling a long conversation, memory.

    python -m bench.console

The engine is a fake one, so that only the browser is measured. Nothing else should run on the machine: times are those
of the clock, but for `stream_longest_task_cpu_ms`, which is the longest task of the page's main thread in CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page

from tests.chat_models import plain_model
from tests.client import server
from tests.console.browser import chromium, open_page
from tests.fake_engine import FakeEngine

TOKENS, TOKENS_PER_SECOND, MESSAGES, CHATS = 4000, 300, 200, 10
OPENINGS = 5
TOKEN_CHARACTERS = 4

PARAGRAPH = (
    "## Section {n}\n\nA **prefix cache** keeps keys and values of prompts that were computed before, so that a new "
    "prompt that begins with the *same* tokens reuses them instead of computing them again.\n\n"
    "- blocks of 16 tokens\n- found by `hash`\n- shared by forks\n\n"
    "```python\ndef lookup(blocks):\n    return [cache.get(each) for each in blocks]\n```\n\n"
    "| step | cost |\n| --- | ---: |\n| hit | 0 |\n| miss | {n} |\n\n"
)

WATCH_LONG_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((each) => each.duration)))
  .observe({type: 'longtask', buffered: true});
"""
SCROLL = """
async () => {
  const box = document.querySelector('.thread-scroller');
  const gaps = [];
  let last = await new Promise(requestAnimationFrame);
  for (const step of [-90, 90]) {
    for (let frame = 0; frame < 300; frame += 1) {
      box.scrollTop += step;
      const now = await new Promise(requestAnimationFrame);
      gaps.push(now - last);
      last = now;
    }
  }
  return gaps.sort((a, b) => a - b);
}
"""


class PacedEngine(FakeEngine):
    """Generate `1 / delay` steps per second however long each takes: a step that is late does not delay the others."""

    async def wait_for_step(self, started: float, step: int) -> None:
        await asyncio.sleep(max(0.0, started + (step + 1) * self.delay - time.monotonic()))


def long_answer(characters: int) -> str:
    text, number = "", 0
    while len(text) < characters:
        number += 1
        text += PARAGRAPH.format(n=number)
    return text[:characters]


def long_conversation() -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    chosen: dict[str, str] = {}
    for number in range(MESSAGES):
        parent = messages[-1]["id"] if messages else None
        text = long_answer(1600) if number % 2 else f"Question {number}: what is a prefix cache?"
        role = "assistant" if number % 2 else "user"
        messages.append({"id": f"msg_{number}", "parent": parent, "role": role, "text": text})
        chosen[parent or "root"] = f"msg_{number}"
    thread = {"messages": messages, "chosen": chosen}
    return {"format": "syringa-conversation-1", "id": "chat_1", "title": "Long", "threads": [thread]}


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()


async def interactive_ms(page: Page) -> float:
    """Return the time from the navigation until a message can be written."""
    await page.get_by_label("Message", exact=True).wait_for()
    return float(await page.evaluate("performance.now()"))


async def measure_openings(browser: Browser, url: str) -> dict[str, float]:
    """Return the median times of opening the console: with nothing in the browser's cache, and again."""
    cold, warm = [], []
    for _turn in range(OPENINGS):
        async with open_page(browser, url) as (page, _):  # in a profile of its own, which has nothing in its cache
            cold.append(await interactive_ms(page))
            await page.goto("about:blank")
            await page.goto(url)
            warm.append(await interactive_ms(page))
    return {"interactive_cold_ms": statistics.median(cold), "interactive_ms": statistics.median(warm)}


async def heap_megabytes(page: Page) -> float:
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    await session.send("Performance.enable")
    metrics = (await session.send("Performance.getMetrics"))["metrics"]
    await session.detach()
    return next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize") / 1e6


def longest_task(trace: dict[str, Any]) -> float:
    """Return the CPU time of the longest task of the busiest thread, without those of the browser's own tools."""
    events = [each for each in trace["traceEvents"] if each.get("ph") == "X"]
    threads: dict[Any, list[float]] = {}
    for each in events:
        if each["name"] == "RunTask":
            threads.setdefault((each["pid"], each["tid"]), []).append(each.get("tdur", 0) / 1000)
    busiest = max(threads.values(), key=sum)
    return round(sorted(busiest)[-2], 1)  # the longest one starts the trace


async def measure() -> dict[str, Any]:
    answer = long_answer(TOKENS * TOKEN_CHARACTERS)
    engine = PacedEngine(answer, delay=1 / TOKENS_PER_SECOND, at_once=TOKEN_CHARACTERS)
    model = plain_model(max_model_len=1_000_000)
    figures: dict[str, Any] = {}
    async with server(engine, model=model) as http, chromium() as browser:
        url = str(http.base_url).rstrip("/")
        figures |= await measure_openings(browser, url)
        async with open_page(browser, url) as (page, _):
            await page.get_by_label("Message", exact=True).wait_for()
            await page.evaluate(WATCH_LONG_TASKS)
            await page.evaluate("longTasks.length = 0")
            started = await page.evaluate("performance.now()")
            await ask(page, "Explain everything.")
            await page.locator(".figures").wait_for(timeout=300_000)
            tasks = await page.evaluate("longTasks")
            seconds = (await page.evaluate("performance.now()") - started) / 1000
            figures["stream_tokens_per_second"] = round(TOKENS / seconds)
            figures["stream_long_tasks_ms"] = [round(each) for each in tasks]

        async with open_page(browser, url) as (page, _):
            await page.get_by_label("Message", exact=True).wait_for()
            await browser.start_tracing(page=page, categories=["disabled-by-default-devtools.timeline"])
            await ask(page, "Explain everything.")
            await page.locator(".figures").wait_for(timeout=300_000)
            figures["stream_longest_task_cpu_ms"] = longest_task(json.loads(await browser.stop_tracing()))

        async with open_page(browser, url) as (page, _):
            await page.get_by_label("Message", exact=True).wait_for()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "conversation.json"
                path.write_text(json.dumps(long_conversation()))
                await page.get_by_role("button", name="Conversations", exact=True).click()
                await page.get_by_label("Import a conversation").last.set_input_files(path)
                await page.get_by_role("article").nth(MESSAGES - 1).wait_for()
            await page.wait_for_timeout(4000)
            gaps = await page.evaluate(SCROLL)
            figures["scroll_frames"] = len(gaps)
            figures["scroll_gap_p50_ms"] = round(gaps[len(gaps) // 2], 1)
            figures["scroll_gap_p99_ms"] = round(gaps[int(len(gaps) * 0.99)], 1)

        engine.delay, engine.at_once = 0.0, 400
        async with open_page(browser, url) as (page, _):
            await page.get_by_label("Message", exact=True).wait_for()
            heaps = []
            for number in range(CHATS):
                await page.get_by_role("button", name="New chat").first.click()
                await ask(page, f"Chat {number}")
                await page.locator(".figures").wait_for()
                await page.wait_for_timeout(300)
                heaps.append(round(await heap_megabytes(page), 1))
            figures["heap_megabytes_after_each_chat"] = heaps
    return figures


def table(figures: dict[str, Any]) -> str:
    """Return the figures as the rows of the table in docs/performance.md."""
    tasks = ", ".join(f"{each} ms" for each in figures["stream_long_tasks_ms"]) or "none"
    heaps = figures["heap_megabytes_after_each_chat"]
    rows = [
        (
            "first page, from navigation to interactive, nothing cached",
            f"{figures['interactive_cold_ms']:.0f} ms",
            "≤ 1 s",
        ),
        ("the same with its files in the browser's cache", f"{figures['interactive_ms']:.0f} ms", ""),
        (
            f"answer of {TOKENS:,} tokens at {TOKENS_PER_SECOND} tok/s, as they arrive in the page",
            f"{figures['stream_tokens_per_second']} tok/s",
            "",
        ),
        ("tasks of the main thread over 50 ms meanwhile", tasks, "none"),
        ("longest task, CPU time", f"{figures['stream_longest_task_cpu_ms']} ms", ""),
        (
            f"conversation of {MESSAGES} messages, gap between frames while scrolling, p99",
            f"{figures['scroll_gap_p99_ms']} ms",
            "≤ 50 ms",
        ),
        ("memory of the page after the first and the tenth long chat", f"{heaps[0]} and {heaps[-1]} MB", "flat"),
    ]
    lines = ["| | measured | target |", "| --- | ---: | ---: |", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(line.replace("|  |", "| |") for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures to this file as JSON")
    arguments = parser.parse_args()
    figures = asyncio.run(measure())
    text = json.dumps(figures, indent=2)
    print(text, table(figures), sep="\n\n")
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
