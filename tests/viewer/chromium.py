"""A headless Chromium that tests drive as a user does, by mouse and keyboard, over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--remote-debugging-port=0", "--remote-allow-origins=*", "--disable-dev-shm-usage",
)  # fmt: skip
KEY_CODES = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9}
WAIT_S = 60.0


class PageLeft(Exception):
    """The page was left for another one while an expression was evaluated."""


def find_chromium() -> str:
    """The path of the browser; a test without one is skipped, or fails in CI."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium: CI installs it (`apt-get install chromium`)")
        pytest.skip("no chromium is installed; `apt-get install chromium` brings it")
    return path


class Page:
    """A tab: `evaluate`, `press`, `click` and `until` act in it; `problems` are what its console said."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(event["params"]["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.problems.append(event["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._answers[number], WAIT_S)
        if "navigated" in str(answer.get("error")):
            raise PageLeft(method)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, url: str, condition: str = "document.body?.dataset.ready") -> None:
        await self.call("Page.navigate", url=url)
        await self.until(condition)

    async def until(self, condition: str) -> Any:
        """Waits until an expression is true, and returns its value; the page may be another one meanwhile."""
        end = asyncio.get_running_loop().time() + WAIT_S
        while True:
            with contextlib.suppress(PageLeft):
                if value := await self.evaluate(f"((value) => (value instanceof Node ? true : value))({condition})"):
                    return value
                text = await self.evaluate("document.body?.innerText.slice(0, 1500)")
                assert asyncio.get_running_loop().time() < end, f"{condition} was not so: {self.problems}\n{text}"
            await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        code = KEY_CODES.get(key, 0)
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            values = {
                "type": kind,
                "key": key,
                "windowsVirtualKeyCode": code,
                "text": text if kind == "keyDown" else "",
            }
            await self.call("Input.dispatchKeyEvent", **values)

    async def type(self, text: str) -> None:
        for character in text:
            await self.press(character)

    async def click(self, selector: str, text: str = "") -> None:
        """Clicks with the mouse into the first element that the selector finds and that holds the text."""
        place = await self.until(
            f"(() => {{ const node = [...document.querySelectorAll({json.dumps(selector)})]"
            f".find((each) => each.textContent.includes({json.dumps(text)})); if (!node) return null;"
            "node.scrollIntoView({block: 'center'}); const box = node.getClientRects()[0];"
            "return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **sizes)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def open_browser(profile: Path) -> AsyncIterator[Page]:
    """Starts the browser with a new profile, and yields its tab."""
    process = await asyncio.create_subprocess_exec(
        find_chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank",
        stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(WAIT_S):
            while not (port_file.exists() and "\n" in port_file.read_text()):
                await asyncio.sleep(0.05)
        address = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"
        async with aiohttp.ClientSession() as session:
            tabs = await (await session.get(f"{address}/json/list")).json()
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                listener = asyncio.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                yield page
                listener.cancel()
    finally:
        process.terminate()
        await process.wait()
