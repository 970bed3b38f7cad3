"""A taskset of verifiers 0.4 whose tasks fail, each in its own way, and environments that cannot be played."""

from __future__ import annotations

import asyncio
import json
import os
import time

import verifiers.v1 as vf
from verifiers_kinds import KINDS


class FaultyData(vf.TaskData):  # type: ignore[misc]
    kind: str


class FaultyTask(vf.Task[FaultyData]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def paid(self, trace: vf.Trace) -> float:
        kind = self.data.kind
        if kind == "raises":
            raise OSError("the scorer is broken")
        if kind == "dies":
            print("no more memory", flush=True)
            os._exit(3)
        if kind == "hangs":
            time.sleep(600)
        if kind == "sleeps":
            await asyncio.sleep(600)
        if kind == "prints":
            for number in range(300_000):
                print(json.dumps({"id": number, "text": "a record of an environment that prints much"}))
        return float("nan") if kind == "pays no number" else 1.0


class FaultyConfig(vf.TasksetConfig):  # type: ignore[misc]
    kinds: tuple[str, ...] = KINDS


class FaultyTaskset(vf.Taskset[FaultyTask, FaultyConfig]):  # type: ignore[misc]
    def load(self) -> list[FaultyTask]:
        return [FaultyTask(FaultyData(prompt=f"It {kind}.", kind=kind)) for kind in self.config.kinds]


class TwoConfig(vf.EnvConfig):  # type: ignore[misc]
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class TwiceEnv(vf.SingleAgentEnv):  # type: ignore[misc]
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)
        await agents.agent.run(task)


class TwoEnv(vf.Env[TwoConfig]):  # type: ignore[misc]
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.first.run(task)


class ShellHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    async def launch(self, *rest: object) -> object:
        raise NotImplementedError


class BoxTask(vf.Task[vf.TaskData]):  # type: ignore[misc]
    NEEDS_CONTAINER = True


class BoxTaskset(vf.Taskset[BoxTask, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> list[BoxTask]:
        return [BoxTask(vf.TaskData(prompt="Work."))]


__all__ = os.environ.get("FAULTS", "FaultyTaskset").split()  # a case of the tests names its own
