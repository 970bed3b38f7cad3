"""The process that plays an environment of verifiers 0.4 for `verifiers/`; it exchanges lines of JSON over its pipes.

It is run as a file by the interpreter that has verifiers, without its package. An environment of 0.4 is a taskset, and
programs (harnesses) that play it. Here the program is a chat: the model's reply, the calls of the task's own tools, and
the next request. Each line names an episode: `{"agentgym": 1, "row": 3}`, `{"agentgym": 1, "reply": {...}}` and
`{"agentgym": 1, "cancel": true}` come in; `asked`, `ended` and `fault` go out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.clients.client import Client
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire, parse_message
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import connect_mcp, mcp_content_to_chat_content
from verifiers.v1.interception import server as interception_server
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.runtimes import subprocess as subprocess_runtime
from verifiers.v1.utils.loaders import harness_class, load_environment, resolve_env_config

__all__ = ["AgentgymChat"]

CHAT = "agentgym_chat"
"""The name of the program, as of a module of verifiers."""
CHATS = ("bash", "null")
"""The programs of verifiers that the chat replaces: without a container, a model gets no shell."""
READY = 0
"""The number of the messages that are of no episode."""
MAX_INFINITE_ROWS = 1000
UNSCORED = ("setup_timeout", "finalize_timeout", "scoring_timeout")
"""The ends of a rollout that leave no verdict."""


class Refused(Exception):
    """Raised for an environment that cannot be played; its text is for the user."""


@dataclass
class ChatRecord:
    """The conversation of a rollout, as its program has it, and what the model is asked for it."""

    number: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    tool_errors: list[str] = field(default_factory=list)
    reply: asyncio.Future[dict[str, Any]] | None = None


_talks: dict[str, ChatRecord] = {}
"""Maps the id of a trace to its conversation."""
_out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what an environment prints is no message


def write_message(number: int, **message: object) -> None:
    """Writes a message of an episode; raises ValueError for a number that JSON does not have."""
    print(json.dumps({"agentgym": number, **message}, allow_nan=False), file=_out, flush=True)


class AgentgymChat(Harness[HarnessConfig]):  # type: ignore[misc]  # the library has no types here
    """A chat in this process, which verifiers' own would run as a program for each reply to a user."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_MCP: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(self, *parameters: Any) -> Any:
        """Asks the model, and runs the calls of its tools, until a reply calls none."""
        ctx, trace, _, endpoint, secret, mcp_urls, data = parameters
        talk = _talks[trace.id]
        system, prompt = self.resolve_prompt(data)
        messages = talk.messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        headers, limits = {"Authorization": f"Bearer {secret}"}, aiohttp.ClientTimeout(total=None)
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=limits))
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            is_over = False
            while not is_over:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                async with http.post(f"{endpoint}/chat/completions", json=body) as answer:
                    if answer.status != 200:  # the task's own end, or a failure that the rollout has recorded
                        return ProgramResult(exit_code=1, stdout="", stderr=await answer.text())
                    messages.append((await answer.json())["choices"][0]["message"])
                calls = messages[-1].get("tool_calls") or []
                is_over = not calls
                for call in calls:
                    function = call["function"]
                    content = await _call_tool(talk, connections, dispatch, **function)
                    result = {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": content}
                    messages.append(result)
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _call_tool(
    talk: ChatRecord, connections: Mapping[str, Any], dispatch: Mapping[str, tuple[str, str]], name: str, arguments: str
) -> Any:
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(values, dict) or name not in dispatch:
        return f"error: unknown tool {name!r}" if name not in dispatch else "error: tool arguments are a JSON object"
    server, own_name = dispatch[name]
    result = await connections[server].run(lambda client: client.call_tool(own_name, values))
    content = mcp_content_to_chat_content(result.content)
    if result.is_error:
        talk.tool_errors.append(content)
    return content


class PipeClient(Client):  # type: ignore[misc]  # the library has no types here
    """The model of all rollouts: a request goes out as a line, and the reply comes in as one."""

    async def get_response(
        self, dialect: Any, body: dict[str, Any], sampling: object, session_id: str, *_: Any, **rest: Any
    ) -> Any:
        """Returns the reply as the response of a server."""
        talk, request = _talks[session_id], dialect.parse_request(body)
        messages, tools = _plain(request.messages), _plain(request.tools or ())
        talk.reply = asyncio.get_running_loop().create_future()
        write_message(talk.number, asked={"messages": messages, "tools": tools, "tool_errors": talk.tool_errors})
        message = {"role": "assistant", **await talk.reply}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        raw = {"id": CHAT, "object": "chat.completion", "created": 0, "model": CHAT, "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class TasksetPlayer:
    """The environment, and the rollouts that are under way."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._name = name
        self.environment = _make_environment(name, settings)
        taskset = self.environment.taskset
        self.tasks = list(taskset if taskset.bounded else taskset.take(MAX_INFINITE_ROWS))
        if not self.tasks:
            raise Refused(f"{name} has no tasks")
        self._rollouts: dict[int, asyncio.Task[None]] = {}

    def receive(self, message: Mapping[str, Any]) -> None:
        """Begins a rollout, passes on a reply, or ends a rollout."""
        number = message["agentgym"]
        if "row" in message:
            self._rollouts[number] = asyncio.create_task(self._play(number, self.tasks[message["row"]]))
        elif "cancel" in message:
            write_message(number, cancelled=True)  # so an environment that blocks this loop is told from a slow one
            if number in self._rollouts:
                self._rollouts[number].cancel()
        for talk in _talks.values():
            if "reply" in message and talk.number == number and talk.reply is not None and not talk.reply.done():
                talk.reply.set_result(message["reply"])

    async def _play(self, number: int, task: Any) -> None:
        traces: list[Any] = []
        context = ModelContext(model=CHAT, client=EvalClientConfig(base_url="http://127.0.0.1:9", api_key_var=CHAT))
        note = functools.partial(self._note_trace, number, traces)
        try:
            write_message(
                number, **_result(self._name, await self.environment.run_episode(task, context, on_trace=note))
            )
        except Exception as error:  # noqa: BLE001  # the boundary: an environment is foreign code
            write_message(number, fault=f"{type(error).__name__}: {error}")
        finally:
            for trace in traces:
                _talks.pop(trace.id, None)
            self._rollouts.pop(number, None)

    def _note_trace(self, number: int, traces: list[Any], trace: Any) -> None:
        if traces:
            raise RuntimeError(f"{self._name} runs its agent more than once in an episode; one conversation is played")
        traces.append(trace)
        _talks[trace.id] = ChatRecord(number)


def _plain(models: Iterable[Any]) -> list[Any]:
    return [model.model_dump(mode="json") for model in models]


def _result(name: str, episode: Any) -> dict[str, Any]:
    """Returns the verdict of an episode, or why it has none: an error, an unscored end, no reward."""
    if not episode.ok or not episode.traces:
        errors = [error for part in (episode, *episode.traces) for error in part.errors]
        return {"fault": "; ".join(f"{error.type}: {error.message}" for error in errors)}
    (trace,) = episode.traces
    if trace.stop_condition in UNSCORED or None in trace.rewards.values() or not trace.rewards:
        return {"fault": f"{name} gave no reward (its end: {trace.stop_condition})"}
    talk = _talks[trace.id]
    numbers = {**trace.metrics, **{reward: value.score for reward, value in trace.rewards.items()}}
    verdict = {
        "messages": _plain([*map(parse_message, talk.messages)] or trace.messages),
        "tool_errors": talk.tool_errors,
        "reward": float(trace.reward),
        "metrics": {key: float(value) for key, value in numbers.items() if value is not None},
        "timed_out": bool(trace.is_timeout or trace.is_truncated),
    }
    return {"ended": verdict}


def _make_environment(name: str, settings: Mapping[str, Any]) -> Any:
    """Returns the environment with its one agent in this process; raises Refused for what cannot be played."""
    taskset = {"id": name, **settings}
    agents = agent_config_fields(resolve_env_config({"taskset": taskset}))
    if len(agents) != 1:
        raise Refused(f"{name} has {len(agents)} agents ({', '.join(agents)}); one is played")
    ((agent, spec),) = agents.items()
    harness = (spec.harness or default_agent_harness(name)).id
    kind = harness_class(harness)
    if harness not in CHATS and (kind.EXECUTES_CODE or kind.NEEDS_CONTAINER):
        raise Refused(f"{name} brings the program {harness!r}, which runs commands: only chats are played")
    played = {"harness": {"id": CHAT if harness in CHATS else harness}, "runtime": {"type": "subprocess"}}
    environment = load_environment(resolve_env_config({"taskset": taskset, agent: played}))
    if environment.taskset.task_type().NEEDS_CONTAINER:
        raise Refused(f"the tasks of {name} need a container, which is not played")
    return environment


async def _serve(name: str, settings: str) -> None:
    try:
        player = TasksetPlayer(name, json.loads(settings))
    except Exception as error:  # noqa: BLE001  # the boundary: an environment is foreign code
        write_message(READY, refused=str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}")
        return
    interception_server.resolve_client = lambda config: PipeClient()
    reader = asyncio.StreamReader(limit=1 << 30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with player.environment.serving():
        write_message(READY, ready=len(player.tasks))
        while line := await reader.readline():
            player.receive(json.loads(line))


def main(words: Sequence[str]) -> None:
    """Plays until standard input ends."""
    sys.modules[CHAT] = sys.modules[__name__]  # where verifiers finds a program by its name
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="agentgym-") as folder:
        subprocess_runtime.CACHE_DIR = Path(folder)  # what a rollout writes ends with it
        asyncio.run(_serve(*words))


if __name__ == "__main__":
    main(sys.argv[1:])
