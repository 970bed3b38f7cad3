"""Which processes a run on a Ray cluster is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentgym.errors import ConfigError

__all__ = ["ClusterConfig"]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The actors of a run with `executor` ray, and what each takes of the cluster."""

    address: str | None = None
    """The cluster to join: `auto` is the one that runs on this machine, `HOST:PORT` or `ray://HOST:PORT` another. None
    joins what RAY_ADDRESS names, and otherwise begins one on this machine that ends with the run."""
    learners: int = 1
    """Ranks that share the learner (FSDP)."""
    engines: int = 1
    """Replicas of the in-process engine."""
    workers: int = 2
    """Processes that play episodes: environments, chat templates, the rollout loop."""
    cpus_per_learner: float = 1.0
    """Cores that Ray reserves for a learner rank."""
    cpus_per_engine: float = 1.0
    """Cores that Ray reserves for an engine."""
    cpus_per_worker: float = 0.5
    """Cores that Ray reserves for a worker."""
    gpus_per_learner: float = 0.0
    """GPUs that Ray reserves for a learner rank; untested above 0."""
    gpus_per_engine: float = 0.0
    """GPUs that Ray reserves for an engine; untested above 0."""
    placement: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """Ray's placement strategy: over as many nodes as there are, or on as few."""
    max_restarts: int = 3
    """How often an actor that died is begun anew, each; a learner rank's death takes all ranks back to the newest
    checkpoint."""
    start_s: float = 120.0
    """Seconds that the cluster may take to give what was asked for."""

    def __post_init__(self) -> None:
        for name in ("learners", "engines", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"ray.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("cpus_per_learner", "cpus_per_engine", "cpus_per_worker", "gpus_per_learner", "gpus_per_engine"):
            if getattr(self, name) < 0:
                raise ConfigError(f"ray.{name} must be at least 0, got {getattr(self, name)}")
        if self.max_restarts < 0:
            raise ConfigError(f"ray.max_restarts must be at least 0, got {self.max_restarts}")
        if not self.start_s > 0:
            raise ConfigError(f"ray.start_s must be above 0, got {self.start_s}")

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What each actor reserves, in Ray's words: learners first, then engines, then workers."""
        learner = {"CPU": self.cpus_per_learner, "GPU": self.gpus_per_learner}
        engine = {"CPU": self.cpus_per_engine, "GPU": self.gpus_per_engine}
        counted = [(self.learners, learner), (self.engines, engine), (self.workers, {"CPU": self.cpus_per_worker})]
        return [{name: one for name, one in bundle.items() if one} for number, bundle in counted for _ in range(number)]
