"""The settings of a lesson, a run that learns from recorded text: those of any run, and what it learns from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentgym.embedded import model_for
from agentgym.errors import ConfigError, RunFolderError
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.lessons.demonstrations import DemonstrationConfig
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.cluster import ClusterConfig
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig, UsualOptimizer
from agentgym.types import JSON

__all__ = ["DpoConfig", "LessonConfig", "SftConfig", "config_kind"]

PLAY_SETTINGS = (
    *("data", "practice", "algo", "advantage", "tasks", "group_size", "allow_single", "aggregation", "norm_tokens"),
    *("truncated_episodes", "parity", "max_staleness", "serve", "agent", "require_token", "rival"),
    *("learner.epochs", "learner.minibatches", "learner.correction", "learner.critic"),
)
"""Settings that only runs that learn from episodes of their own have a use for."""


@config_class
class LessonConfig(TrainConfig):
    """The settings of a lesson. Held-out tasks are played where `eval.episodes` is above 0: by default, those of the
    environment of demonstrations."""

    usual: ClassVar[UsualOptimizer]
    """The optimizer where none is given."""
    loss_name: ClassVar[str]
    """The loss of the learner."""
    sources: ClassVar[tuple[str, ...]]
    """The settings that name what is learned from, of which one is given."""
    is_lesson: ClassVar[bool] = True

    episodes: tuple[str, ...] = ()
    """Run folders whose recorded episodes are learned, by their exact ids."""
    validation: tuple[str, ...] = ()
    """Files or run folders like those that are learned, whose loss is measured after every pass."""
    steps: int = 0
    """Optimizer steps; 0 takes as many as `epochs` ask for, and 400 of demonstrations. config.yaml holds the number."""
    epochs: float | None = 1.0
    """Passes over the rows or pairs, each in another order, where `steps` is 0."""
    batch_size: int = 8
    """Rows, demonstrations or pairs of a step."""
    eval: HeldOutConfig = field(default_factory=lambda: HeldOutConfig(episodes=0))
    target_success: float | None = None
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=100, keep=1, keep_best=None))

    def __post_init__(self) -> None:
        self._refuse_played()
        learner = replace(self.learner, loss=self.loss_name, loss_settings=self.loss_settings)
        object.__setattr__(self, "learner", learner)
        if self.episodes and not self.model:
            object.__setattr__(self, "model", model_for(_recorded_env(self.episodes[0])))
        super().__post_init__()

    @property
    def source(self) -> str:
        """The setting that names what is learned from."""
        return next(name for name in self.sources if getattr(self, name))

    @property
    def paths(self) -> tuple[str, ...]:
        """The files or folders that are learned from; empty for demonstrations."""
        paths = getattr(self, self.source)
        return paths if isinstance(paths, tuple) else ()

    @property
    def loss_settings(self) -> Mapping[str, object]:
        """The settings of the loss."""
        return {}

    @property
    def subject(self) -> str:
        """The name of the first file or folder, or the environment of demonstrations."""
        return Path(self.paths[0]).resolve().stem if self.paths else self.env

    @property
    def plays(self) -> bool:
        """True if held-out tasks are played."""
        return self.eval.episodes > 0

    @property
    def evaluates_while_learning(self) -> bool:
        """False: held-out tasks are played between steps."""
        return False

    @property
    def cluster(self) -> ClusterConfig:
        """The actors of a lesson on a cluster, without engines and workers if it plays nothing."""
        if self.plays:
            return super().cluster
        return replace(self.ray, engines=0, workers=0, layout="disaggregated")

    def num_steps(self, num_items: int) -> int:
        """Returns the steps of the run, which has so many rows or pairs; 0 for demonstrations."""
        return self.steps or ceil((self.epochs or 1) * num_items / self.batch_size) or DEMONSTRATED_STEPS

    def optimizer_for(self, num_parameters: int) -> OptimizerConfig:
        """Returns the optimizer with the rate and the warm-up that suit a lesson of a model of this size."""
        return self.optimizer.for_size(num_parameters, self.usual, self.steps)

    def _refuse_played(self) -> None:
        """Raises ConfigError for settings of runs that learn from episodes of their own."""
        for path in PLAY_SETTINGS:
            settings: Any = self
            *blocks, name = path.split(".")
            for block in blocks:
                settings = getattr(settings, block)
            (setting,) = (own for own in fields(settings) if own.name == name)
            usual = setting.default if setting.default_factory is MISSING else setting.default_factory()
            if getattr(settings, name) != usual:
                raise ConfigError(f"{path} is for runs that play episodes: leave it out")
        if self.learner.loss not in (None, self.loss_name):
            raise ConfigError("learner.loss is that of the command: leave it out")

    def _check_tasks(self) -> None:
        """Raises ConfigError unless exactly one source is named, and an environment for what is played."""
        check_at_least(0, self, "steps")
        check_at_least(1, self, "batch_size")
        if self.plays and not (self.env or self.eval.mix):
            raise ConfigError("eval.episodes are of an environment, and none is named: name one in eval.mix")
        sources = [name for name in self.sources if getattr(self, name)]
        if len(sources) != 1:
            options = {"env": "env (demonstrations)", "episodes": "episodes (run folders)"}
            first, *rest = (options.get(name, f"{name} (files)") for name in self.sources)
            got = f"got {' and '.join(sources) or 'none'}"
            raise ConfigError(f"one source is learned from: {', '.join([first, *rest[:-1]])} or {rest[-1]}; {got}")


def _recorded_env(run: str) -> str:
    """Returns the environment of a run's first episode; nothing if there is none, which is said where it is read."""
    try:
        return next((record.trajectory.task.env_id for record in read_episodes(run)), "")
    except RunFolderError:
        return ""


NUM_HELD_OUT = 100
"""The held-out tasks that are played before and after demonstrations, where no number is given."""
DEMONSTRATED_STEPS = 400
"""The steps where demonstrations are learned and none are given.

A model that has to find the right row of a table stands at the loss of a guess for a while, and then falls: in
`examples/orders.py` after 110 to 140 steps, of three seeds.
"""


@config_class
class SftConfig(LessonConfig):
    """The settings of imitation: of a policy that plays, of conversations from files, or of recorded episodes."""

    usual: ClassVar[UsualOptimizer] = UsualOptimizer(("muon", 2e-3), ("adamw", 2e-5), 30)
    loss_name: ClassVar[str] = "reinforce"  # with an advantage of 1, the negative log likelihood
    sources: ClassVar[tuple[str, ...]] = ("env", "conversations", "episodes")

    algo: str = "sft"
    env: str = ""
    """Demonstrations of this environment: its id, package.module:Class or path/to/file.py:Class."""
    conversations: tuple[str, ...] = ()
    """Files (.jsonl, .parquet; at an address such as s3://bucket/rows.jsonl too) whose rows have OpenAI's `messages`,
    and `tools` where there are any."""
    epochs: float | None = 3.0
    batch_size: int = 16
    eval: HeldOutConfig = field(default_factory=lambda: HeldOutConfig(episodes=NUM_HELD_OUT))
    policy: str = "oracle"
    """The player to imitate; `oracle` is what the environment's make_oracle gives."""
    mistakes: float = 0.25
    """Share of turns at which a random move is played instead, so that the model sees what comes after mistakes."""
    learn_mistakes: bool = False
    """Imitate the random moves too."""
    skip_malformed: bool = False
    """Leave out conversations that are malformed, or that the chat format cannot express; else one stops the run."""
    min_reward: float | None = None
    """The least reward of an episode that is learned; None goes by success."""
    best_per_task: int | None = None
    """The most episodes of each task that are learned, those with the greatest rewards."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(decay="linear"))

    @property
    def demonstrations(self) -> DemonstrationConfig:
        """The settings of the player of the demonstrations."""
        return DemonstrationConfig(policy=self.policy, mistakes=self.mistakes, learn_mistakes=self.learn_mistakes)

    def __post_init__(self) -> None:
        if not self.env and self.eval == HeldOutConfig(episodes=NUM_HELD_OUT):  # rows name no environment to play
            object.__setattr__(self, "eval", HeldOutConfig(episodes=0))
        super().__post_init__()

    def _check_tasks(self) -> None:
        super()._check_tasks()
        for name, (source, default) in OF_SOURCE.items():
            if source != self.source and getattr(self, name) != default:
                raise ConfigError(f"{name} goes with {source}, and not with {self.source}")
        if self.validation and self.env:
            raise ConfigError("validation goes with conversations or episodes: demonstrations are always new")
        _ = self.demonstrations  # which refuses shares that are none


OF_SOURCE: Mapping[str, tuple[str, JSON]] = {
    "env_kwargs": ("env", {}),
    "policy": ("env", "oracle"),
    "mistakes": ("env", 0.25),
    "learn_mistakes": ("env", False),
    "skip_malformed": ("conversations", False),
    "min_reward": ("episodes", None),
    "best_per_task": ("episodes", None),
}
"""Settings that only one source has: the source and the default."""


@config_class
class DpoConfig(LessonConfig):
    """The settings of learning from pairs of a better and a worse reply (Rafailov et al. 2023)."""

    usual: ClassVar[UsualOptimizer] = UsualOptimizer(("adamw", 5e-5), ("adamw", 1e-6), 10)
    loss_name: ClassVar[str] = "preference"
    sources: ClassVar[tuple[str, ...]] = ("pairs", "episodes")

    algo: str = "dpo"
    pairs: tuple[str, ...] = ()
    """Files (.jsonl, .parquet; at an address such as s3://bucket/rows.jsonl too) whose rows have `chosen` and
    `rejected`, and `prompt` unless both begin with it: texts or OpenAI's messages, and `tools` where there are any."""
    pairs_per_task: int = 1
    """The most pairs of a task's episodes: best and worst, second best and second worst, ..."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """`sigmoid` is DPO (Rafailov et al. 2023), `ipo` a squared distance to a fixed margin (Azar et al. 2023), `hinge`
    SLiC's (Zhao et al. 2023)."""
    beta: float = 0.1
    """The weight of the divergence from the first weights that the loss stands for; less moves further from them."""
    label_smoothing: float = 0.0
    """The share of pairs whose order is taken for wrong (conservative DPO), in [0, 0.5); of `sigmoid`."""
    sft_weight: float = 0.0
    """The weight of the negative log likelihood of the better reply, per token, beside the loss."""

    @property
    def loss_settings(self) -> Mapping[str, object]:
        """The settings of the loss `preference`."""
        names = ("beta", "label_smoothing", "sft_weight")
        return {"form": self.loss, **{name: getattr(self, name) for name in names}}

    def _check_tasks(self) -> None:
        super()._check_tasks()
        check_at_least(1, self, "pairs_per_task")


def config_kind(settings: Mapping[str, object]) -> type[TrainConfig]:
    """Returns the class of the settings that a run has recorded."""
    kinds: Mapping[object, type[TrainConfig]] = {"sft": SftConfig, "dpo": DpoConfig}
    return kinds.get(settings.get("algo"), TrainConfig)
