"""A Chromium without a window, driven by its own protocol (Chrome DevTools)."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.waiting import holds_async, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
)


class Tab:
    """A page of a browser. Expressions are JavaScript and may be promises."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self.session: dict[str, str] = {}  # empty: the browser itself is called
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []  # errors and warnings of the page
        self.requested: list[str] = []  # URLs

    async def read(self) -> None:
        """Read what the browser says, until it ends."""
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Network.requestWillBeSent":
                self.requested.append(event["params"]["request"]["url"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] != "verbose":
                self.problems.append(event["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params, **self.session})
        async with asyncio.timeout(20.0):
            answer = await self._answers[number]
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    async def run(self, expression: str) -> Any:
        """Return what an expression is."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = await self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""

        async def is_true() -> bool:
            return bool(await self.run(expression))

        try:
            await holds_async(is_true)
        except TimeoutError:
            body = await self.run("document.body.innerText")
            raise AssertionError(f"never true: {expression}\n{body}\n{self.problems}") from None

    async def open(self, url: str) -> None:
        """Load a page."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def fill(self, selector: str, text: str) -> None:
        field = f"Object.assign(document.querySelector({json.dumps(selector)}), {json.dumps({'value': text})})"
        await self.run(f"{field}.dispatchEvent(new Event('change'))")

    async def submit(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).requestSubmit()")

    async def texts(self, selector: str) -> list[str]:
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        texts: list[str] = await self.run(f"{elements}.map((element) => element.innerText.trim())")
        return texts

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)


@contextmanager
def browser(folder: Path) -> Iterator[str]:
    """Start a browser whose profile is in the folder. Yields the address at which it is driven."""
    assert CHROMIUM is not None, "there is no Chromium"
    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = folder / "DevToolsActivePort"  # port and path
    try:
        wait_until(lambda: address.exists() and len(address.read_text().split()) == 2, 30.0, process.poll, 0.05)
        port, path = address.read_text().split()
        yield f"http://127.0.0.1:{port}{path}"
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def browser_page(address: str, downloads: Path) -> AsyncIterator[Tab]:
    """Open a page with storage of its own in a browser."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        page = Tab(socket)
        reading = asyncio.create_task(page.read())
        context = await page.call("Target.createBrowserContext", disposeOnDetach=True)
        target = await page.call("Target.createTarget", url="about:blank", **context)
        attached = await page.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        await page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads), **context)
        permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        await page.call("Browser.grantPermissions", permissions=permissions, **context)
        page.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.resize(1280, 860)
        yield page
        reading.cancel()
