"""All settings of a training run, composed of the parts' own configurations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from typing import ClassVar, Literal

from agentgym.chat_templates.template_date import check_date
from agentgym.data import DataConfig, env_of_data
from agentgym.embedded import model_for
from agentgym.engines.local.config import LocalSettings
from agentgym.engines.server_kind import SERVERS, check_engine_name
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.errors import ConfigError
from agentgym.loading import is_code_path
from agentgym.model.architectures import check_backend
from agentgym.rewards import RewardConfig
from agentgym.rollout.agents.config import AgentConfig
from agentgym.rollout.episode.history import CompactionConfig, History
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.sampler import SamplerConfig
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_at_least
from agentgym.tools.sandbox.service_settings import SandboxConfig
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.cluster import ClusterConfig
from agentgym.trainers.settings.collapse import CollapseConfig
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.parity import ParityConfig
from agentgym.trainers.settings.record import RecordConfig
from agentgym.trainers.settings.sampling import TrainSamplingConfig
from agentgym.trainers.settings.speed import ProfileConfig, SpeedConfig
from agentgym.trainers.settings.tracking import TrackingConfig
from agentgym.trainers.tasks.mix import read_mix
from agentgym.trainers.tasks.practice import PracticeConfig
from agentgym.url_credentials import refuse_credentials

__all__ = ["AdvantageConfig", "TrainConfig"]


@config_class
class AdvantageConfig:
    """The estimator that credits the sampled tokens."""

    name: str | None = None
    """The estimator's name in `ADVANTAGES`, such as grpo, gae or gigpo, or your own as `path/to/file.py:name` or
    `package.module:name`; None is that of the algo."""
    settings: Mapping[str, object] | None = None
    """The settings of the estimator, such as gamma=0.95; others have their defaults. None takes those of the algo."""


@config_class
class TrainConfig:
    """One training run. Every step plays `tasks` x `group_size` episodes and learns from them."""

    is_lesson: ClassVar[bool] = False
    """True for runs that learn from recorded text, see `lessons/config.py`."""
    env: str = ""
    """Environment id, `package.module:Class`, or `path/to/file.py:Class`; left out, `Prompt-v0` plays the rows of
    `data`."""
    env_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the environment's class, such as level=2."""
    data: DataConfig = field(default_factory=DataConfig)
    """Rows of files as tasks, in place of the environment's own."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The source of an episode's reward, in place of the environment."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    practice: PracticeConfig = field(default_factory=PracticeConfig)
    algo: str = "grpo"
    """A preset (ppo, dapo, gspo, cispo...), the name of an advantage estimator (grpo, rloo, gigpo...), or your own as
    `path/to/file.py:name`; `agentgym algorithms list` shows all. It sets the advantage, loss and aggregation that are
    not set themselves; config.yaml holds the result."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    model: str = ""
    """The model to train: `embedded`, `embedded-large`, a folder with a model and its tokenizer, a GGUF file, or an id
    of the Hugging Face hub such as `Qwen/Qwen3-0.6B@main`; config.yaml then names the file's SHA-256, or the commit.
    Left out, it is `embedded` in the environments that it was taught (TextGame-v0 and LongRoad-v0), else
    `embedded-large`."""
    model_backend: str = "auto"
    """The code that computes the model: `fast`, the decoder for Llama, Mistral, Qwen2 and Qwen3; `transformers`, for
    any causal language model; `auto` is the fast one where it computes the architecture; or a class of your own that
    derives from one of transformers', as `path/to/file.py:Class`."""
    family: str | None = None
    """The chat format of the model, by a name of `agentgym tools families`, or your own as `path/to/file.py:name`, a
    function `(tokenizer)` that returns a `Renderer`; None detects it from the chat template, and config.yaml then names
    it."""
    chat_template: str = ""
    """A chat template that replaces the model's, such as for a base model, which has none: a file (Jinja), or `qwen3`,
    `chatml`, `llama3`, `gemma3` or `granite4`, whose marks must be tokens of the model."""
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking=false for Qwen3."""
    date: str | None = None
    """The present date for chat templates (`strftime_now`), such as 2026-03-01 or 2026-03-01T08:30:00. None is the
    moment at which the run begins; if the template writes it, config.yaml then holds that moment."""
    history: History = "append"
    """`append` keeps the conversation as it was sampled, old reasoning included: one row per episode. `rerender` has
    the chat template render it at every turn (most drop old reasoning), with a row for each rewrite."""
    engine: str = "local"
    """The engine that samples: `local` is the trained model in this process; `sglang` and `vllm` are servers; or your
    own as `path/to/file.py:name`, a function `(model, folder, version)` that returns an `Engine`."""
    executor: Literal["local", "ray"] = "local"
    """The location of the run's parts: `local` is this process, `ray` actors on a cluster, with the same numbers."""
    ray: ClusterConfig = field(default_factory=ClusterConfig)
    seed: int = 0
    """The seed of every random number of the run."""
    steps: int = 40
    """Training steps: each plays, credits and learns once."""
    epochs: float | None = None
    """Passes over the rows of data.train, which set `steps`; None leaves it to `steps`. (`learner.epochs` are passes of
    the optimizer over what a step played.)"""
    tasks: int = 16
    """Tasks per step; each is played by one group."""
    group_size: int = 8
    """Episodes of one task."""
    allow_single: bool = False
    """Accepts a group size of 1, whose advantages are all 0."""
    aggregation: str | None = None
    """The aggregation of token losses to one number, by its name in `AGGREGATIONS`, such as token-mean,
    seq-mean-token-mean or turn-mean, or your own as `path/to/file.py:name`; None is that of the algo."""
    norm_tokens: int | None = None
    """The tokens that `seq-mean-token-sum-norm` divides by; an aggregation of your own may take it too. None takes the
    most that an episode may sample, by its limits and the model's window; config.yaml then holds the number."""
    truncated_episodes: Literal["learn", "leave_out"] = "learn"
    """The use of episodes that a limit ended. `learn` treats them like all others; `leave_out` keeps them out of the
    loss, the baselines and the denominators, as if they had failed (overlong filtering of DAPO,
    `mask_truncated_completions` of TRL)."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    limits: Limits = field(default_factory=Limits)
    sampling: TrainSamplingConfig = field(default_factory=TrainSamplingConfig)
    sampler: SamplerConfig = field(default_factory=lambda: SamplerConfig(concurrency=128))
    compaction: CompactionConfig = field(default_factory=CompactionConfig)
    collapse: CollapseConfig = field(default_factory=CollapseConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    local: LocalSettings = field(default_factory=LocalSettings)
    server: ServerConfig = field(default_factory=ServerConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    max_staleness: int = 0
    """The most updates by which a sampled token may be older than the weights that learn from it. 0 plays a step, then
    learns. Above 0, later steps are played meanwhile, episodes go on over updates, and a step takes the groups that
    finish first; which those are depends on the clock."""
    serve: int | None = None
    """The port (0 takes a free one) at which external agents play the episodes of training through OpenAI's chat
    completions; None plays them here. Evaluations are played here either way."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    require_token: bool = False
    """Requires a token from external agents (serve). It is printed at the start, or read from AGENTGYM_TOKEN; setting
    that variable requires it too."""
    rival: str | None = None
    """The folder of a model with frozen weights, such as an earlier checkpoint, that plays all seats of a game but one
    in self-play (an environment's opponent=self); None has the trained policy play every seat."""
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)
    target_success: float | None = 0.95
    """Ends training once this share of the held-out tasks succeeds. They are played when the episodes of the last two
    steps succeeded as often, and if that is not enough, again after five steps or more; None trains for all `steps`."""
    observers: tuple[str, ...] = ()
    """Your own observers as `path/to/file.py:Class`, which are told of phases, held-out episodes and steps."""
    trackers: tuple[str, ...] = ()
    """The trackers that receive the run's metrics, besides its folder: any of tensorboard, wandb, mlflow and trackio,
    or your own as `path/to/file.py:Tracker`."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    max_minutes: float | None = None
    """Ends training after this time, with a checkpoint; None trains for `steps`. A resumed run starts it over."""

    def __post_init__(self) -> None:
        refuse_credentials(self)
        check_above_zero(self, "epochs")
        self._check_tasks()
        object.__setattr__(self, "model", self.model or model_for(self.env))
        check_at_least(1, self, "tasks", "group_size", "norm_tokens")
        if self.eval.episodes:
            self.reward.check_repeats(self.eval.repeats, "eval.repeats")
        self.reward.check_repeats(self.group_size, "group_size")
        check_date(self.date)
        if not is_code_path(self.engine):
            check_engine_name(self.engine)
        check_backend(self.model_backend, self.engine)
        if self.target_success is not None and not 0 < self.target_success <= 1:
            raise ConfigError(f"target_success is a share above 0 and at most 1, got {self.target_success}")
        check_at_least(0, self, "max_staleness")
        if self.servers_sleep and self.max_staleness:
            raise ConfigError(
                "server.serving.sleep has the server free its memory while the learner learns, and"
                f" max_staleness {self.max_staleness} has it sample meanwhile: leave one of them out"
            )
        if self.require_token and self.serve is None:
            raise ConfigError("require_token is about agents outside, which serve admits: set serve to a port")
        if self.serve is not None:
            from agentgym.rollout.serving.http_server import ServeConfig  # here: other settings need no server

            ServeConfig(port=self.serve)
            if self.agent.name:
                raise ConfigError("serve waits for agents that come by themselves, and agent starts one: leave one out")
            if self.compaction.at is not None:
                raise ConfigError("an agent outside (serve) shortens its conversation itself: leave compaction.at out")
        self.agent.check_compaction(self.compaction.at)
        self._check_practice()
        if self.executor == "ray":
            self._check_cluster()
            if self.ray.gpus_per_learner and self.learner.dtype == "auto":
                object.__setattr__(self, "learner", replace(self.learner, dtype="bfloat16"))
        else:
            self.learner.mesh.check_alone()

    def check_names(self) -> None:
        """Raises UnknownName for an algorithm that does not exist; one that is a location is looked up by the run."""
        learner, advantage = self.learner, self.advantage.name
        names = {"LOSSES": learner.loss, "CORRECTIONS": learner.correction, "AGGREGATIONS": self.aggregation}
        names |= {"ADVANTAGES": advantage, "OPTIMIZERS": self.optimizer.name, "SCHEDULES": self.optimizer.decay}
        usual = (None, TrainConfig.algo, "adamw", "muon", OptimizerConfig.decay)
        chosen = {table: name for table, name in names.items() if name not in usual and not is_code_path(str(name))}
        if not chosen and (self.is_lesson or self.algo in usual):
            return
        with suppress(ModuleNotFoundError):  # without torch a run can be planned, and cannot begin
            from agentgym.trainers.algorithms.catalog import TABLES  # here: they need torch, and other settings do not
            from agentgym.trainers.algorithms.presets import preset_of

            if not self.is_lesson:
                preset_of(self.algo)
            for table in TABLES:
                if name := chosen.get(table.variable):
                    table.entries[name]

    def _check_tasks(self) -> None:
        """Raises ConfigError unless tasks are named, and steps or passes over them; rows of data get an environment."""
        env, env_kwargs = env_of_data(self.data, self.env, self.env_kwargs)
        object.__setattr__(self, "env", env)
        object.__setattr__(self, "env_kwargs", env_kwargs)
        check_at_least(1, self, "steps")
        if self.epochs is not None and not self.data.has_files:
            raise ConfigError("epochs are passes over rows of files, and an environment has no end: set steps")

    @property
    def subject(self) -> str:
        """The name of what is learned from, which the run's folder is named after."""
        return self.env

    @property
    def plays(self) -> bool:
        """True if any episodes are played."""
        return True

    @property
    def adapts_in_place(self) -> bool:
        """True if adapters are on the model itself: no engine samples from it, which would need them merged."""
        return bool(self.learner.lora.rank) and not self.plays

    def optimizer_for(self, num_parameters: int) -> OptimizerConfig:
        """Returns the optimizer with the rate that suits a model of this size, where none is given."""
        return self.optimizer.for_size(num_parameters)

    @property
    def estimator(self) -> str:
        """The name of the estimator that credits the sampled tokens, in a resolved configuration."""
        assert self.advantage.name is not None, "resolve_config names the estimator"
        return self.advantage.name

    @property
    def cluster(self) -> ClusterConfig:
        """The actors of a run on a cluster; each running server has an engine actor, which reserves nothing."""
        if not (self.on_servers and self.server.urls):
            return self.ray
        return replace(
            self.ray, engines=len(self.server.urls), cpus={**self.ray.cpus, "engine": 0.0}, gpus_per_engine=0.0
        )

    def _check_cluster(self) -> None:
        if is_code_path(self.engine):
            engines = ", ".join(("local", *SERVERS))
            raise ConfigError(f"executor ray has the engines {engines}: leave executor out, or engine")
        if self.plays:
            check_at_least(1, self.ray, "engines", "workers", where="ray.")
        self.learner.check_shares(self.ray.learners)
        if self.is_played_outside:
            raise ConfigError("executor ray has no door for agents outside: leave serve and agent out")
        if self.learner.device != "cpu":
            raise ConfigError("learner.device is that of a run in one process: on a cluster give ray.gpus_per_learner")
        if self.ray.layout == "colocated" and self.max_staleness:
            raise ConfigError(
                "ray.layout colocated has engines that give their memory up while the learner learns, and"
                f" max_staleness {self.max_staleness} has them sample meanwhile: leave one of them out"
            )
        if self.on_servers and self.server.replicas != 1:
            raise ConfigError(
                f"with executor ray every engine actor has one server: say ray.engines={self.server.replicas}, and"
                " leave server.replicas out"
            )

    def _check_practice(self) -> None:
        if self.checkpoint.best_is_held_out and not self.eval.every:
            raise ConfigError(
                f"checkpoint.keep_best {self.checkpoint.keep_best} is a number of evaluations during training: add"
                " eval.every"
            )
        if self.practice.mix:
            names = [entry.env for entry in read_mix(self.practice.mix).values()]
            if self.env not in names:
                raise ConfigError(
                    f"env {self.env!r} is not in the mix ({', '.join(names)}): leave env out, or name one of them"
                )
            if self.env_kwargs:
                raise ConfigError(
                    "env_kwargs are those of one environment: in a mix each has its own, "
                    f'such as {self.env}=\'{{"weight": 2, "kwargs": {{"level": 1}}}}\''
                )
        if self.practice.filter not in (None, "off") and self.group_size == 1:
            raise ConfigError(
                "practice.filter leaves out groups whose episodes are all alike, and a group of one always is: use a"
                " group_size of 2 or more, or filter off"
            )

    @property
    def is_played_outside(self) -> bool:
        """True if agents play the episodes of training."""
        return self.serve is not None or bool(self.agent.name)

    @property
    def episodes_per_step(self) -> int:
        """The number of episodes of one step, without those that replace others."""
        return self.tasks * self.group_size

    @property
    def evaluates_while_learning(self) -> bool:
        """True if the engine computes beside the learner, on weights of its own."""
        if self.executor == "ray":
            return self.ray.layout == "disaggregated"
        return self.max_staleness > 0 or (self.on_servers and not self.servers_sleep)

    @property
    def on_servers(self) -> bool:
        """True if servers sample."""
        return self.engine in SERVERS

    @property
    def servers_sleep(self) -> bool:
        """True if servers free their memory while the learner learns."""
        return self.on_servers and self.server.serving.sleep
