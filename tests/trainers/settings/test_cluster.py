"""What is asked of a cluster, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.errors import ConfigError
from agentgym.rollout.limits import Limits
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.lessons.config import SftConfig
from agentgym.trainers.settings.cluster import ClusterConfig, Role
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.mesh import MeshConfig


def test_every_actor_has_a_bundle_learners_first() -> None:
    config = ClusterConfig(learners=2, engines=1, workers=3, gpus_per_engine=1, cpus={"worker": 0.25})
    assert config.bundles == [{"CPU": 1}, {"CPU": 1}, {"CPU": 1, "GPU": 1}, *[{"CPU": 0.25}] * 3]


def test_colocated_ranks_and_engines_share_their_bundles() -> None:
    config = ClusterConfig(layout="colocated", learners=2, engines=2, workers=1, gpus_per_learner=1, gpus_per_engine=1)
    assert config.bundles == [{"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1}, {"CPU": 0.5}]
    assert [config.place("learner", 1), config.place("engine", 1), config.place("worker", 0)] == [1, 1, 2]
    assert config.needs("learner") == config.needs("engine") == {"CPU": 1, "GPU": 0.5}
    apart = replace(config, layout="disaggregated")
    assert [apart.place("learner", 1), apart.place("engine", 1), apart.place("worker", 0)] == [1, 3, 4]
    assert apart.needs("engine") == {"CPU": 1, "GPU": 1}


@pytest.mark.parametrize("layout", ["colocated", "disaggregated"])
def test_a_reference_and_a_critic_have_bundles_between_engines_and_workers(layout: Any) -> None:
    own: dict[str, Any] = {"references": 2, "critics": 1, "gpus_per_learner": 1, "gpus_per_engine": 1}
    config = ClusterConfig(layout=layout, workers=2, cpus={"learner": 3, "worker": 0.25}, **own)
    rank, engine = {"CPU": 3, "GPU": 1}, {"CPU": 1, "GPU": 1}
    first = [{"CPU": 4, "GPU": 1}] if layout == "colocated" else [rank, engine]
    assert config.bundles == [*first, rank, rank, rank, {"CPU": 0.25}, {"CPU": 0.25}]
    roles: list[tuple[Role, int]] = [("engine", 0), ("reference", 1), ("critic", 0), ("worker", 1)]
    places = [config.place(role, number) for role, number in roles]
    assert places == [len(first) - 1, len(first) + 1, len(first) + 2, len(first) + 4]
    assert [config.needs(role) for role, _ in roles[1:]] == [rank, rank, {"CPU": 0.25}]


@pytest.mark.parametrize("engine", ["local", "sglang", "vllm"])
def test_an_engine_that_samples_meanwhile_is_not_colocated(engine: str) -> None:
    settings: dict[str, Any] = {"env": "TextGame-v0", "executor": "ray", "ray": ClusterConfig(layout="colocated")}
    TrainConfig(**settings, engine=engine)
    with pytest.raises(ConfigError, match="max_staleness 1 has them sample meanwhile"):
        TrainConfig(**settings, engine=engine, max_staleness=1)


def test_a_server_that_sleeps_is_not_to_sample_meanwhile() -> None:
    serving = ServingSettings(sleep=True)
    settings: dict[str, Any] = {"env": "TextGame-v0", "server": ServerConfig(serving=serving), "max_staleness": 1}
    TrainConfig(**settings, engine="local")
    with pytest.raises(ConfigError, match=r"server\.serving\.sleep .* max_staleness 1"):
        TrainConfig(**settings, engine="sglang")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "colocated", "engines": 2}, "got ray.learners=1 and ray.engines=2"),
        ({"layout": "colocated", "gpus_per_engine": 1}, "both 1, or both 0, got 0 and 1"),
        ({"learners": 0}, "ray.learners must be at least 1, got 0"),
        ({"workers": -1}, "ray.workers must be at least 0, got -1"),
        ({"cpus": {"engine": -0.5}}, "at least 0, got {'engine': -0.5}"),
        ({"cpus": {"workers": 1}}, "has no 'workers': did you mean 'worker'"),
        ({"max_restarts": -1}, "max_restarts must be at least 0"),
        ({"start_s": 0}, "start_s must be above 0"),
    ],
)
def test_impossible_clusters_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**settings)


@pytest.mark.parametrize("role", ["engines", "workers"])
def test_only_a_lesson_that_plays_nothing_has_no_engine_and_no_worker(role: str) -> None:
    with pytest.raises(ConfigError, match=f"ray.{role} must be at least 1, got 0"):
        TrainConfig(env="TextGame-v0", executor="ray", ray=ClusterConfig(**{role: 0}))
    nothing = HeldOutConfig(episodes=0)
    lesson = SftConfig(env="TextGame-v0", executor="ray", ray=ClusterConfig(learners=2), eval=nothing)
    assert (lesson.cluster.learners, lesson.cluster.engines, lesson.cluster.workers) == (2, 0, 0)
    playing = replace(lesson, eval=HeldOutConfig(episodes=2))
    assert (playing.cluster.engines, playing.cluster.workers) == (1, 2)


def test_learners_that_no_blocks_fill_are_refused() -> None:
    learner = LearnerConfig(mesh=MeshConfig(sequence=2))
    run = {"env": "TextGame-v0", "limits": Limits(max_turns=4), "learner": learner}
    with pytest.raises(ConfigError, match=r"3 learner ranks are no multiple of .* 2 x .* 1: give 2, or a multiple"):
        TrainConfig(**run, executor="ray", ray=ClusterConfig(learners=3))
    with pytest.raises(ConfigError, match="is for a learner of several ranks: give executor ray"):
        TrainConfig(**run)
    assert TrainConfig(**run, executor="ray", ray=ClusterConfig(learners=4)).learner.mesh.data(4) == 2


def test_shares_are_those_of_the_learner_ranks() -> None:
    run = {"env": "TextGame-v0", "limits": Limits(max_turns=4), "learner": LearnerConfig(shares=2)}
    with pytest.raises(
        ConfigError, match=r"learner.shares is 2, and 3 ranks have 3: leave learner.shares out, or give"
    ):
        TrainConfig(**run, executor="ray", ray=ClusterConfig(learners=3))
    assert TrainConfig(**run, executor="ray", ray=ClusterConfig(learners=2)).learner.shares == 2
    with pytest.raises(ConfigError, match="shares is at least 1, got 0"):
        LearnerConfig(shares=0)


def test_agents_outside_have_no_door_to_a_cluster() -> None:
    with pytest.raises(ConfigError, match="leave serve and agent out"):
        TrainConfig(env="TextGame-v0", executor="ray", limits=Limits(max_turns=4), serve=0)


def test_the_number_of_servers_on_a_cluster_is_that_of_the_engine_actors() -> None:
    with pytest.raises(ConfigError, match=r"say ray.engines=3, and leave server.replicas out"):
        TrainConfig(env="TextGame-v0", executor="ray", engine="sglang", server=ServerConfig(replicas=3))
    with pytest.raises(ConfigError, match=r"say ray.engines=2, and leave server.replicas out"):
        TrainConfig(env="TextGame-v0", executor="ray", engine="vllm", server=ServerConfig(replicas=2))


def test_servers_that_run_already_have_an_engine_actor_each_that_reserves_nothing() -> None:
    urls = ("http://a:30000", "http://b:30000", "http://c:30000")
    config = TrainConfig(
        env="TextGame-v0",
        executor="ray",
        engine="sglang",
        server=ServerConfig(urls=urls),
        ray=ClusterConfig(gpus_per_engine=1, workers=1),
    )
    assert config.cluster.bundles == [{"CPU": 1}, {}, {}, {}, {"CPU": 0.5}]
    assert replace(config, engine="local").cluster == config.ray
