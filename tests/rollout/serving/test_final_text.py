"""Which reply is an agent's final text, and which sample of a request the environment's answers go to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentgym.engines.protocol import Completion
from agentgym.engines.scripted import ScriptedEngine
from agentgym.engines.servers.http import HttpRefusal
from agentgym.rollout.limits import Limits
from agentgym.trajectory import Status
from tests.rollout.serving.test_mcp import CALL, Safe, call, offered

RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
SUMMARY = [{"role": "system", "content": "Word."}, {"role": "user", "content": "[a conversation]"}]
SUB_AGENT = {"X-Claude-Code-Agent-Id": "7"}
COMPACTION = {"X-Codex-Turn-Metadata": '{"request_kind":"compaction"}'}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def say(prompt: str) -> str:
    return "SUMMARY" if "[a conversation]" in prompt else "SUB" if "for the sub-agent" in prompt else "42 done"


@pytest.mark.parametrize(
    ("aside", "tools"),
    [
        ("a summary", [RUN]),
        *((aside, tools) for aside in ("a labelled sub-agent", "a labelled summary") for tools in ([], [RUN])),
        *(("a lost request", tools) for tools in ([], [RUN])),
    ],
)
def test_what_an_agent_asks_after_its_last_reply_is_not_its_final_text(
    table: Any, aside: str, tools: list[Any]
) -> None:
    async def agent(caller: Any) -> None:
        start = [*caller.opening["messages"]]
        reply = (await caller.chat(start, tools=tools))["choices"][0]["message"]
        path, history = "/v1/chat/completions", [*start, reply, user("for the sub-agent")]
        if aside == "a summary":
            await caller.chat(SUMMARY)
        elif aside == "a lost request":
            await caller.cut(path, {"messages": history, "tools": tools})
            await asyncio.sleep(0.3)
        else:
            headers = SUB_AGENT if "sub-agent" in aside else COMPACTION
            await caller.post(path, {"messages": history, "tools": tools}, **headers)
        verdict = await caller.finish()
        assert verdict["messages"][0]["content"] == "heard 42 done"
        assert await caller.finish() == verdict, "a client that did not get it asks again"

    trajectory = table.play(agent, say, engine=table.engine(say, delay_s=0.2))  # the agent leaves before the reply
    assert trajectory.status is Status.COMPLETED and trajectory.turns[0].reward == 0.5


def test_a_sub_agent_with_the_same_history_is_no_part_of_the_main_row(table: Any) -> None:
    async def agent(caller: Any) -> None:
        path, start = "/v1/chat/completions", [*caller.opening["messages"]]
        first = (await caller.chat(start))["choices"][0]["message"]
        sub = [*start, first, user("for the sub-agent")]
        for _ in range(2):
            reply = (await caller.post(path, {"messages": sub}, **SUB_AGENT))["choices"][0]["message"]
            sub += [reply, user("for the sub-agent again")]
        await caller.chat([*start, first, user("the sub-agent said SUB")])
        await caller.finish()

    trajectory = table.play(agent, say, credit=("main",))
    main, side = trajectory.rows
    assert [span.excluded for span in main.spans if span.source == "policy"] == ["", ""]
    assert side.origin is not None and side.origin.label == "sub-agent"
    assert [span.excluded for span in side.spans if span.source == "policy"] == ["sub-agent"] * 2


def test_a_reply_that_was_never_received_is_not_stepped_with(table: Any) -> None:
    async def agent(caller: Any) -> None:
        start = [*caller.opening["messages"]]
        await caller.chat(start)
        await caller.cut("/v1/chat/completions", {"messages": [user("[a conversation]")]})
        await asyncio.sleep(0.3)
        assert (await caller.post("/step", {}))["messages"][0]["content"] == "heard 42 done"

    assert table.play(agent, say, engine=table.engine(say, delay_s=0.2)).reward == 0.5


@pytest.mark.parametrize("how", ["two choices", "asked twice"])
def test_a_call_over_mcp_rewards_the_sample_that_the_agent_goes_on_with(table: Any, how: str) -> None:
    async def agent(caller: Any) -> None:
        start, tools = [*caller.opening["messages"]], [offered("look")]
        if how == "two choices":
            reply = (await caller.chat(start, tools=tools, n=2))["choices"][1]["message"]
        else:
            await caller.chat(start, tools=tools)
            reply = (await caller.chat(start, tools=tools))["choices"][0]["message"]
        await call(caller, "look")
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "dialled"}
        await caller.chat([*start, reply, result], tools=tools)
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "end" if "dialled" in prompt else CALL % ("look", "{}"), Safe())
    used, unused = trajectory.rows
    assert [span.excluded for span in unused.spans if span.source == "policy"] == ["unused"]
    assert [turn.reward for turn in trajectory.turns] == [0.125, 0.0, 0.0]
    assert sum(span.source == "policy" for span in used.spans) == 2


def test_a_call_whose_arguments_a_harness_has_changed_rewards_its_reply(table: Any) -> None:
    async def agent(caller: Any) -> None:
        await caller.chat(caller.opening["messages"], tools=[offered("dial")])
        await caller.chat(SUMMARY)
        await call(caller, "dial", digit=5)
        await caller.finish()

    text = CALL % ("dial", '{"digit": "5"}')
    trajectory = table.play(agent, lambda prompt: "SUMMARY" if "[a conv" in prompt else text, Safe())
    assert [turn.reward for turn in trajectory.turns] == [5 / 64, 0.0]


def test_openais_dialects_answer_after_a_message_of_the_assistant(table: Any) -> None:
    async def agent(caller: Any) -> None:
        note = {"role": "assistant", "content": "The last step."}
        for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
            await caller.post(path, {field: [*caller.opening["messages"], note]})
        first = await caller.post("/v1/responses", {"input": "go"})
        again = await caller.post("/v1/responses", {"previous_response_id": first["id"]})
        assert again["output"][0]["content"][0]["text"] == "42 done"
        await caller.finish()

    assert table.play(agent, say).status is Status.COMPLETED


class Picky(ScriptedEngine):
    """An engine whose compiler of grammars takes none."""

    takes_grammar = True

    async def generate(self, prompt_ids: Any, sampling: Any, *, session: str) -> Completion:
        if sampling.grammar:
            raise HttpRefusal("the server answered 400: unsupported keyword 'not'", 400)
        return await super().generate(prompt_ids, sampling, session=session)


def test_a_schema_that_no_engine_compiles_ends_no_episode(table: Any) -> None:
    async def agent(caller: Any) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        body = {"messages": caller.opening["messages"], "response_format": form}
        status, answer = await caller.send("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "response_format")
        assert "unsupported keyword 'not'" in answer["error"]["message"]
        await caller.chat(caller.opening["messages"])
        await caller.finish()

    plain = table.engine(say)
    assert table.play(agent, say, engine=Picky(plain._reply), limits=Limits()).status is Status.COMPLETED
