"""What is asked of a cluster, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from agentgym.errors import ConfigError
from agentgym.rollout.limits import Limits
from agentgym.trainers.cluster_config import ClusterConfig
from agentgym.trainers.config import TrainConfig


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
