"""`openenv/http://HOST:PORT`, or a folder: an environment of an OpenEnv server; each episode is a WebSocket session."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from agentgym.envs.adapters.openenv_folder import is_folder, url_of_folder
from agentgym.envs.adapters.openenv_tools import LIST_TOOLS, call_of, result_text, takes_calls, tool_specs
from agentgym.envs.base.action import Action
from agentgym.envs.base.card import EnvCard
from agentgym.envs.base.text_env import Info, StepResult
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import NOT_JSON, ConfigError, EnvironmentFault
from agentgym.proxies import proxy_options
from agentgym.refusals import Secrets
from agentgym.tools.calling.definition import Tool
from agentgym.tools.calling.worker import run_sync
from agentgym.types import JSON, ToolSpec
from agentgym.url_credentials import read_key

__all__ = ["OpenEnv", "names"]

_log = logging.getLogger(__name__)
_warned_urls: set[str] = set()  # servers that were warned about
DEFAULT_TURNS = 100
KEY_VARIABLE = "OPENENV_API_KEY"
RETRY_S = 0.2
"""The seconds between two attempts to get a session of a server that has none free."""
OF_THE_PROTOCOL = ("done", "reward", "metadata")
"""The fields that every action or observation of OpenEnv may have in addition to its own."""
MESSAGE_FIELDS = {"message", "tool_calls"}
"""The fields of the actions of `agentgym env serve`."""
AS_REPLY: dict[str, JSON] = {"metadata": {"reply": True}}
"""The mark there of a text that a model wrote, which is not a command that a person typed."""


class OpenEnv(ToolEnv):
    """An environment that an OpenEnv server runs. Each episode is a session of its own there; the seed goes along.

    A server whose actions are MCP tool calls, or one of `agentgym env serve`, gives its own tools. For any other, the
    tool `act` has the server's schema of actions; if an action has one text, a reply without a call is that text. An
    observation is its one text, or else all of its fields as JSON. The reward is the server's, and so are
    `metadata.success` and `metadata.truncated`. A server that does not answer within `reply_timeout_s` has failed.
    The environment variable `api_key_env` holds the server's token; OPENENV_API_KEY may be unset. A folder in place of
    the URL has its server started by the interpreter `python`, or by this one.
    """

    max_turns = DEFAULT_TURNS
    own_split = True  # a seed gives the same task as in the library itself

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        url: str,
        python: str | None = None,
        reply_timeout_s: float = 60.0,
        api_key_env: str = KEY_VARIABLE,
    ) -> None:
        self._place = (url, python)
        self._server = _Server(self._find_url(), reply_timeout_s, api_key_env)
        self._session: _Session | None = None
        self._seed: int | None = None
        self._verdict: Mapping[str, Any] = {}
        self._is_reply = False
        schema = run_sync(self._server.schema())
        own = {name: part for name, part in schema.get("properties", {}).items() if name not in OF_THE_PROTOCOL}
        texts = [name for name, part in own.items() if isinstance(part, dict) and part.get("type") == "string"]
        self._text_field = texts[0] if len(texts) == 1 else None
        super().__init__(render_mode)
        self._is_served = own.keys() == MESSAGE_FIELDS
        self._num_steps = self._num_rewards = 0
        if self._is_served:
            self._take_tools()
        elif takes_calls(own):
            self._text_field = None
            self._add_mcp_tools()
        else:
            self.add_tool(
                Tool(spec=_action_spec(schema, own), fn=self._act, owner=self, timeout_s=None, on_error="raise")
            )
        self.card = EnvCard(
            task=f"Play the environment that is served at {url}.",
            tools=tuple(self.tools),
            reward="What the server pays.",
            reward_range=(-1e9, 1e9),
            data="the server's, under the reset seed",
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Begins an episode; the seed goes to the server."""
        self._seed = seed
        return super().reset(seed=seed, options=options)

    def start(self, options: dict[str, Any]) -> str:
        """Opens a session, and resets the environment there."""
        seed = int(self.np_random.integers(2**31)) if self._seed is None else self._seed
        self._verdict = {}
        self._num_steps = self._num_rewards = 0
        self._server.url = self._find_url()
        self._session, answer = run_sync(self._server.first_answer("reset", {**options, "seed": seed}))
        return self._read_answer(answer)

    def step(self, action: str) -> StepResult:
        """Sends the reply to the server."""
        self._is_reply = isinstance(action, Action) and action.message is not None
        observation, reward, terminated, _, info = super().step(action)
        info["metrics"].pop("success", None)
        if isinstance(self._verdict.get("success"), bool | int | float):
            info["metrics"]["success"] = float(self._verdict["success"])
        truncated = terminated and bool(self._verdict.get("truncated"))
        return observation, reward, terminated and not truncated, truncated, info

    def on_message(self, text: str) -> str:
        """Sends a text, if an action is one."""
        if self._text_field is None:
            return super().on_message(text)
        return self._send_action({self._text_field: text, **(AS_REPLY if self._is_served and self._is_reply else {})})

    def release(self) -> None:
        """Ends the session."""
        session, self._session = self._session, None
        if session is not None:
            run_sync(session.close())
            if self._num_steps and not self._num_rewards and self.url not in _warned_urls:
                _warned_urls.add(self.url)
                _log.warning("the OpenEnv server at %s gave no reward in an episode; it counts as 0", self.url)

    def _find_url(self) -> str:
        """The URL; that of a folder changes with the process that serves it."""
        url, python = self._place
        if python and not is_folder(url):
            raise ConfigError(f"python starts the server of a folder, and {url!r} is none: leave it out")
        self.url = _http(url_of_folder(url, python) if is_folder(url) else url)
        return self.url

    def _act(self, **action: JSON) -> str:
        return self._send_action(action)

    def _send_action(self, action: dict[str, JSON]) -> str:
        return self._read_answer(self._step_session(action))

    def _call_mcp(self, name: str, arguments: dict[str, JSON]) -> str:
        return result_text(self._step_session(call_of(name, arguments)).get("observation") or {})

    def _step_session(self, action: dict[str, JSON]) -> dict[str, Any]:
        assert self._session is not None  # a step comes after a reset
        answer = run_sync(self._session.ask("step", action))
        reward = answer.get("reward")
        self._num_steps += 1
        self._num_rewards += reward is not None
        self.reward += float(reward or 0.0)
        if answer.get("done"):
            self.end(success=False)  # `step` puts the server's verdict in its place
        return answer

    def _read_answer(self, answer: Mapping[str, Any]) -> str:
        observation: Mapping[str, Any] = answer.get("observation") or {}
        metadata = observation.get("metadata")
        self._verdict = metadata if isinstance(metadata, Mapping) else {}
        own = {name: value for name, value in observation.items() if name not in OF_THE_PROTOCOL}
        if not own and isinstance(message := self._verdict.get("message"), str):
            return message
        if len(own) == 1 and isinstance(text := next(iter(own.values())), str):
            return text
        return json.dumps(own, ensure_ascii=False)

    def _take_tools(self) -> None:
        """Takes over the tools and the system prompt of an environment that agentgym serves."""
        metadata = run_sync(self._server.get("/metadata"))
        self.system_prompt = str(metadata.get("system_prompt", ""))
        for tool in metadata.get("tools", ()):
            spec = ToolSpec(tool["name"], tool["description"], tool["parameters"])
            self._add_remote_tool(spec, self._call_served)

    def _add_mcp_tools(self) -> None:
        """Lists the server's tools in a separate session. Raises ConfigError if it lists none."""

        async def list_tools() -> dict[str, Any]:
            session, answer = await self._server.first_answer("step", LIST_TOOLS)
            await session.close()
            return answer

        try:
            answer = run_sync(list_tools())
        except EnvironmentFault as error:
            raise ConfigError(f"the tools of the OpenEnv server at {self.url} cannot be listed: {error}") from error
        for spec in tool_specs(self.url, answer.get("observation") or {}):
            self._add_remote_tool(spec, self._call_mcp)

    def _add_remote_tool(self, spec: ToolSpec, call: Callable[[str, dict[str, JSON]], str]) -> None:
        def remote(**arguments: JSON) -> str:
            return call(spec.name, arguments)

        self.add_tool(Tool(spec=spec, fn=remote, owner=self, timeout_s=None, on_error="raise"))

    def _call_served(self, name: str, arguments: dict[str, JSON]) -> str:
        return self._send_action({"tool_calls": [{"name": name, "arguments": arguments}]})


class _Session:
    """A WebSocket to a server, which gives each one an environment of its own."""

    def __init__(self, http: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, timeout_s: float) -> None:
        self._http = http
        self._socket = socket
        self._timeout_s = timeout_s
        self._is_late = False
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._listening = asyncio.ensure_future(_listen(socket, self._answers))
        # For an environment that is never closed: the finalizer holds both, so they are closed and not just collected.
        self._left_open = weakref.finalize(self, _leave, asyncio.get_running_loop(), http, socket)
        self._left_open.atexit = False

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the answer to a message; raises EnvironmentFault for an error and for no answer."""
        if self._is_late:
            raise EnvironmentFault("the OpenEnv server left a message of this session without an answer: reset")
        try:
            with contextlib.suppress(aiohttp.ClientError, OSError):  # a server that refuses sends a reason and closes
                await self._socket.send_json({"type": kind, "data": data})
            answer = json.loads(await asyncio.wait_for(self._answers.get(), self._timeout_s))
        except (aiohttp.ClientError, TimeoutError, OSError, TypeError, *NOT_JSON) as error:
            self._is_late = True
            reason = (
                f"it closed the session ({self._socket.close_code})" if self._listening.done() else _format_error(error)
            )
            raise EnvironmentFault(f"the OpenEnv server did not answer {kind!r}: {reason}") from error
        content: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            if content.get("code") == "CAPACITY_REACHED":
                raise _ServerFull(f"the OpenEnv server has no free session: {content.get('message')}")
            reason_text = Secrets(self._http.headers, {}).mask_secrets(f"{content.get('code')}: {content}")
            raise EnvironmentFault(f"the OpenEnv server answers {kind!r} with {reason_text}")
        return content

    async def close(self) -> None:
        """Ends the session."""
        self._left_open.detach()
        await _end_session(self._http, self._socket)


class _Server:
    """A server at a URL, the token that it is sent, and the seconds that it may take to answer."""

    def __init__(self, url: str, timeout_s: float, api_key_env: str) -> None:
        key = read_key(api_key_env, default=KEY_VARIABLE)
        self.url = url
        self._proxy = proxy_options(url)
        self._timeout_s = timeout_s
        self._key_variable = api_key_env
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def schema(self) -> dict[str, Any]:
        """The JSON Schema of the server's actions."""
        schema = (await self.get("/schema")).get("action")
        if not isinstance(schema, dict):
            raise ConfigError(f"{self.url}/schema names no actions: that is no OpenEnv server, or one older than 0.2")
        return schema

    async def get(self, path: str) -> dict[str, Any]:
        """The object at a path; raises ConfigError if there is none."""
        url = self.url + path
        try:
            async with (
                aiohttp.ClientSession(
                    headers=self._headers, timeout=aiohttp.ClientTimeout(total=self._timeout_s)
                ) as http,
                http.get(url, **self._proxy) as answer,
            ):
                answer.raise_for_status()
                content = await answer.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            is_refused = isinstance(error, aiohttp.ClientResponseError) and error.status in (401, 403)
            hint = f"Its token belongs into the variable {self._key_variable}" if is_refused else "Is it running?"
            raise ConfigError(f"no OpenEnv server answers at {url}: {_format_error(error)}. {hint}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{url} answers with a {type(content).__name__}, not with an object: no OpenEnv server")
        return content

    async def first_answer(self, kind: str, data: Mapping[str, JSON]) -> tuple[_Session, dict[str, Any]]:
        """Opens a session; returns it and its answer to a first message.

        A server without a free session is asked again until the time-out, as other episodes end meanwhile. Raises
        EnvironmentFault if it gives no session, and as `ask` does.
        """
        until = time.monotonic() + self._timeout_s
        while True:
            session = await self._session()
            try:
                return session, await session.ask(kind, data)
            except _ServerFull as error:
                await session.close()
                if time.monotonic() + RETRY_S > until:
                    raise EnvironmentFault(f"{error}. Lower --concurrency, or let the server hold more") from error
                await asyncio.sleep(RETRY_S)
            except BaseException:
                await session.close()
                raise

    async def _session(self) -> _Session:
        http = aiohttp.ClientSession(headers=self._headers)
        try:
            connecting = http.ws_connect(f"{self.url}/ws", max_msg_size=0, **self._proxy)
            socket = await asyncio.wait_for(connecting, self._timeout_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await http.close()
            raise EnvironmentFault(
                f"the OpenEnv server at {self.url} gives no session: {_format_error(error)}"
            ) from error
        return _Session(http, socket, self._timeout_s)


class _ServerFull(EnvironmentFault):
    """Raised if a server holds as many sessions as it may."""


def names() -> list[str]:
    """Returns an empty list: an id is the URL of a server."""
    return []


def _http(url: str) -> str:
    """The URL of a server with http in place of ws, and without a slash at its end."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("http", "https", "ws", "wss") or not rest:
        raise ConfigError(
            f"an OpenEnv server is named by its URL (openenv/http://127.0.0.1:8000) or its folder; got {url!r}"
        )
    return f"{scheme.replace('ws', 'http')}://{rest.rstrip('/')}"


def _leave(
    loop: asyncio.AbstractEventLoop, http: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse
) -> None:
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(_end_session(http, socket), loop)


async def _listen(socket: aiohttp.ClientWebSocketResponse, answers: asyncio.Queue[str]) -> None:
    """Receives the server's messages at any time: it also pings while the model generates."""
    async for message in socket:
        if message.type is aiohttp.WSMsgType.TEXT:
            answers.put_nowait(message.data)
    answers.put_nowait("")  # no answer


async def _end_session(http: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError):
        if not socket.closed:
            await socket.send_json({"type": "close"})
            await socket.close()
    await http.close()


def _action_spec(schema: Mapping[str, Any], own: Mapping[str, JSON]) -> ToolSpec:
    parameters = {**schema, "type": "object", "properties": dict(own)}
    parameters["required"] = [name for name in schema.get("required", ()) if name in own]
    return ToolSpec("act", str(schema.get("description") or "Does one action."), parameters)


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
