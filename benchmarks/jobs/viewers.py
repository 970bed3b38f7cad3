"""What a person does to look at a run, in Chromium: with `agentgym view`, Inspect's viewer and trackio's page.

    python benchmarks/jobs/viewers.py RUN --inspect PYTHON --trackio PYTHON

PYTHON is the Python of an environment with `inspect-ai`, or with `trackio`; without one, its viewer is left out. Both
get the episodes of the last evaluation, trackio the metrics too. A row has the clicks, the characters typed and the
seconds from the first of them until the page shows what was wanted; the start has the server's CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.viewer.chromium import Page, open_browser  # noqa: E402

WAIT_S = 120.0
AIM_S = 0.3
"""The seconds that a hand needs before a click."""
TITLE = "document.querySelector('h1')?.innerText"
TEXT = "document.body?.innerText"


class Hand:
    """A person at a page: `do` counts clicks and characters, and prints a row of the table."""

    def __init__(self, page: Page, viewer: str) -> None:
        self.page, self.viewer = page, viewer
        self.clicks = self.characters = 0

    async def click(self, selector: str, text: str = "") -> None:
        """Clicks once, `AIM_S` after what is clicked is shown."""
        self.clicks += 1
        await asyncio.sleep(AIM_S)
        await self.page.click(selector, text)

    async def type(self, text: str) -> None:
        """Types a text, and confirms it."""
        self.characters += len(text)
        await self.page.type(text)
        await self.page.press("Enter")

    async def do(self, job: str, condition: str, *acts: Awaitable[None]) -> Any:
        """Does a job by some acts, until the page fulfils a condition; returns its value."""
        self.clicks = self.characters = 0
        started = time.monotonic()
        for act in acts:
            await act
        value = await self.page.until(condition)
        effort = f"{self.clicks} clicks, {self.characters} characters, {time.monotonic() - started:.1f} s"
        print(f"{self.viewer:9} {job:24} {effort}", flush=True)
        return value


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextmanager
def serve(command: list[str], pattern: str, environ: Mapping[str, str]):  # type: ignore[no-untyped-def]
    """Starts a viewer's server and yields the match of `pattern` in its output, with its CPU seconds so far."""
    with tempfile.NamedTemporaryFile("r") as output, open(output.name, "w") as writing:
        process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=writing, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + WAIT_S
            while not (match := re.search(pattern, Path(output.name).read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} does not answer:\n{Path(output.name).read_text()[-2000:]}")
                time.sleep(0.05)
            times = psutil.Process(process.pid).cpu_times()
            yield match, times.user + times.system
        finally:
            process.terminate()
            process.wait(30)


@asynccontextmanager
async def hand(viewer: str, cpu_s: float, folder: Path) -> AsyncIterator[Hand]:
    """Yields a person at a new browser."""
    print(f"{viewer:9} {'start':24} {cpu_s:.1f} CPU s", flush=True)
    async with open_browser(folder / f"browser-{viewer}") as page:
        await page.resize(1440, 900)
        yield Hand(page, viewer)


async def look_with_agentgym(run: Path, folder: Path, word: str) -> None:
    """Opens, groups, reads, searches."""
    command = [sys.executable, "-m", "agentgym", "view", str(run), "--json"]
    with serve(command, r"\{.*\}", {"XDG_CACHE_HOME": str(folder / "cache")}) as (match, cpu_s):
        about = json.loads(match[0])
        async with hand("agentgym", cpu_s, folder) as person:
            page = person.page
            address = f"{about['url']}/?token={about['token']}"
            await person.do("open a run", "document.querySelector('main h1')", page.open(address))
            await person.do("see failures in groups", "document.querySelector('.causes a')")
            rows = f"{TITLE}?.includes('episode') && document.querySelectorAll('tbody tr').length"
            is_open = f"{TITLE}?.startsWith('Episode ')"
            await person.do(
                "open one of them", is_open, person.click(".causes a"), page.until(rows), person.click("tbody tr td.n")
            )
            await person.do("its tokens", "document.querySelectorAll('.t').length", person.click("button", "tokens"))
            await page.press("e")
            await page.until(f"{TITLE}?.startsWith('Episodes')")
            condition = f"location.hash.includes({word!r}) && !{TITLE}.includes('…') && {TITLE}"
            print(await person.do("search text", condition, person.click("input[type=search]"), person.type(word)))


async def look_with_inspect(python: str, episodes: Path, folder: Path, num_failed: int) -> None:
    """Opens, filters, reads."""
    logs = folder / "logs"
    logs.mkdir()
    subprocess.run([python, HERE / "to_inspect.py", episodes, logs / "episodes.eval"], check=True)
    command = [
        str(Path(python).parent / "inspect"),
        "view",
        "start",
        "--log-dir",
        str(logs),
        "--port",
        str(free_port()),
    ]
    with serve(command, r"http://127\.0\.0\.1:\d+", {"PYTHONPATH": ""}) as (match, cpu_s):
        async with hand("inspect", cpu_s, folder) as person:
            page = person.page
            await person.do("open a run", f"{TEXT}.includes('rows')", page.open(match[0], TEXT))
            filtered = f"{TEXT}.includes('{num_failed} ')"
            await person.do("see failures", filtered, person.click("[contenteditable]"), person.type('success == "I"'))
            is_open = "location.href.includes('/sample')"
            await person.do("open one of them", is_open, person.click("[role=row] [role=gridcell], [role=row] td"))


async def look_with_trackio(python: str, episodes: Path, run: Path, folder: Path) -> None:
    """Opens, goes to the traces, reads one."""
    environ = {"TRACKIO_DIR": str(folder / "trackio"), "PYTHONPATH": ""}
    convert = [python, str(HERE / "to_trackio.py"), str(episodes), str(run / "metrics.jsonl")]
    subprocess.run(convert, check=True, env={**os.environ, **environ}, stdout=subprocess.DEVNULL)
    command = [str(Path(python).parent / "trackio"), "show", "--project", "episodes"]
    with serve(command, r"http://127\.0\.0\.1:\d+\S*", environ) as (match, cpu_s):
        async with hand("trackio", cpu_s, folder) as person:
            page = person.page
            await person.do("open a run", f"{TEXT}.length > 50", page.open(match[0], TEXT))
            await person.do(
                "list the traces", "document.querySelector('.trace-row')", person.click("button, a", "Traces")
            )
            await person.do(
                "open one of them",
                "document.querySelector('.trace-row[aria-expanded=true]')",
                person.click(".trace-row"),
            )


async def main(args: argparse.Namespace) -> None:
    """Does the jobs with each viewer that is there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        episodes = folder / "episodes.jsonl"
        export = [sys.executable, "-m", "agentgym", "episodes", str(args.run), str(episodes), "--phase", "eval_after"]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        num_failed = sum(not json.loads(line)["success"] for line in episodes.read_text().splitlines())
        await look_with_agentgym(args.run, folder, args.word)
        if args.inspect:
            await look_with_inspect(args.inspect, episodes, folder, num_failed)
        if args.trackio:
            await look_with_trackio(args.trackio, episodes, args.run, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--inspect", metavar="PYTHON")
    parser.add_argument("--trackio", metavar="PYTHON")
    parser.add_argument("--word", default="cursed", help="a word that the search looks for")
    asyncio.run(main(parser.parse_args()))
