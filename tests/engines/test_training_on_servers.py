"""Training on real servers: the weights arrive, logprobs are the trainer's, and what goes wrong is named at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch

import agentgym.engines.sglang.replica
from agentgym.chat_templates import renderer_for
from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import WeightSync
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig, ServerLaunch
from agentgym.engines.servers.server_process import ServerProcess
from agentgym.engines.servers.serving_settings import EngineServing, PauseMode, ServingSettings
from agentgym.engines.sglang.engine import open_sglang
from agentgym.engines.sglang.weight_sync import SglangSync
from agentgym.errors import AgentGymError
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.sampler import Sampler
from agentgym.testing.contracts.engine import check_engine
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.sampling import TrainSamplingConfig
from agentgym.trajectory import Row, Trajectory
from agentgym.types import Task

pytestmark = pytest.mark.engine
PAUSES: tuple[PauseMode, ...] = ("abort", "in_place", "retract")
MakeReference = Callable[..., Any]
Train = Callable[[TrainConfig, Path], list[StepMetrics]]


@pytest.fixture
def small_run(small_run: TrainConfig) -> TrainConfig:
    """A harder game for the small run, in few turns."""
    return replace(small_run, env_kwargs={"level": 2}, tasks=4, limits=Limits(max_turns=12, turn_tokens=64))


@pytest.fixture
def train(train: Callable[..., Any]) -> Train:
    """`train(config, folder)`: the metrics of a run's steps."""
    return lambda config, folder: list(train(config, folder)[1].steps)


def on_server(engine: str, request: pytest.FixtureRequest) -> TrainConfig:
    """The small run on a server of the named kind."""
    small_run: TrainConfig = request.getfixturevalue("small_run")
    urls = (request.getfixturevalue(f"{engine}_server").url,)
    return replace(small_run, engine=engine, server=ServerConfig(urls=urls))


def gentle(config: TrainConfig) -> TrainConfig:
    """With steps so small that the policy stays as good as it is: one that collapses has no signal to learn from."""
    return replace(config, optimizer=OptimizerConfig(learning_rate=1e-4))


def gaps(model: Any, row: Row) -> torch.Tensor:
    """How far the logprob of each id of a row but the first is from the model's, `[T - 1]`; NaN where it has none."""
    return torch.tensor(model.gaps(row.ids[:1], row.ids[1:], row.logprobs[1:].tolist()))


# ---- parity


@pytest.mark.parametrize(("temperature", "num_steps"), [(0.6, 2), (1.0, 4), (1.3, 2)])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_logprobs_are_the_trainers_after_every_sync(
    train: Train, engine: str, temperature: float, num_steps: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = replace(gentle(on_server(engine, request)), sampling=TrainSamplingConfig(temperature=temperature))
    steps = train(replace(config, steps=num_steps, group_size=8), tmp_path / "run")
    assert [step.sync.version for step in steps] == list(range(1, num_steps + 1))
    updates = [step.update for step in steps if step.update is not None]
    # Over the 10^5 ids of these runs rounding has a tail: the trainer's own logprobs are up to 4e-5 from those in
    # float64, while the mean is 1e-7. A missed update is over 1e-2.
    assert all(0 < update.mismatch_max < 1e-3 and update.mismatch_mean < 1e-6 for update in updates)
    assert len(updates) >= num_steps / 2
    for before, after in pairwise(steps):  # no signal, no step: the weights are then as they were
        assert (before.sync.checksum != after.sync.checksum) is (after.update is not None)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_command_launches_a_server_trains_and_leaves_a_sound_run(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = request.getfixturevalue(f"{engine}_python")
    folder = tmp_path / "run"
    others = {process.pid for process in psutil.Process().children(recursive=True)}  # of other tests
    words = f"train --env TextGame-v0 --algo grpo --engine {engine} --server.python {python} --steps 3 --tasks 4"
    assert main([*words.split(), "--eval.episodes", "4", "--output", str(folder), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["steps"] == 3
    assert main(["verify", str(folder)]) == 0
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in others]
    assert not [process.cmdline() for process in left if engine in " ".join(process.cmdline())]


@pytest.mark.parametrize("sync", ["disk", "broadcast"])
def test_weights_travel_by_disk_and_by_broadcast_too(
    train: Train, sync: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = on_server("sglang", request)
    serving = EngineServing(sync=sync, bucket_mb=1, sleep=True)
    steps = train(replace(config, server=replace(config.server, serving=serving)), tmp_path / "run")
    assert [step.sync.version for step in steps] == [1, 2]
    assert all(step.update is None or step.update.mismatch_max < 1e-4 for step in steps)


@pytest.mark.parametrize("pause", PAUSES)
def test_groups_that_go_on_over_updates_are_trained_in_each_pause_mode(
    train: Train, pause: PauseMode, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = on_server("sglang", request)
    config = replace(config, server=replace(config.server, serving=ServingSettings(pause=pause)))
    steps = train(replace(gentle(config), steps=4, max_staleness=2), tmp_path / "run")
    assert [step.rollout.episodes for step in steps] == [16] * 4
    assert all(step.update is None or step.update.mismatch_max < 1e-4 for step in steps)
    assert sum(step.update.stale_tokens for step in steps if step.update) > 0
    assert main(["verify", str(tmp_path / "run")]) == 0


# ---- what goes wrong is caught within one step, by name


def test_a_sync_that_is_skipped_is_named(
    train: Train, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = ReplicatedEngine.update_weights

    async def skipped(self: ReplicatedEngine, weights: Any, version: int) -> WeightSync:
        return WeightSync(version=version) if version else await update(self, weights, version)

    monkeypatch.setattr(ReplicatedEngine, "update_weights", skipped)
    with pytest.raises(AgentGymError, match=r"stale weights: .* bears version 0"):
        train(replace(on_server("sglang", request), steps=6), tmp_path / "run")  # until a step has a signal


def test_a_tensor_that_is_left_out_is_named(
    train: Train, leave_out: Callable[[str], None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    leave_out("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(AgentGymError, match=r"1 of 34 tensors .* 'model.layers.1.mlp.gate_up_proj.weight'"):
        train(replace(on_server("sglang", request), steps=6), tmp_path / "run")  # until a step has a signal


def test_a_tensor_that_is_left_out_is_caught_by_its_logprobs_too(
    train: Train, leave_out: Callable[[str], None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    leave_out("model.layers.1.mlp.up_proj.weight")
    config = on_server("sglang", request)
    config = replace(config, server=replace(config.server, serving=EngineServing(verify_sync=False)), steps=6)
    with pytest.raises(AgentGymError, match=r"differ by .* Likely cause: "):
        train(config, tmp_path / "run")


def test_a_cache_that_is_not_flushed_is_named(
    train: Train, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = agentgym.engines.sglang.replica
    payload, load = module.generate_payload, SglangSync.load

    def unparted(*arguments: Any, **options: Any) -> dict[str, object]:
        return payload(*arguments, **{**options, "cache_key": None})

    async def unflushed(self: SglangSync, *arguments: Any, **options: Any) -> Any:
        return await load(self, *arguments, **{**options, "flush": False})

    monkeypatch.setattr(module, "generate_payload", unparted)
    monkeypatch.setattr(SglangSync, "load", unflushed)
    with pytest.raises(AgentGymError, match="Likely cause: stale KV cache"):
        train(replace(on_server("sglang", request), steps=6), tmp_path / "run")  # until a step has a signal


# ---- an update in the middle of running episodes


@pytest.fixture
def models(reference: MakeReference) -> list[Any]:
    """The embedded model and two changes of it that play about as well."""
    return [reference(number, scale=0.02 * number) for number in range(3)]


async def play_with_updates(engine: ReplicatedEngine, models: Sequence[Any]) -> list[Trajectory]:
    """64 episodes, and new weights while they run."""
    loop = RolloutLoop(engine, renderer_for(embedded_folder()), Limits(max_turns=10, turn_tokens=64))
    sampler = Sampler(loop)
    episodes = [Episode(Task("TextGame-v0", number), f"0/{number}") for number in range(64)]
    await engine.update_weights(models[0].tensors(), 0)
    playing = asyncio.ensure_future(sampler.run(episodes))
    try:
        for version, model in enumerate(models[1:], start=1):
            await in_the_middle(playing, engine, num_requests=100 * version)
            await engine.pause()
            await engine.update_weights(model.tensors(), version)
            await engine.resume()
        return await playing
    finally:
        sampler.close()


async def in_the_middle(playing: asyncio.Future[list[Trajectory]], engine: ReplicatedEngine, num_requests: int) -> None:
    """Waits until the engine was asked so often: 64 episodes ask some 400 times."""
    while engine.num_requests < num_requests:
        assert not playing.done(), "the episodes were over before the last update"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("pause", PAUSES)
def test_an_update_in_the_middle_of_64_episodes_loses_none(
    pause: PauseMode, sglang_server: ServerProcess, models: list[Any]
) -> None:
    async def run() -> list[Trajectory]:
        config = ServerConfig(urls=(sglang_server.url,), serving=ServingSettings(pause=pause))
        engine = await open_sglang(config, embedded_folder())
        try:
            return await play_with_updates(engine, models)
        finally:
            await engine.close()

    check_versions(asyncio.run(run()), models, mixed=pause == "in_place")


def check_versions(trajectories: Sequence[Trajectory], models: Sequence[Any], *, mixed: bool = False) -> None:
    """All 64 are there, and each token has the logprob of the weights that it names, over all ids before it.

    `mixed` is for tokens that were sampled over an old cache: they are of no version alone.
    """
    assert [trajectory.status.trainable for trajectory in trajectories] == [True] * 64
    versions = {
        version for trajectory in trajectories for row in trajectory.rows for version in row.policy_versions[row.mask]
    }
    assert versions == {0, 1, 2}
    if mixed:
        return
    for row in (row for trajectory in trajectories for row in trajectory.rows):
        for version in set(row.policy_versions[row.mask]):
            at = torch.from_numpy((row.policy_versions == version)[1:])
            assert gaps(models[version], row)[at].max() < 1e-3


def test_episodes_of_a_replica_that_is_killed_finish_on_the_other(
    sglang_python: str, reference: MakeReference, tmp_path: Path
) -> None:
    async def run() -> tuple[list[Trajectory], int]:
        config = ServerLaunch(python=sglang_python, replicas=2, device="cpu", log_folder=str(tmp_path))
        engine = await open_sglang(config, embedded_folder())
        try:
            loop = RolloutLoop(engine, renderer_for(embedded_folder()), Limits(max_turns=10, turn_tokens=64))
            sampler = Sampler(loop)
            playing = asyncio.ensure_future(
                sampler.run([Episode(Task("TextGame-v0", number), f"0/{number}") for number in range(64)])
            )
            await in_the_middle(playing, engine, num_requests=150)
            server = cast(Any, engine.replicas[0]).transport.process
            for process in psutil.Process(server.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # it ends with the process before it
                    process.kill()
            trajectories = await playing
            sampler.close()
            assert engine.router.alive == [1]
            return trajectories, engine.num_lost
        finally:
            await engine.close()

    trajectories, num_lost = asyncio.run(run())
    assert num_lost > 0
    assert [trajectory.status.trainable for trajectory in trajectories] == [True] * 64
    model = reference(0)
    for row in (row for trajectory in trajectories for row in trajectory.rows):
        at = torch.from_numpy(row.mask)[1:]
        assert gaps(model, row)[at].max() < 1e-4


# ---- the contract


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("stream", [False, True])
def test_the_server_keeps_the_engine_contract(
    pause: PauseMode, stream: bool, sglang_server: ServerProcess, reference: MakeReference
) -> None:
    model = reference(0)

    async def run() -> list[Any]:
        config = ServerConfig(urls=(sglang_server.url,), serving=ServingSettings(pause=pause, stream=stream))
        engine = await open_sglang(config, embedded_folder())
        try:
            weights = model.tensors()
            await engine.update_weights(weights, 1)
            findings = await check_engine(
                engine,
                recompute=lambda prompt, reply, sampling: model.logprobs(prompt, reply, sampling.temperature),
                weights=weights,
                reproducible=False,
            )
            return list(findings)
        finally:
            await engine.close()

    assert asyncio.run(run()) == []
