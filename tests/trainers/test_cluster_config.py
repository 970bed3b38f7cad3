"""What is asked of a cluster, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from agentgym.errors import ConfigError
from agentgym.rollout.limits import Limits
from agentgym.trainers.cluster_config import ClusterConfig
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner_config import LearnerConfig
from agentgym.trainers.mesh_config import MeshConfig


def test_every_actor_has_a_bundle_learners_first() -> None:
    config = ClusterConfig(learners=2, engines=1, workers=3, gpus_per_engine=1, cpus_per_worker=0.25)
    assert config.bundles == [{"CPU": 1}, {"CPU": 1}, {"CPU": 1, "GPU": 1}, *[{"CPU": 0.25}] * 3]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"learners": 0}, "ray.learners must be at least 1, got 0"),
        ({"workers": -1}, "ray.workers must be at least 1, got -1"),
        ({"cpus_per_engine": -0.5}, "at least 0, got -0.5"),
        ({"max_restarts": -1}, "max_restarts must be at least 0"),
        ({"start_s": 0}, "start_s must be above 0"),
    ],
)
def test_impossible_clusters_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ClusterConfig(**settings)


@pytest.mark.parametrize("settings", [{"engine": "sglang"}, {"serve": 0}])
def test_what_a_cluster_cannot_do_yet_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave engine and serve out"):
        TrainConfig(env="TextGame-v0", executor="ray", limits=Limits(max_turns=4), **settings)


def test_learners_that_no_blocks_fill_are_refused() -> None:
    learner = LearnerConfig(mesh=MeshConfig(sequence=2))
    run = {"env": "TextGame-v0", "limits": Limits(max_turns=4), "learner": learner}
    with pytest.raises(ConfigError, match=r"3 learner ranks are no multiple of .* 2 x .* 1: give 2, or a multiple"):
        TrainConfig(**run, executor="ray", ray=ClusterConfig(learners=3))
    with pytest.raises(ConfigError, match="is for a learner of several ranks: give executor ray"):
        TrainConfig(**run)
    assert TrainConfig(**run, executor="ray", ray=ClusterConfig(learners=4)).learner.mesh.data(4) == 2
