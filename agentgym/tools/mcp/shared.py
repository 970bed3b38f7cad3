"""One stateless server for all episodes of a process, restarted when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from agentgym.tools.mcp.link import McpLink, ServerLost
from agentgym.types import JSON, ToolSpec

__all__ = ["SharedLink"]


class SharedLink:
    """An McpLink that many episodes open and none closes: it ends with the process."""

    def __init__(self, connect: Callable[[], McpLink]) -> None:
        self._connect = connect
        self._opening = asyncio.Lock()
        self._link: McpLink | None = None
        self._specs: Sequence[ToolSpec] = ()

    async def open(self) -> Sequence[ToolSpec]:
        await self._current()
        return self._specs

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> Mapping[str, object]:
        """Calls a tool; a call that lost the server is sent once more, to a fresh one."""
        link = await self._current()
        try:
            return await link.call(name, arguments)
        except ServerLost:
            await self._leave(link)
        link = await self._current()
        try:
            return await link.call(name, arguments)
        except ServerLost:
            await self._leave(link)
            raise

    async def close(self) -> None:
        """Leaves the server to the other episodes."""

    async def _current(self) -> McpLink:
        async with self._opening:
            if self._link is None:
                link = self._connect()
                try:
                    self._specs = await link.open()
                except BaseException:
                    await link.close()
                    raise
                self._link = link
            return self._link

    async def _leave(self, link: McpLink) -> None:
        if self._link is link:
            self._link = None
        await link.close()
