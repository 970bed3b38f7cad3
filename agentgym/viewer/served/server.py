"""`ViewServer`: serves runs to the viewer's page, on this machine alone and with a token."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from agentgym.errors import AgentGymError, ConfigError
from agentgym.http_guard import HttpGuard, JsonServer, RequestRejected, parse_json_object
from agentgym.viewer.served.page import app_page, login_page
from agentgym.viewer.served.run_comparison import compare_runs
from agentgym.viewer.served.run_view import RunView

__all__ = ["ViewServer"]

MAX_BODY = 1 << 16
INDEX_S = 0.5
"""The seconds for which a run is indexed at a time, after which the next one is."""
POLL_S = 1.0
"""The seconds between two looks at the files of runs that are indexed."""
IDLE_S = 15.0
"""The seconds after the last request after which no file is looked at, until the next one."""
Method = Callable[[RunView, Mapping[str, Any]], object]
METHODS: Mapping[str, Method] = {
    "overview": RunView.overview,
    "failures": RunView.failures,
    "values": RunView.values,
    "episodes": RunView.episodes,
    "episode": RunView.episode,
    "related": RunView.related_episodes,
    "settings": RunView.settings,
}


class ViewServer(JsonServer):
    """Serves the runs; an asynchronous context manager, which listens inside.

    | request | answer |
    |---|---|
    | `GET /?token=TOKEN` | the page |
    | `POST /state` | the runs, how much of each is indexed, and a version that changes when one grows |
    | `POST /compare` | the runs beside each other |
    | `POST /NAME`, `{"run": 0, ...}` | what the method of `METHODS` returns for the run |

    Runs are indexed in a thread while someone looks. Queries run in two others, so that their memory stays bounded.
    `opening_key` is a key that one request may have in place of the token: a browser is started with it, as every user
    of the machine can read the addresses that programs are started with.
    """

    def __init__(
        self, runs: Sequence[RunView], token: str, *, host: str = "127.0.0.1", port: int = 0, opening_key: str = ""
    ) -> None:
        self._runs, self._token = runs, token
        self._keys = {opening_key} - {""}
        self._last_request = time.monotonic()
        self._indexer, self._threads = ThreadPoolExecutor(1, "agentgym-index"), ThreadPoolExecutor(2, "agentgym-view")
        self._task: asyncio.Task[None] | None = None
        endpoints: dict[tuple[str, str], Callable[[bytes], Awaitable[tuple[int, object]]]] = {
            ("GET", "/"): self._page,
            ("POST", "/state"): self._endpoint(lambda _: {"runs": [run.state() for run in self._runs]}),
            ("POST", "/compare"): self._endpoint(lambda _: compare_runs(self._runs)),
        }
        for name, method in METHODS.items():
            endpoints["POST", f"/{name}"] = self._endpoint(self._on_run(method))
        guard = HttpGuard(host, token=token, accepts_key=self._use_key, page_path="/")
        super().__init__(endpoints, guard, host, port, max_body=MAX_BODY, login=login_page())

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._task = asyncio.create_task(self._index_runs())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._indexer.shutdown()
        self._threads.shutdown()
        await super().__aexit__(*error)
        for run in self._runs:
            run.index.close()

    def _use_key(self, key: str) -> bool:
        """Returns True for the opening key, once."""
        is_known = key in self._keys
        self._keys.discard(key)
        return is_known

    async def _page(self, _: bytes) -> tuple[int, object]:
        return 200, app_page(self._token)

    def _on_run(self, method: Method) -> Callable[[Mapping[str, Any]], object]:
        def answer(request: Mapping[str, Any]) -> object:
            number = request.get("run", 0)
            if type(number) is not int or not 0 <= number < len(self._runs):
                raise ConfigError(f"there is no run {number!r:.80}")
            return method(self._runs[number], request)

        return answer

    def _endpoint(
        self, answer: Callable[[Mapping[str, Any]], object]
    ) -> Callable[[bytes], Awaitable[tuple[int, object]]]:
        async def endpoint(body: bytes) -> tuple[int, object]:
            self._last_request = time.monotonic()
            request = parse_json_object(body)
            try:
                return 200, await asyncio.get_running_loop().run_in_executor(self._threads, answer, request)
            except (AgentGymError, OSError, sqlite3.DatabaseError) as error:
                message = " ".join(str(error).split())[:500]
                raise RequestRejected(400, "not_shown", message) from error

        return endpoint

    async def _index_runs(self) -> None:
        """Indexes what the runs have written, in turn, while someone looks."""
        loop = asyncio.get_running_loop()
        while True:
            is_whole = True
            if time.monotonic() - self._last_request < IDLE_S:
                for run in self._runs:
                    try:
                        is_whole &= await loop.run_in_executor(self._indexer, run.index.update, INDEX_S)
                    except (AgentGymError, OSError, sqlite3.DatabaseError):
                        continue  # what is asked of the run names the reason
            await asyncio.sleep(POLL_S if is_whole else 0)
