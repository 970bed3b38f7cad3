"""Agents that crash, hang, are killed, repeat themselves and come late, 64 at once: no id is lost or trained twice."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.agents.config import AgentConfig
from agentgym.rollout.agents.launcher import launched_agents
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.branches import branch_table
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.trajectory import Source, Status, Trajectory
from agentgym.types import Task

AGENT = Path(__file__).with_name("chaos_agent.py")


class Judge(TextEnv):
    """Opens with the number of its seed, and rewards the last digit of a text."""

    runs_inline = True
    own_split = True  # the number of the prompt is the seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return f"Play {seed}.", {}

    def step(self, action: str) -> StepResult:
        return "", int(action[-1]) / 10, True, False, {}


def expected_status(number: int) -> Status:
    if number % 10 in (1, 2):
        return Status.AGENT_ERROR
    return Status.TIMEOUT if number % 20 == 3 else Status.COMPLETED


def play(renderer: Renderer, raw: Callable[[str], list[int]], folder: Path, count: int) -> list[Trajectory]:
    """Plays the episodes, and checks that each id that was sampled is recorded once, and trained once or excluded."""
    sampled: Counter[tuple[int, ...]] = Counter()

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        ids = tuple(raw(f"reply {sampling.seed}<|im_end|>"))
        sampled[ids] += 1
        return ids

    engine = ScriptedEngine(reply, context_window=1 << 16)
    config = AgentConfig(
        name=f"{sys.executable} -I -S {AGENT} {{prompt}}",
        unsafe=True,
        parallel=64,
        timeout_s=15.0 if count < 100 else 90.0,
    )

    async def run() -> list[Trajectory]:
        loop = RolloutLoop(engine, renderer, Limits(turn_tokens=100))
        async with launched_agents(loop, config, folder / "agents") as served:
            episodes = [Episode(Task("Judge-v0", number), group=str(number)) for number in range(count)]
            return await asyncio.gather(*(served.run(Judge(), episode) for episode in episodes))

    trajectories = asyncio.run(run())
    assert not engine.sessions, "a session was not released"
    with EpisodeWriter(folder) as writer:
        writer.write(trajectories)
    report = verify_run(folder, renderer)
    assert report.ok, report.lines()
    spans = [span for each in trajectories for row in each.rows for span in row.spans if span.source is Source.POLICY]
    assert Counter(span.ids for span in spans) == sampled, "a sampled id is lost, or recorded twice"
    return trajectories


def record_of(trajectory: Trajectory) -> Any:
    """All that two runs with one seed have in common."""
    rows = [(row.ids.tolist(), row.mask.tolist(), row.origin) for row in trajectory.rows]
    return trajectory.status, trajectory.reward, rows, [(turn.message, turn.reward) for turn in trajectory.turns]


@pytest.mark.parametrize(
    "count", [pytest.param(20, marks=pytest.mark.long), pytest.param(1000, marks=pytest.mark.slow)]
)
def test_agents_that_fail_in_every_way_lose_no_id_and_two_runs_are_equal(
    count: int, renderer: Renderer, raw: Callable[[str], list[int]], tmp_path: Path
) -> None:
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        others = {each.pid for each in psutil.Process().children(recursive=True)}  # of tests before this one
        runs.append(play(renderer, raw, tmp_path / name, count))
        left = [each.cmdline() for each in psutil.Process().children(recursive=True) if each.pid not in others]
        left += [
            each.info["cmdline"]
            for each in psutil.process_iter(["cmdline"])
            if str(AGENT) in (each.info["cmdline"] or ())
        ]
        assert not left
        assert not [*Path(tmp_path / name).glob("agents/*/")]
    for number, (first, second) in enumerate(zip(*runs, strict=True)):
        assert first.status is expected_status(number), (number, first)
        assert record_of(first) == record_of(second), number
    for line in branch_table(trajectory.rows for trajectory in runs[0]):
        print(*line)
