"""Episodes that agents play which the test has started, with a policy whose replies the test writes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.trajectory import Trajectory
from agentgym.types import Task


class Sum(TextEnv):
    """Rewards a text with the sum in it."""

    runs_inline = True
    system_prompt = "You add numbers."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return "What is 2 + 3?", {}

    def step(self, action: str) -> StepResult:
        return "", float("5" in action), True, False, {}


class Stage:
    """Plays episodes for tests; `logs` is the folder of what the agents print."""

    def __init__(self, renderer: Renderer, raw: Callable[[str], list[int]], folder: Path) -> None:
        self.renderer, self.raw, self.folder = renderer, raw, folder
        self.logs = folder / "agents"
        self.prompts: list[str] = []

    def log(self, member: int = 0) -> str:
        return (self.logs / f"train-0-0-0-{member}.log").read_text(encoding="utf-8")

    def play(
        self,
        name: str,
        say: Callable[[str], str] = lambda prompt: "It is 5.",
        *,
        env: Callable[[], TextEnv] = Sum,
        num_episodes: int = 1,
        window: int = 1 << 18,
        **settings: Any,
    ) -> list[Trajectory]:
        """Episodes that the agent plays side by side; their record is verified, and holds each sampled id once."""
        sampled: list[tuple[int, ...]] = []

        def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
            self.prompts.append(self.renderer.decode(prompt_ids))
            sampled.append(tuple(self.raw(say(self.prompts[-1]) + "<|im_end|>"))[: sampling.max_tokens])
            return sampled[-1]

        engine = ScriptedEngine(reply, context_window=window)
        config = AgentConfig(name=name, **{"timeout_s": 60.0, "unsafe": True, **settings})

        async def run() -> list[Trajectory]:
            loop = RolloutLoop(engine, self.renderer, Limits(turn_tokens=4000))
            async with launched_agents(loop, config, self.logs) as served:
                episodes = [Episode(Task("Env-v0", 7), member=member) for member in range(num_episodes)]
                return await asyncio.gather(*(served.run(env(), episode) for episode in episodes))

        played = asyncio.run(run())
        assert not engine.sessions, "a session was not released"
        (self.folder / "episodes.jsonl").unlink(missing_ok=True)
        with EpisodeWriter(self.folder) as writer:
            writer.write(played)
        report = verify_run(self.folder, self.renderer)
        assert report.ok, "\n".join(report.lines())
        spans = [
            span.ids
            for trajectory in played
            for row in trajectory.rows
            for span in row.spans
            if span.source == "policy"
        ]
        assert sorted(spans) == sorted(sampled), "a sampled id is lost, or recorded twice"
        return played


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harnesses that `make harnesses` installs come first on PATH."""
    build = [Path(__file__).parent / "environments" / "build.sh", "--path"]
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(build, capture_output=True, text=True, check=True, env=environ)
    monkeypatch.setenv("PATH", f"{done.stdout.strip()}:{os.environ['PATH']}")


@pytest.fixture
def stage(renderer: Renderer, raw: Callable[[str], list[int]], tmp_path: Path) -> Stage:
    return Stage(renderer, raw, tmp_path)
