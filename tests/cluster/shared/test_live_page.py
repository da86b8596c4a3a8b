"""The live page in a real browser, while a model is served and answers."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from tests.cluster.serving import Serving
from tests.support.browser import CHROMIUM, browser, browser_page

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]

MARKUP = "<img src=x onerror=document.title='taken'><b>w</b>"
# `change`: what is done to a document before the page sees it.
CHANGED = """
window.change = () => {};
const real = window.fetch;
window.fetch = async (path, options) => {
  const response = await real(path, options);
  if (path !== "v1/alignedserve/live") return response;
  const sample = await response.json();
  window.change(sample);
  return new Response(JSON.stringify(sample));
};
"""
HOSTILE = f"""window.change = ({{ models: [{{ load }}] }}) => {{
  load.workers[0].worker = load.trees[0].place = "{MARKUP}";
}}"""
LOST = "window.change = () => { throw new TypeError('Failed to fetch'); }"
SECTIONS = (
    *("Requests by class", "Where the workers' time goes", "Workers", "Context lengths", "Objectives"),
    *("Usage by key", "Batches"),
)
STATE = "document.getElementById('state').innerText"


def _answer_until(ended: threading.Event, cluster: Serving) -> None:
    """Ask for one answer after another."""
    while not ended.is_set():
        cluster.complete(max_tokens=64, ignore_eos=True)


async def test_the_live_page_shows_a_cluster_at_work(cluster: Serving, tmp_path: Path) -> None:
    ended = threading.Event()
    asking = [threading.Thread(target=_answer_until, args=(ended, cluster)) for _ in range(4)]
    for thread in asking:
        thread.start()
    try:
        with browser(tmp_path / "profile") as address:
            await _look(address, cluster.url, tmp_path)
    finally:
        ended.set()
        for thread in asking:
            await asyncio.to_thread(thread.join)


async def _look(address: str, url: str, folder: Path) -> None:
    async with browser_page(address, folder) as page:
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=CHANGED)
        await page.open(f"{url}/dashboard")
        await page.until("/^[1-9][\\d,]*\\s*tokens.s$/.test(document.querySelector('.tile .big')?.innerText)")
        await page.until(f"{STATE} === 'Ready'")
        assert len(await page.texts(".tile")) == 6
        assert await page.texts("section:not([hidden]) > .head h2") == list(SECTIONS)
        assert len(await page.texts("#workers tbody tr")) == 2
        await page.until("document.querySelectorAll('#tree .node').length > 0")
        assert await page.run("[1, 0.9996, 0.5, 0.0002, 0].map(percent)") == [
            "100 %",
            "99.96 %",
            "50 %",
            "0.02 %",
            "0 %",
        ]
        await page.resize(390, 780)
        assert await page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        await page.run(HOSTILE)
        await page.until(f"document.querySelector('#workers tbody td').textContent === {json.dumps(MARKUP)}")
        assert await page.texts("main img, main b:not(.legend b)") == []
        assert await page.run("document.title") == "AlignedServe, live"
        await page.run(LOST)
        await page.until(f"{STATE} === 'No connection; trying again.'")
        await page.run("window.change = () => {}")
        await page.until(f"{STATE} === 'Ready'")
        assert page.problems == []
        assert [asked for asked in page.requested if not asked.startswith(url)] == []
