"""The settings of a run's processes on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, TypeAlias

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_at_least, check_named_numbers

__all__ = ["ClusterConfig", "ModelRole", "Role"]

ModelRole: TypeAlias = Literal["learner", "reference", "critic"]
"""The ranks that have a model and its gradients, or a model alone."""
Role: TypeAlias = Literal[ModelRole, "engine", "worker"]
ROLES: tuple[Role, ...] = ("learner", "engine", "reference", "critic", "worker")
"""All roles, in the order in which their resources are reserved."""

CORES: Mapping[str, float] = {"learner": 1.0, "engine": 1.0, "worker": 0.5}
"""The cores that an actor reserves where `ray.cpus` does not name it; a worker mostly waits for engines."""


@config_class
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
    references: int = 0
    """Ranks that have the reference of the KL term, such as a teacher too large for the learner's GPUs. 0 leaves it to
    the learner's ranks, as a penalty of the whole vocabulary (`jsd`) has to."""
    critics: int = 0
    """Ranks that have the critic, with a backbone of its own, and train it. 0 leaves it to the learner's ranks."""
    cpus: Mapping[str, float] = field(default_factory=dict)
    """Cores that Ray reserves for each actor, such as learner=4 worker=0.2: 1 for a learner (a rank of the learner, the
    reference or the critic), 1 for an engine, 0.5 for a worker."""
    gpus_per_learner: float = 0.0
    """GPUs that Ray reserves for a rank of the learner, the reference or the critic; untested above 0."""
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
        check_at_least(1, self, "learners", where="ray.")
        check_at_least(0, self, "engines", "workers", "references", "critics", "max_restarts", where="ray.")
        check_named_numbers("ray.cpus", self.cpus, CORES)
        if min(self.cpus.values(), default=0) < 0:
            raise ConfigError(f"ray.cpus are at least 0, got {dict(self.cpus)}")
        check_at_least(0, self, "gpus_per_learner", "gpus_per_engine", where="ray.")
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
        """The resources to reserve, as Ray's bundles, in the order of ROLES.

        Colocated engines are in the learners' bundles.
        """
        amounts = {role: self._amounts(role) for role in ROLES}
        if "engine" not in self._reserving:
            amounts["learner"]["CPU"] += amounts["engine"]["CPU"]
        return [
            {name: amount for name, amount in amounts[role].items() if amount}
            for role in self._reserving
            for _ in range(self.count(role))
        ]

    @property
    def _reserving(self) -> list[Role]:
        """The roles that have bundles of their own."""
        return [role for role in ROLES if role != "engine" or self.layout == "disaggregated"]

    def count(self, role: Role) -> int:
        """The number of actors of a role."""
        number: int = getattr(self, f"{role}s")
        return number

    def place(self, role: Role, number: int) -> int:
        """The index of an actor's bundle."""
        home = role if role in self._reserving else "learner"
        return number + sum(self.count(earlier) for earlier in self._reserving[: self._reserving.index(home)])

    def needs(self, role: Role) -> dict[str, float]:
        """The resources that an actor takes of its bundle; two that share a GPU take half of it each."""
        needed = self._amounts(role)
        if self.layout == "colocated" and role in ("learner", "engine"):
            needed["GPU"] /= 2
        return {name: amount for name, amount in needed.items() if amount}

    def _amounts(self, role: Role) -> dict[str, float]:
        actor = role if role in CORES else "learner"
        gpus = {"learner": self.gpus_per_learner, "engine": self.gpus_per_engine}
        return {"CPU": self.cpus.get(actor, CORES[actor]), "GPU": gpus.get(actor, 0.0)}
