"""A vLLM server over HTTP: its token interface, its commands for reinforcement learning, and our worker extension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.engines.servers.http import HttpRefusal, HttpUnreachable, check_token
from agentgym.engines.servers.server_connection import ServerConnection
from agentgym.engines.servers.server_process import ServerProcess
from agentgym.engines.servers.serving_settings import COMMAND_S
from agentgym.engines.vllm.api import Holding, VllmReply, join_pieces, read_reply
from agentgym.errors import EngineError

__all__ = ["VllmServer"]

_PAUSES = {"abort": "mode=abort&clear_cache=true", "keep": "mode=keep&clear_cache=false"}
_PAUSES["preempt"] = "mode=keep&clear_cache=true"
_PREFIX = "generate-tokens-"
"""The prefix that a server puts before our request ids."""


class VllmServer(ServerConnection):
    """A `VllmTransport` over HTTP.

    `stream` reads replies as they are sampled: of a server that dies, what arrived is returned as cut short.
    """

    def __init__(
        self,
        url: str,
        process: ServerProcess | None = None,
        *,
        secret: str = "",
        request_s: float = 600.0,
        stream: bool = False,
    ) -> None:
        super().__init__(url, process, secret=secret)
        self._request_s, self._streams = request_s, stream

    async def context_window(self) -> int:
        """Returns the window that `/v1/models` reports; raises EngineError if this is not a vLLM server."""
        try:
            answer = await self.get("/v1/models", timeout_s=60.0)
        except HttpRefusal as error:
            check_token(error, self.name)
            raise
        try:
            return int(answer["data"][0]["max_model_len"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"{self.name} is not a vLLM server: /v1/models gave {str(answer)[:80]!r}") from error

    async def generate(
        self, prompt_ids: Sequence[int], params: Mapping[str, object], *, rid: str, cache_salt: str
    ) -> VllmReply:
        """Samples one reply, in one answer or as a stream."""
        payload: dict[str, object] = {
            "request_id": rid,
            "token_ids": list(prompt_ids),
            "sampling_params": params,
            "cache_salt": cache_salt,
        }
        if self._streams:
            return await self._read_stream(payload)
        answer = await self.post("/inference/v1/generate", payload, timeout_s=self._request_s)
        return read_reply(answer, name=self.name)

    async def abort(self, rid: str | None) -> None:
        """Ends the request `rid`, or all of them."""
        await self._order("/abort_requests", {"request_ids": [] if rid is None else [_PREFIX + rid]})

    async def pause(self, holding: Holding) -> None:
        """Stops at a token boundary."""
        await self._order(f"/pause?{_PAUSES[holding]}")

    async def resume(self) -> None:
        """Continues after `pause`."""
        await self._order("/resume")

    async def sleep(self) -> None:
        """Frees the GPU's memory; raises EngineError if the server was started without that."""
        try:
            await self._order("/sleep?level=1")
        except HttpRefusal as error:
            raise EngineError(f"{self.name} cannot sleep ({error}): start it with --enable-sleep-mode") from error

    async def wake(self, parts: Sequence[str]) -> None:
        """Takes memory back."""
        await self._order("/wake_up?" + "&".join(f"tags={part}" for part in parts))

    async def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Drops cached prefixes."""
        answer = await self._order(f"/reset_prefix_cache?reset_running_requests={str(preempt).lower()}")
        return isinstance(answer, dict) and answer.get("success") is True

    async def set_version(self, version: str) -> None:
        """Names the weights."""
        await self._order("/update_weight_version", {"new_version": version})

    async def version(self) -> str:
        """Returns the name of the weights."""
        answer = await self.get("/weight_info", timeout_s=COMMAND_S)
        return str(answer.get("weight_version")) if isinstance(answer, dict) else ""

    async def call(self, method: str, *args: str) -> list[Any]:
        """Returns each worker's answer."""
        answer = await self._order("/collective_rpc", {"method": method, "args": list(args)})
        if not isinstance(answer, dict) or not isinstance(answer.get("results"), list):
            raise EngineError(f"{self.name} gave no results of {method!r}: {str(answer)[:200]!r}")
        return list(answer["results"])

    async def is_alive(self) -> bool:
        """Returns whether the server answers at all."""
        try:
            await self.get("/health", timeout_s=5.0)
        except (HttpUnreachable, HttpRefusal):
            return False
        return True

    async def _order(self, path: str, payload: Mapping[str, object] | None = None) -> Any:
        return await self.post(path, payload or {}, timeout_s=COMMAND_S)

    async def _read_stream(self, payload: dict[str, object]) -> VllmReply:
        pieces: list[VllmReply] = []
        stream = self.stream("/inference/v1/generate", {**payload, "stream": True}, timeout_s=self._request_s)
        try:
            async for event in stream:
                if isinstance(event, dict) and "error" in event:
                    raise HttpRefusal(f"{self.name} broke off a reply: {str(event['error'])[:300]}", 500)
                pieces.append(read_reply(event, name=self.name))
        except (HttpUnreachable, HttpRefusal):
            if not pieces:
                raise
        if not pieces:
            raise HttpUnreachable(f"{self.name} closed the stream before anything came")
        return join_pieces(pieces)
