"""An agent's conversations in the forms in which agents send them again: divided, restarted, with other tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentgym.rollout.limits import Limits
from agentgym.trajectory import Status

RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "run", "parameters": {"type": "object"}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "run", "arguments": {"n": NUMBER}}\n</tool_call>'
TWO_CALLS = "Text" + CALL.replace("NUMBER", "1") + CALL.replace("NUMBER", "2")
CLAUDE = {"User-Agent": "claude-cli/2.1.332", "X-Claude-Code-Session-Id": "s"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def labels(trajectory: Any) -> list[str]:
    return [row.origin.label if row.origin else "" for row in trajectory.rows]


def judged(trajectory: Any) -> list[str]:
    return [turn.message.content for turn in trajectory.turns if turn.reward]


async def chat(caller: Any, messages: list[Any], tools: Any = (RUN,), **headers: str) -> Any:
    body = {"messages": messages, **({"tools": [*tools]} if tools else {})}
    return (await caller.post("/v1/chat/completions", body, **headers))["choices"][0]["message"]


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "ran"}


def in_chat(reply: Any, how: str) -> list[Any]:
    calls = reply["tool_calls"]
    text = {"role": "assistant", "content": reply["content"]}
    bare = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls]
    results = [result(call["id"]) for call in calls]
    if how == "text apart":
        return [text, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    if how == "calls apart":
        return [text, *bare, *results]
    first, second = bare
    return [text, first, results[0], second, results[1]]


def in_messages(reply: Any, how: str) -> list[Any]:
    def message(*blocks: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": [*blocks]}

    def results(*calls: Any) -> dict[str, Any]:
        blocks = [{"type": "tool_result", "tool_use_id": call["id"], "content": "ran"} for call in calls]
        return {"role": "user", "content": blocks}

    text, first, second = reply
    if how == "text apart":
        return [message(text), message(first, second), results(first, second)]
    if how == "calls apart":
        return [message(text), message(first), message(second), results(first, second)]
    return [message(text, first), results(first), message(second), results(second)]


def in_responses(reply: Any, how: str) -> list[Any]:
    text, first, second = reply
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "ran"} for call in (first, second)
    ]
    if how == "text apart":
        return [{"role": "assistant", "content": "Text"}, first, second, *outputs]
    if how == "calls apart":
        return [text, first, second, *outputs]
    return [text, first, outputs[0], second, outputs[1]]


@pytest.mark.parametrize("how", ["text apart", "calls apart", "results between"])
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_reply_that_comes_back_in_pieces_is_the_same_reply(table: Any, dialect: str, how: str) -> None:
    async def agent(caller: Any) -> None:
        if dialect == "chat":
            start = [*caller.opening["messages"]]
            await chat(caller, [*start, *in_chat(await chat(caller, start), how)])
        elif dialect == "messages":
            body = {"max_tokens": 900, "tools": [{"name": "run", "input_schema": {"type": "object"}}]}
            start = [user("go")]
            reply = await caller.post("/v1/messages", {**body, "messages": start})
            await caller.post("/v1/messages", {**body, "messages": [*start, *in_messages(reply["content"], how)]})
        else:
            reply = await caller.post("/v1/responses", {"input": [user("go")], "tools": [FLAT]})
            items = [user("go"), *in_responses(reply["output"], how)]
            await caller.post("/v1/responses", {"input": items, "tools": [FLAT]})
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "done" if "ran" in prompt else TWO_CALLS)
    assert len(trajectory.rows) == 1 and judged(trajectory) == ["done"]
    assert table.prompts[1].count("ran") == 2


def test_a_message_of_another_agent_is_no_part_of_a_reply(table: Any) -> None:
    async def agent(caller: Any) -> None:
        note = {"role": "assistant", "content": '{"author": "sub"}'}
        report = {"type": "agent_message", "author": "sub", "content": [{"type": "input_text", "text": "SUB 42"}]}
        items = [user("go"), note]
        reply = await caller.post("/v1/responses", {"input": items, "tools": [FLAT]})
        for call in reply["output"]:
            items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "ran"}]
        await caller.post("/v1/responses", {"input": [*items, report], "tools": [FLAT]})
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "done" if "ran" in prompt else CALL.replace("NUMBER", "1"))
    assert len(trajectory.rows) == 1 and "SUB 42" in table.prompts[1]


def test_a_call_that_the_agent_itself_runs_is_read_whatever_its_kind(table: Any) -> None:
    async def agent(caller: Any) -> None:
        shell = {"type": "local_shell_call", "call_id": "a", "action": {"type": "exec", "command": ["ls"]}}
        search = {"type": "tool_search_call", "call_id": "b", "execution": "client", "arguments": {"query": "x"}}
        outputs = [
            {"type": "function_call_output", "call_id": "a", "output": "LISTED"},
            {"type": "tool_search_output", "call_id": "b", "tools": [{"name": "FOUND"}]},
        ]
        await caller.post("/v1/responses", {"input": [user("go"), shell, search, *outputs], "tools": [FLAT]})
        await caller.finish()

    table.play(agent, lambda prompt: "done")
    assert all(text in table.prompts[0] for text in ("local_shell", "LISTED", "tool_search", "FOUND"))


def test_a_custom_tool_in_a_namespace_takes_any_text(table: Any) -> None:
    async def agent(caller: Any) -> None:
        tools = [{"type": "namespace", "name": "box", "tools": [{"type": "custom", "name": "patch"}]}]
        (call,) = (await caller.post("/v1/responses", {"input": "go", "tools": tools}))["output"]
        expected = {"type": "custom_tool_call", "name": "patch", "namespace": "box", "input": "+ 1"}
        assert expected.items() <= call.items()
        await caller.finish()

    reply = '<tool_call>\n{"name": "box__patch", "arguments": {"input": "+ 1"}}\n</tool_call>'
    table.play(agent, lambda prompt: reply)
    assert "box__patch(input: string)" in table.prompts[0]


def test_tools_in_another_order_continue_a_conversation(table: Any) -> None:
    async def agent(caller: Any) -> None:
        start = [*caller.opening["messages"]]
        reply = await chat(caller, start, (RUN, OTHER))
        await chat(caller, [*start, reply, user("go on")], (OTHER, RUN))
        await caller.finish()

    assert len(table.play(agent, lambda prompt: "done" if "go on" in prompt else "reply").rows) == 1


def test_a_line_for_billing_is_no_part_of_a_prompt(table: Any) -> None:
    async def agent(caller: Any) -> None:
        messages = [user("go")]
        for number in range(3):
            line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number};"
            system = [{"type": "text", "text": line}, {"type": "text", "text": "You work."}]
            reply = await caller.post("/v1/messages", {"max_tokens": 99, "system": system, "messages": messages})
            messages += [{"role": "assistant", "content": reply["content"]}, user("go on")]
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "SEED is done")
    assert len(trajectory.rows) == 1 and not any("billing" in prompt for prompt in table.prompts)


async def restart(caller: Any) -> None:
    start = [user("go")]
    first = await chat(caller, start)
    await chat(caller, [*start, first, user("no good: check it")])
    await chat(caller, start)


async def compact_twice(caller: Any) -> None:
    history = [user("go")]
    for _ in range(2):
        reply = await chat(caller, history, **CLAUDE)
        call = result(reply["tool_calls"][0]["id"])
        await chat(caller, [*history, reply, call, user("shorten the conversation")], **CLAUDE)
        history = [user("go"), user("continued: SHORT")]
    await chat(caller, history, **CLAUDE)


async def add_a_tool(caller: Any) -> None:
    history = [user("go")]
    reply = await chat(caller, history)
    history += [reply, result(reply["tool_calls"][0]["id"])]
    history += [await chat(caller, history), user("go on")]
    await chat(caller, history, (RUN, OTHER))


async def ask_for_a_title_first(caller: Any) -> None:
    await chat(caller, [user("Generate a title for: go")], (), **CLAUDE)
    await chat(caller, [user("go")], (RUN,), **CLAUDE)


async def plan_first(caller: Any) -> None:
    await chat(caller, [user("plan it")], ())
    await chat(caller, [user("go")])


async def go_on_from_a_summary(caller: Any) -> None:
    history, tools = [user("go")], (RUN,)
    for part in range(2):
        reply = await chat(caller, history, tools)
        await chat(caller, [*history, reply, result(reply["tool_calls"][0]["id"])], tools)
        summary = await chat(caller, [{"role": "system", "content": "You summarize."}, user(f"[part {part}]")], ())
        bare = summary["content"].removeprefix("<summary>").removesuffix("</summary>")
        history = [user(f"The conversation was compacted into the following summary: {bare}")]
    await chat(caller, history, tools)


async def name_the_title_in_a_side_task(caller: Any) -> None:
    await chat(caller, [user("Generate a title for: go")], ())
    reply = await chat(caller, [user("go")])
    await chat(caller, [user("go"), reply, result(reply["tool_calls"][0]["id"])])
    await chat(caller, [user("check The way home")])


async def summarize_at_the_end(caller: Any) -> None:
    await chat(caller, [user("go")])
    with_a_cut_reply = [{"role": "system", "content": "You summarize."}, user("[a conversation]")]
    await caller.send("/v1/chat/completions", {"messages": with_a_cut_reply})


@pytest.mark.parametrize(
    ("play", "replies", "expected"),
    [
        (restart, ["no good", "it is wrong", "all done"], ["", "fork"]),
        (compact_twice, ["CALL", "SHORT", "CALL", "SHORT", "all done"], ["main", "fork", "main"]),
        (
            go_on_from_a_summary,
            [
                *("CALL", "CALL", "<summary>\nRUN was called once\n</summary>"),
                *("CALL", "CALL", "<summary>\nRUN was called again\n</summary>", "all done"),
            ],
            ["main", "main", "main", "summary", "summary"],
        ),
        (name_the_title_in_a_side_task, ["The way home", "CALL", "the plan", "all done"], ["main", "side", "title"]),
        (add_a_tool, ["CALL", "the plan", "all done"], ["main", "main"]),
        (ask_for_a_title_first, ["A title", "all done"], ["main", "title"]),
        (plan_first, ["the plan", "all done"], ["main", "side"]),
        (summarize_at_the_end, ["all done", "s" * 500], ["main", "summary"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_final_text_is_the_last_word_in_the_agents_own_task(
    table: Any, play: Callable[[Any], Any], replies: list[str], expected: list[str]
) -> None:
    script = iter(replies)

    async def agent(caller: Any) -> None:
        await play(caller)
        await caller.finish()

    say = lambda prompt: next(script).replace("CALL", CALL.replace("NUMBER", "1"))  # noqa: E731
    trajectory = table.play(agent, say, limits=Limits(turn_tokens=200))
    assert judged(trajectory) == ["all done"] and trajectory.status is Status.COMPLETED
    assert [label or "main" for label in labels(trajectory)] == [label or "main" for label in expected]


@pytest.mark.parametrize("sub_agent", [True, False])
def test_a_reply_of_its_own_that_is_cut_is_the_agents_business(table: Any, sub_agent: bool) -> None:
    async def agent(caller: Any) -> None:
        headers = {**CLAUDE, **({"X-Claude-Code-Agent-Id": "1"} if sub_agent else {})}
        reply = await chat(caller, [user("for the sub-agent")], (RUN,), **headers)
        await chat(caller, [user("go"), user(f"it said {reply['content']}")], (RUN,), **CLAUDE)
        await caller.finish()

    say = lambda prompt: "all done" if "it said" in prompt else "s" * 500  # noqa: E731
    trajectory = table.play(agent, say, limits=Limits(turn_tokens=100))
    assert judged(trajectory) == ["all done"] and trajectory.status is Status.COMPLETED


def test_a_final_text_is_judged_where_a_request_beside_the_task_meets_a_limit(table: Any) -> None:
    async def agent(caller: Any) -> None:
        await chat(caller, [user("go")])
        status, _ = await caller.send("/v1/chat/completions", {"messages": [user("Summarize: [a conversation]")]})
        assert status == 410

    trajectory = table.play(agent, lambda prompt: "all done", limits=Limits(max_turns=1))
    assert judged(trajectory) == ["all done"] and trajectory.status is Status.COMPLETED


def test_sub_agents_with_the_same_task_are_no_samples_of_one_choice(table: Any) -> None:
    async def agent(caller: Any) -> None:
        names = [{**CLAUDE, "X-Claude-Code-Agent-Id": number} for number in "12"]
        task = [user("for the sub-agent")]
        first = await chat(caller, task, (RUN,), **names[0])
        await chat(caller, task, (RUN,), **names[1])
        await chat(caller, [*task, first, user("go on")], (RUN,), **names[0])
        await chat(caller, [user("go")], (RUN,), **CLAUDE)
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "SEED is done")
    assert [span.excluded for row in trajectory.rows for span in row.spans if span.source == "policy"] == [""] * 4


def test_an_unknown_path_of_anthropics_is_refused_in_its_form(table: Any) -> None:
    async def agent(caller: Any) -> None:
        status, answer = await caller.send("/v1/messages/batches", {})
        assert status == 404 and answer["type"] == "error"
        await chat(caller, [user("go")])
        await caller.finish()

    table.play(agent, lambda prompt: "done")
