"""The settings of a run's processes on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentgym.errors import ConfigError
from agentgym.settings import check_above_zero, check_at_least

__all__ = ["ClusterConfig", "Role"]

Role: TypeAlias = Literal["learner", "engine", "worker"]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The actors of a run with `executor` ray, and the resources of each."""

    address: str | None = None
    """The cluster to join: `auto` is the one that runs on this machine, `HOST:PORT` or `ray://HOST:PORT` another. None
    joins the one that RAY_ADDRESS names, and otherwise starts one on this machine that ends with the run."""
    learners: int = 1
    """Ranks that share the learner (FSDP)."""
    engines: int = 1
    """Replicas of the engine: of the model in process, or servers (engine sglang or vllm), each with an actor."""
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
    layout: Literal["disaggregated", "colocated"] = "disaggregated"
    """`disaggregated` gives learner ranks and engines cores and GPUs of their own. `colocated` puts one engine on the
    cores and GPU of every rank: it frees its memory while the rank learns, and takes it back with the new weights."""
    placement: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """Ray's placement strategy: over as many nodes as there are, or on as few."""
    max_restarts: int = 3
    """The number of times that each actor is restarted after it died; the death of a learner rank takes all ranks back
    to the newest checkpoint."""
    start_s: float = 120.0
    """Seconds that the cluster may take to provide the requested resources."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "learners", "engines", "workers", where="ray.")
        check_at_least(0, self, "cpus_per_learner", "cpus_per_engine", "cpus_per_worker", where="ray.")
        check_at_least(0, self, "gpus_per_learner", "gpus_per_engine", "max_restarts", where="ray.")
        check_above_zero(self, "start_s", where="ray.")

        if self.layout == "colocated":
            self._check_colocated()

    def _check_colocated(self) -> None:
        if self.engines != self.learners:
            raise ConfigError(
                f"ray.layout colocated has one engine with every learner rank: got ray.learners={self.learners} and"
                f" ray.engines={self.engines}"
            )
        if self.gpus_per_learner != self.gpus_per_engine or self.gpus_per_engine not in (0.0, 1.0):
            raise ConfigError(
                "ray.layout colocated has a rank and its engine on one GPU: gpus_per_learner and gpus_per_engine are"
                f" both 1, or both 0, got {self.gpus_per_learner:g} and {self.gpus_per_engine:g}"
            )

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The resources to reserve, as Ray's bundles: for learners, engines and workers, in this order.

        Colocated engines are in the learners' bundles.
        """
        learner = {"CPU": self.cpus_per_learner, "GPU": self.gpus_per_learner}
        engine = {"CPU": self.cpus_per_engine, "GPU": self.gpus_per_engine}
        counted = [(self.learners, learner), (self.engines, engine), (self.workers, {"CPU": self.cpus_per_worker})]
        if self.layout == "colocated":
            both = {"CPU": self.cpus_per_learner + self.cpus_per_engine, "GPU": self.gpus_per_learner}
            counted = [(self.learners, both), counted[2]]
        return [
            {name: amount for name, amount in bundle.items() if amount}
            for number, bundle in counted
            for _ in range(number)
        ]

    def place(self, role: Role, number: int) -> int:
        """The index of an actor's bundle."""
        if role == "learner":
            return number
        before = self.learners if self.layout == "disaggregated" else 0
        return before + number if role == "engine" else before + self.engines + number

    def needs(self, role: Role) -> dict[str, float]:
        """The resources that an actor takes of its bundle; two that share a GPU take half of it each."""
        cpus = {"learner": self.cpus_per_learner, "engine": self.cpus_per_engine, "worker": self.cpus_per_worker}
        gpus = {"learner": self.gpus_per_learner, "engine": self.gpus_per_engine, "worker": 0.0}
        share = 2 if self.layout == "colocated" else 1
        needed = {"CPU": cpus[role], "GPU": gpus[role] / share}
        return {name: amount for name, amount in needed.items() if amount}
