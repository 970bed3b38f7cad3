"""An episode is a tree: each request continues the branch that it has as a prefix, and each id is trained once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.limits import Limits
from agentgym.trajectory import RowOrigin, Status, StopReason, Trajectory

RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "run", "arguments": {"n": SEED}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def labels(trajectory: Trajectory) -> list[str]:
    return [row.origin.label if row.origin else "" for row in trajectory.rows]


def message(completion: Any, index: int = 0) -> dict[str, Any]:
    reply: dict[str, Any] = completion["choices"][index]["message"]
    return reply


def test_two_agents_that_take_turns_have_a_row_each(table: Any) -> None:
    async def agent(caller: Any) -> None:
        main, side = [user("main")], [user("side")]
        for number in range(6):
            for messages in (main, side):
                messages.append(message(await caller.chat(messages)))
                messages.append(user(f"go on {number}"))
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "reply SEED")
    assert labels(trajectory) == ["main", "side"] and [len(row.spans) for row in trajectory.rows] == [12, 12]
    assert [turn.order for turn in trajectory.turns] in (
        [*range(0, 12, 2), *range(1, 12, 2)],
        [*range(1, 12, 2), *range(0, 12, 2)],
    )
    assert trajectory.num_trained_tokens == sum(map(len, table.sampled))


def test_a_request_from_the_middle_forks_and_what_it_shares_is_prompt(table: Any) -> None:
    async def agent(caller: Any) -> None:
        messages = list(caller.opening["messages"])
        for number in range(3):
            messages += [message(await caller.chat(messages)), user(f"next {number}")]
        await caller.chat([*messages[:-3], user("go on")])
        messages.append(message(await caller.chat(messages)))
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "SEED and done" if "next 2" in prompt else "reply SEED")
    main, fork = trajectory.rows
    assert fork.origin is not None and fork.origin.client.startswith("chat Python/")
    assert replace(fork.origin, client="") == RowOrigin("fork", row=0, turn=1, num_shared=5)
    shared = sum(len(span.ids) for span in main.spans[:4])
    assert fork.ids.tolist()[:shared] == main.ids.tolist()[:shared] and not fork.mask[:shared].any()
    assert trajectory.status is Status.COMPLETED and trajectory.reward == 0.5


@pytest.mark.parametrize("counts", [False, True])
def test_counting_tokens_changes_nothing_and_a_text_above_the_window_is_counted(table: Any, counts: bool) -> None:
    async def count(caller: Any, messages: list[Any]) -> int:
        number: int = (await caller.post("/v1/messages/count_tokens", {"messages": messages}))["input_tokens"]
        return number

    async def agent(caller: Any) -> None:
        start = [user("main")]
        unused, used = [{"role": "assistant", "content": (await ask(caller, start))} for _ in range(2)]
        if counts:
            assert await count(caller, [*start, unused, user("on")]) > await count(caller, start)
            assert await count(caller, [*start, unused, user("x" * 5000)]) > 4096
            assert await count(caller, [user("y" * 5000)]) > 4096
        await ask(caller, [*start, used, user("on")])
        await caller.finish()

    async def ask(caller: Any, messages: list[Any]) -> Any:
        return (await caller.post("/v1/messages", {"messages": messages, "max_tokens": 50}))["content"]

    engine = table.engine(lambda prompt: "all done" if "on" in prompt else "reply SEED", context_window=4096)
    trajectory = table.play(agent, lambda prompt: "", engine=engine, limits=Limits(trajectory_tokens=4000))
    assert labels(trajectory) == ["main", "fork"] and trajectory.status is Status.COMPLETED
    assert [span.excluded for span in trajectory.rows[1].spans if span.source == "policy"] == ["unused"]


@pytest.mark.parametrize("damage", ["order", "excluded", "fork"])
def test_verify_finds_a_reply_that_is_missing_or_recorded_twice(table: Any, damage: str) -> None:
    async def agent(caller: Any) -> None:
        start = list(caller.opening["messages"])
        start += [message(await caller.chat(start)), user("on")]
        for text in ("one", "two"):
            await caller.chat([*start, message(await caller.chat(start)), user(text)])
        await caller.finish()

    table.play(agent, lambda prompt: "SEED done" if "two" in prompt else "reply SEED")
    file = table.folder / "episodes.jsonl"
    record = json.loads(file.read_text())
    if damage == "order":
        record["turns"][1]["order"] = 0
    elif damage == "excluded":
        record["rows"][0]["spans"][1]["excluded"] = 7
    else:
        record["rows"][1]["spans"][0]["ids"][5] += 1
    file.write_text(json.dumps(record) + "\n")
    failed = [verdict.about.name for verdict in verify_run(table.folder, table.renderer).verdicts if not verdict.ok]
    assert "once" in failed


def test_branches_have_the_same_ids_in_whatever_order_their_requests_arrive(table: Any) -> None:
    def agent(order: list[int]) -> Any:
        async def play(caller: Any) -> None:
            first = message(await caller.chat(caller.opening["messages"]))
            start = [*caller.opening["messages"], first]
            branches = {number: [*start, user(f"task {number}")] for number in order}
            for _ in range(2):
                for messages in branches.values():
                    messages += [message(await caller.chat(messages)), user("on")]
            await caller.chat([*start, user("end")])
            await caller.finish()

        return play

    def rows(trajectory: Trajectory) -> Any:
        plain = [(row.ids.tolist(), row.mask.tolist(), row.origin) for row in trajectory.rows]
        return plain, [(turn.message, turn.reward) for turn in trajectory.turns]

    def say(prompt: str) -> str:
        return "SEED is done" if "end" in prompt.rpartition("user")[2] else "reply SEED"

    first, second = (table.play(agent(order), say) for order in ([0, 1, 2], [2, 0, 1]))
    assert rows(first) == rows(second) and len(first.rows) == 4


def test_samples_of_equal_requests_differ_and_what_nothing_follows_is_excluded(table: Any) -> None:
    async def agent(caller: Any) -> None:
        messages = list(caller.opening["messages"])
        best = await caller.chat(messages, n=3)
        assert len({choice["message"]["content"] for choice in best["choices"]}) == 3
        assert best["usage"]["completion_tokens"] == sum(map(len, table.sampled))
        messages += [message(best, 1), user("that one")]
        await caller.chat(messages)
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "SEED is done" if "that" in prompt else "reply SEED")
    spans = [span for row in trajectory.rows for span in row.spans if span.source == "policy"]
    assert sorted(span.excluded for span in spans) == ["", "", "unused", "unused"]
    assert labels(trajectory) == ["", "fork", "fork"] and trajectory.status is Status.COMPLETED


@pytest.mark.parametrize("change", ["repaired", "renamed", "unparsed", "foreign ids"])
def test_a_reply_with_calls_is_known_by_their_ids_or_else_by_what_it_says(table: Any, change: str) -> None:
    async def agent(caller: Any) -> None:
        messages = list(caller.opening["messages"])
        for _ in range(2):
            reply = message(await caller.chat(messages, tools=[RUN]))
            (call,) = reply["tool_calls"]
            function = call["function"]
            if change == "repaired":
                function["arguments"] = '{"n": "repaired"}'
            elif change == "renamed":
                function |= {"name": "invalid", "arguments": '{"tool": "run", "error": "?"}'}
            elif change == "unparsed":
                function["arguments"] = json.dumps({"__unparsedToolInput": {"raw": function["arguments"]}})
            else:
                call["id"] = f"other_{len(messages)}"
            messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": "ran"}]
        await caller.chat(messages, tools=[RUN])
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "done" if prompt.count("ran") > 1 else CALL)
    assert (len(trajectory.rows), len(trajectory.turns), trajectory.reward) == (1, 3, 0.5)
    assert [result.content for turn in trajectory.turns for result in turn.tool_results] == ["ran", "ran"]


@pytest.mark.parametrize(
    ("broken", "arguments"),
    [
        ('<tool_call>\n{"name": "run", "arguments": {"n": 3\n</tool_call>', '{"n": 3'),
        (
            "<tool_call>\nrun\n</tool_call>",
            "<tool_call>\nrun\n</tool_call>",
        ),  # not empty
    ],
)
def test_a_call_with_unreadable_arguments_is_sent_as_a_call(table: Any, broken: str, arguments: str) -> None:

    async def agent(caller: Any) -> None:
        messages = list(caller.opening["messages"])
        reply = message(await caller.chat(messages, tools=[RUN]))
        (call,) = reply["tool_calls"]
        assert call["function"] == {"name": "run", "arguments": arguments}
        messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"}]
        await caller.chat(messages, tools=[RUN])
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "done" if "no JSON" in prompt else broken)
    assert len(trajectory.rows) == 1 and trajectory.status is Status.COMPLETED
    assert trajectory.metrics["malformed_calls"] == 1


@pytest.mark.parametrize(
    ("program", "as_text"),
    [
        ("codex_exec/0.171.0 (Debian)", False),
        ("claude-cli/2.1.332 (external)", False),
        ("Agents/Python 0.24.0", True),
        ("OpenAI/Python 3.57.0", True),
        ("", True),
    ],
)
def test_a_call_of_an_unknown_tool_is_text_unless_the_agent_recovers_from_it(
    table: Any, program: str, as_text: bool
) -> None:
    async def agent(caller: Any) -> None:
        body = {"messages": caller.opening["messages"], "tools": [RUN]}
        reply = message(await caller.post("/v1/chat/completions", body, **{"User-Agent": program}))
        assert ("tool_calls" in reply) is not as_text
        assert as_text == ("fly" in (reply["content"] or ""))
        await caller.finish()

    fly = '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'
    table.play(agent, lambda prompt: fly)


def test_other_tools_begin_a_row_of_their_own(table: Any) -> None:
    async def agent(caller: Any) -> None:
        messages = list(caller.opening["messages"])
        messages += [message(await caller.chat(messages)), user("now with a tool")]
        await caller.chat(messages, tools=[RUN])
        await caller.finish()

    assert labels(table.play(agent, lambda prompt: "reply SEED")) == ["", "main"]


@pytest.mark.parametrize("num_bytes", [0, 1, 300])
def test_an_answer_that_was_cut_is_sent_again_and_sampled_once(table: Any, num_bytes: int) -> None:
    async def agent(caller: Any) -> None:
        body = {"messages": caller.opening["messages"], "stream": True}
        await caller.cut("/v1/chat/completions", body, num_bytes)
        async with caller.http.post(f"{caller.root}/v1/chat/completions", json=body) as answer:
            assert "reply" in await answer.text()
        assert len(table.sampled) == 1
        messages = [*caller.opening["messages"], {"role": "assistant", "content": "reply " + "x" * 400_000}]
        await caller.chat([*messages, user("go on")])
        await caller.finish()

    text = "reply " + "x" * 400_000  # more than the connection holds
    trajectory = table.play(
        agent, lambda prompt: "done" if "go on" in prompt else text, limits=Limits(turn_tokens=500_000)
    )
    assert [span.excluded for row in trajectory.rows for span in row.spans if span.source == "policy"] == ["", ""]


def test_a_reply_that_no_agent_has_read_is_excluded(table: Any) -> None:
    async def agent(caller: Any) -> None:
        await caller.post("/v1/chat/completions", {"messages": caller.opening["messages"]})
        await caller.post("/step", {})
        await caller.cut("/v1/chat/completions", {"messages": [user("lost")]})

    engine = table.engine(lambda prompt: "reply SEED", delay_s=0.5)  # the agent leaves before the reply
    trajectory = table.play(agent, lambda prompt: "", limits=Limits(max_turns=2), idle_s=0.3, engine=engine)
    spans = [span for row in trajectory.rows for span in row.spans if span.source == "policy"]
    assert [span.excluded for span in spans] == ["", "unseen"]


@pytest.mark.parametrize(("text", "status"), [("all done", Status.COMPLETED), ("bye", Status.UNPLAYED)])
def test_an_agent_that_finishes_has_the_environments_verdict_on_its_last_text(
    table: Any, text: str, status: Status
) -> None:
    async def agent(caller: Any) -> None:
        await caller.chat(caller.opening["messages"])
        answer = await caller.finish()
        assert answer["terminated"] == (status is Status.COMPLETED)
        code, _ = await caller.send("/v1/chat/completions", {"messages": [user("again")]})
        assert code == 410

    trajectory = table.play(agent, lambda prompt: text)
    assert trajectory.status is status and trajectory.reward == (0.5 if status is Status.COMPLETED else None)


def test_an_agent_that_finishes_after_actions_keeps_their_rewards(table: Any) -> None:
    async def agent(caller: Any) -> None:
        messages = list(caller.opening["messages"])
        messages.append(message(await caller.chat(messages)))
        messages += (await caller.post("/step", {}))["messages"]
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "one")
    assert (trajectory.status, trajectory.stop_reason, trajectory.reward) == (Status.TRUNCATED, StopReason.AGENT, 0.5)


def test_two_hundred_branches_in_flight_are_rows_of_their_own(table: Any) -> None:
    async def agent(caller: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(200):
                tasks.create_task(caller.chat([*caller.opening["messages"], user(f"branch {number}")]))
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "done SEED", limits=Limits(max_turns=2000))
    assert len(trajectory.rows) == 200 and trajectory.status is Status.COMPLETED
