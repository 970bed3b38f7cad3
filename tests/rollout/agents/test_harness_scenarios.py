"""Real harnesses, unchanged, play an environment with tools: errors, compactions and sub-agents that run at once.

`python -m pytest -n 0 -s -m harness tests/rollout/agents/test_harness_scenarios.py` prints the table of docs/agents.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agentgym.envs.base.tool_env import ToolEnv
from agentgym.rollout.agents.agent_episode import AgentEpisode, Launch
from agentgym.rollout.agents.harnesses import HARNESSES
from agentgym.tools import tool
from agentgym.trajectory import Status, Trajectory

pytestmark = [pytest.mark.harness, pytest.mark.usefixtures("installed")]
WINDOW = 1 << 18
LOREM = "lorem ipsum dolor sit amet "


class Shelves(ToolEnv):
    """An item is found on a shelf."""

    runs_inline = True
    system_prompt = "You tidy the shelves."
    max_turns = 99

    def start(self, options: dict[str, Any]) -> str:
        return "Which item is on shelf 3?"

    @tool
    def look(self, shelf: int) -> str:
        """Looks at a shelf."""
        if shelf > 9:
            raise ValueError(f"there is no shelf {shelf}")
        return f"shelf {shelf} holds item-{shelf}"

    @tool
    def read(self, num_chars: int) -> str:
        """Reads a book."""
        return (LOREM * num_chars)[:num_chars]

    @tool
    def answer(self, item: str) -> str:
        """Gives the answer."""
        self.end(success=item == "item-3", reward=float(item == "item-3"))
        return "thanks"


def call(name: str, **arguments: object) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def opencode_in(dialect: str) -> Callable[[AgentEpisode], Launch]:
    """How OpenCode is started that is to speak another dialect: its settings name it."""
    launch_as_usual = HARNESSES["opencode"].launch

    def launch(episode: AgentEpisode) -> Launch:
        usual = launch_as_usual(episode)
        files = {path: text.replace("@ai-sdk/openai-compatible", dialect) for path, text in usual.files.items()}
        assert files != usual.files
        return replace(usual, files=files)

    return launch


def claude_in_a_large_window() -> Callable[[AgentEpisode], Launch]:
    """How Claude Code is started that is to learn from an error alone how small the window is."""
    launch_as_usual = HARNESSES["claude-code"].launch

    def launch(episode: AgentEpisode) -> Launch:
        usual = launch_as_usual(episode)
        return replace(usual, variables={**usual.variables, "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "200000"})

    return launch


@dataclass(frozen=True)
class Player:
    """A harness in one of its dialects."""

    harness: str
    prefix: str
    """What it writes before the name of a tool of the environment."""
    sub_agent: Callable[[str], str] | None = None
    """Its call that has a sub-agent do a task."""
    usage_window: int = 0
    """A window that it finds too full after a long reply; 0 if it does not look at it while it works."""
    error_window: int = 0
    """A window that long results pass; 0 if it ends there."""
    num_pages: int = 4
    """The long results that it is given at once; it has to be able to leave out whole turns."""
    launch: Callable[[AgentEpisode], Launch] | None = None
    """How it is started, if that is not as usual."""


def codex_sub_agent(task: str) -> str:
    return call("multi_agent_v1__spawn_agent", task_name=f"sub_{task[-1].lower()}", message=task)


def claude_sub_agent(task: str) -> str:
    return call("Agent", description=task, prompt=task, subagent_type="general-purpose")


def opencode_sub_agent(task: str) -> str:
    return call("task", description=task, prompt=task, subagent_type="general")


PLAYERS = {
    "codex": Player("codex", "mcp__env__", codex_sub_agent, usage_window=28_000),
    "claude-code": Player("claude-code", "mcp__env__", claude_sub_agent, usage_window=30_000),
    "claude-code, large window": Player(
        *("claude-code", "mcp__env__"), error_window=40_000, num_pages=1, launch=claude_in_a_large_window()
    ),
    "opencode": Player("opencode", "env_", opencode_sub_agent, usage_window=16_000, error_window=26_000),
    "pi": Player("pi", "", error_window=20_000),  # it looks at its usage after its last reply
}
for name in ("openai", "anthropic"):
    PLAYERS[f"opencode, {name}"] = replace(PLAYERS["opencode"], launch=opencode_in(f"@ai-sdk/{name}"))
STEPS: dict[str, tuple[str, list[str]]] = {
    "calls": ("", ["look 3", "look 99", "unreadable", "look 3", "look 3", "look 3", "answer"]),
    "sub-agents": ("sub_agent", ["agents", *["look 1", "look 2"] * 15, "answer"]),
    "compaction by usage": ("usage_window", ["look 1", "long", "look 3", "answer"]),
    "compaction by error": ("error_window", ["look 1", "read until it is too much", "look 3", "answer"]),
}
"""What a harness needs to have for a scenario, and what the policy says in it."""


class ScenarioPolicy:
    """The replies of a scenario, by the conversation that asks."""

    def __init__(self, player: Player, scenario: str) -> None:
        self.player = player
        self.steps = list(STEPS[scenario][1])

    def __call__(self, prompt: str) -> str:
        texts = [part.partition("<|im_end|>")[0] for part in prompt.split("<|im_start|>user\n")[1:]]
        request = next((text for text in reversed(texts) if not text.startswith("<tool_response>")), "")
        is_main = "Which item" in prompt.partition("<|im_start|>user\n")[2]
        if "summar" in request.lower() and "Shelf 1" not in request:
            self.steps = [step for step in self.steps if not step.startswith("read")]
            return "<summary>Shelf 1 was looked at. Which item is on shelf 3?</summary>"
        if not is_main:
            return "The task is done." if "holds item" in prompt else self.call("look", shelf=4)
        return self.reply(self.steps[0] if self.steps[0].startswith("read") else self.steps.pop(0))

    def reply(self, step: str) -> str:
        match step.split():
            case ["look", shelf]:
                return self.call("look", shelf=int(shelf))
            case ["unreadable"]:
                return self.call("look", shelf=1).replace("}}", "")
            case ["long"]:
                return LOREM * 120 + self.call("look", shelf=1)
            case ["read", *_]:
                return (
                    self.call("read", num_chars=20_000 if self.player.num_pages > 1 else 4_000) * self.player.num_pages
                )
            case ["agents"]:
                assert self.player.sub_agent
                return "".join(self.player.sub_agent(f"TASK {letter}") for letter in "AB")
        return self.call("answer", item="item-3")

    def call(self, name: str, **arguments: object) -> str:
        return call(self.player.prefix + name, **arguments)


SCENARIOS = [
    pytest.param(name, scenario, id=f"{name}: {scenario}")
    for name, player in PLAYERS.items()
    for scenario, needs in STEPS.items()
    if not needs[0] or getattr(player, needs[0])
]


@pytest.mark.parametrize(("name", "scenario"), SCENARIOS)
def test_a_harness_plays_a_scenario(name: str, scenario: str, stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    player, needs = PLAYERS[name], STEPS[scenario][0]
    if player.launch:
        monkeypatch.setitem(HARNESSES, player.harness, replace(HARNESSES[player.harness], launch=player.launch))
    window = getattr(player, needs) if needs.endswith("_window") else WINDOW
    policy = ScenarioPolicy(player, scenario)
    (trajectory,) = stage.play(player.harness, policy, env=Shelves, window=window, timeout_s=120.0)
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0), (trajectory, stage.log())
    labels = Counter(row.origin.label for row in trajectory.rows)
    assert labels["sub-agent"] == (2 if scenario == "sub-agents" else 0), labels
    assert (labels["summary"] > 0) == needs.endswith("_window"), labels
    assert set(labels) <= {"main", "sub-agent", "summary", "fork"}, labels
    print(table_line(name, scenario, trajectory))


def table_line(name: str, scenario: str, trajectory: Trajectory) -> str:
    """The rows, ids, sampled ids and trained ids of an episode; what is excluded, by its reason."""
    spans = [span for row in trajectory.rows for span in row.spans]
    sampled = [span for span in spans if span.source == "policy"]
    excluded: Counter[str] = Counter()
    for span in sampled:
        excluded[span.excluded] += len(span.ids)
    trained = excluded.pop("", 0)
    reasons = ", ".join(f"{reason} {number}" for reason, number in excluded.items()) or "0"
    sizes = (sum(len(span.ids) for span in spans), sum(len(span.ids) for span in sampled), trained)
    return f"| {name} | {scenario} | {len(trajectory.rows)} | " + " | ".join(map(str, sizes)) + f" | {reasons} |"
