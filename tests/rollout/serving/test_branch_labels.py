"""Branches have the labels that an agent's headers or its requests' shape show, and `agent.credit` goes by them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentgym.errors import ConfigError
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.agents.config import AgentConfig
from agentgym.trajectory import BRANCH_LABELS, Trajectory

TOOL = {"type": "object", "properties": {"prompt": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "task", "parameters": TOOL}}]
SPAWN = '<tool_call>\n{"name": "task", "arguments": {"prompt": "Count the words."}}\n</tool_call>'
CLAUDE = {"x-claude-code-session-id": "1"}
OPENCODE = {"x-session-affinity": "ses_1"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(caller: Any, reply: Any) -> list[Any]:
    """The opening, a reply with a call, and the call's result."""
    message = reply["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12"}
    return [*caller.opening["messages"], message, result]


def branches(trajectory: Trajectory) -> list[tuple[str, bool]]:
    """The label of each row, and whether it is trained."""
    return [(row.origin.label if row.origin else "", row.num_trained_tokens > 0) for row in trajectory.rows]


async def play(caller: Any, side: list[Any], headers: dict[str, str], tools: list[Any]) -> None:
    """A main conversation of two turns, and a side request after the first."""
    path = "/v1/chat/completions"
    first = await caller.post(path, {"messages": caller.opening["messages"], "tools": TOOLS})
    await caller.post(path, {"messages": side, **({"tools": tools} if tools else {})}, **headers)
    main = {"messages": answered(caller, first), "tools": TOOLS}
    await caller.post(path, main)
    await caller.finish()


@pytest.mark.parametrize(
    ("headers", "side", "tools", "label"),
    [
        ({"x-openai-subagent": "spawn"}, [user("a")], TOOLS, "sub-agent"),
        ({"x-codex-turn-metadata": '{"request_kind": "compaction"}'}, [user("a")], [], "summary"),
        ({"X-Claude-Code-Agent-Id": "1"}, [user("a")], TOOLS, "sub-agent"),
        ({**OPENCODE, "x-parent-session-id": "ses_0"}, [user("a")], TOOLS, "sub-agent"),
        (OPENCODE, [user("a")], [], "title"),
        (OPENCODE, [user("a"), {"role": "assistant", "content": "b"}, user("c")], [], "summary"),
        (OPENCODE, [{"role": "system", "content": "You write titles, of a summary too."}, user("a")], [], "title"),
        (
            OPENCODE,
            [{"role": "system", "content": "Summarize."}, user("<conversation>a title</conversation>")],
            [],
            "summary",
        ),
        ({"x-openai-subagent": "compact"}, [user("a")], TOOLS, "summary"),
        ({**CLAUDE, "x-claude-code-request-class": "compaction"}, [user("a")], TOOLS, "summary"),
        ({**CLAUDE, "x-claude-code-request-class": "auxiliary"}, [user("a")], [], "side"),
        ({**CLAUDE, "x-claude-code-auxiliary-type": "generate_session_title"}, [user("a")], [], "title"),
        (CLAUDE, [user("Write a title.")], [], "title"),
        ({}, [user("Generate a title for this conversation:\n"), user("sum up")], [], "title"),
        ({}, [user("<conversation>a title</conversation>\n"), user("a")], [], "title"),
        ({}, [{"role": "system", "content": "You summarize."}, user("a title")], [], "summary"),
        ({}, [user("a")], [], "side"),
        ({}, [user("summarize")], [{"type": "function", "function": {"name": "b"}}], "summary"),
        ({}, [user(" Count the words.")], [], "sub-agent"),
        ({}, [user("Count")], TOOLS, "side"),
    ],
)
def test_a_side_request_has_the_label_of_its_headers_or_of_its_shape(
    table: Any, headers: dict[str, str], side: list[Any], tools: list[Any], label: str
) -> None:
    def reply(prompt: str) -> str:
        return SPAWN if prompt.count("assistant") == 1 and "Count." in prompt else "SEED is done"

    trajectory = table.play(lambda caller: play(caller, side, headers, tools), reply)
    assert branches(trajectory) == [("main", True), (label, True)]


@pytest.mark.parametrize("damage", ["", "trained", "reason", "label"])
def test_replies_of_a_label_without_credit_are_excluded_and_verify_knows_of_it(table: Any, damage: str) -> None:
    def reply(prompt: str) -> str:
        return SPAWN if prompt.count("assistant") == 1 and "Count." in prompt else "SEED is done"

    credit = ("main", "sub-agent", "fork", "side", "summary")
    agent = lambda caller: play(caller, [user("A title?")], {}, [])  # noqa: E731
    trajectory = table.play(agent, reply, credit=credit)
    assert branches(trajectory) == [("main", True), ("title", False)]
    assert [span.excluded for span in trajectory.rows[1].spans] == ["", "title"]
    file = table.folder / "episodes.jsonl"
    record = json.loads(file.read_text())
    span = record["rows"][1]["spans"][1]
    if damage == "trained":
        del span["excluded"]
    elif damage == "reason":
        span["excluded"] = "summary"
    elif damage == "label":
        record["rows"][1]["origin"]["label"] = "side"
    file.write_text(json.dumps(record) + "\n")
    (table.folder / "config.yaml").write_text(f"algo: grpo\nagent:\n  credit: {json.dumps(credit)}\n")
    failed = [verdict.about.name for verdict in verify_run(table.folder, table.renderer).verdicts if not verdict.ok]
    assert ("once" in failed) == bool(damage)


def test_credit_names_labels() -> None:
    assert AgentConfig(credit=("main",)).credit == ("main",) and AgentConfig().credit == BRANCH_LABELS
    for credit in ((), ("main", "titles")):
        with pytest.raises(ConfigError, match=r"agent\.credit"):
            AgentConfig(credit=credit)
