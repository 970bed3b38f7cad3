"""The settings of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence  # noqa: F401 - the command line resolves `JSON` in this module
from dataclasses import asdict, field, fields

import agentgym
from agentgym.chat_templates.template_date import check_date
from agentgym.data import DataConfig, env_of_data
from agentgym.embedded import EMBEDDED, model_for
from agentgym.engines.openai.config import ChatEndpointConfig, endpoint_url, is_url
from agentgym.engines.server_kind import check_engine_name
from agentgym.envs.base.policies import POLICIES
from agentgym.errors import ConfigError
from agentgym.evaluation.play.open_model import ModelOptions
from agentgym.model.architectures import check_backend
from agentgym.rewards import RewardConfig
from agentgym.rollout.agents.config import AgentConfig
from agentgym.rollout.episode.history import CompactionConfig, History
from agentgym.rollout.limits import STALL_S, SamplingConfig
from agentgym.rollout.sampling.sampler import SamplerConfig
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_at_least
from agentgym.tools.sandbox.service_settings import SandboxConfig
from agentgym.types import JSON
from agentgym.url_credentials import refuse_credentials

__all__ = ["EvalConfig"]


@config_class
class EvalConfig(ModelOptions):
    """The settings of an evaluation. Equal ones give equal episodes, byte for byte, unless a chat endpoint plays."""

    env: str = ""
    """An environment id, `package.module:Class` or `path/to/file.py:Class`; without one, `Prompt-v0` plays the rows of
    `data`."""
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """The keywords of the environment's class."""
    policy: str = ""
    """`embedded`, `embedded-large`, a model folder, a GGUF file, an id of the Hugging Face hub such as
    `Qwen/Qwen3-0.6B`, the `http://HOST:PORT/v1` of a chat endpoint, or `oracle`, `cheat`, `random`: policies that need
    no model. Left out, it is `embedded` in the environments that it was taught (TextGame-v0 and LongRoad-v0), else
    `embedded-large`."""
    num_tasks: int = 50
    """The number of held-out tasks: the first ones, whatever the seed."""
    num_repeats: int = 1
    """The number of episodes of each task."""
    seed: int = 0
    """The seed of the sampling; tasks do not depend on it."""
    temperature: float = 1.0
    """The temperature of the sampling; 0 is greedy."""
    top_p: float = 1.0
    """The nucleus mass in (0, 1] that is sampled from; 1 is off."""
    top_k: int = 0
    """The number of most probable ids that are sampled from; 0 is off."""
    min_p: float = 0.0
    """Leaves out ids that are less probable than this share of the most probable one; 0 is off."""
    repetition_penalty: float = 1.0
    """Makes ids that prompt or reply have already less probable: positive logits are divided by it, negative ones
    multiplied; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each id that the reply has already, as OpenAI does; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the reply has the id; 0 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply, such as </answer>, wherever they occur in it; the reply ends with the text."""
    max_turns: int = 200
    """The maximum number of replies in an episode; the environment's own limit is usually lower."""
    turn_tokens: int | None = None
    """The maximum number of ids in a model's reply. None uses a quarter of the model's window (more if an episode has
    fewer than four turns: a half, or the whole window for a single one), and at most 8,192, as training does."""
    tokenizer: str = EMBEDDED
    """The model folder whose chat format records the replies of a policy without a model."""
    date: str | None = None
    """The date that a chat template uses as the present (`strftime_now`), such as 2026-03-01 or 2026-03-01T08:30:00.
    None is the start of the evaluation; if the template writes the date, config.yaml then holds that moment."""
    history: History = "append"
    """`append` keeps the conversation as it was sampled, old reasoning included: one row per episode. `rerender` shows
    it as the chat template rewrites it (most drop old reasoning), with a row for each rewrite."""
    compaction: CompactionConfig = field(default_factory=CompactionConfig)
    concurrency: int = 64
    """The number of concurrent episodes; does not affect the result."""
    env_processes: int = 0
    """The number of processes that run the environments, so that one which holds the interpreter, crashes or is killed
    for its memory ends only its process, not the command; 0 runs them in the command's. Does not affect the result."""
    stall_s: float | None = STALL_S
    """The seconds that an environment may hold Python's interpreter, which blocks all other episodes and Ctrl-C; then
    the command ends, with the environment's name and stack. None: no limit."""
    endpoint: ChatEndpointConfig = field(default_factory=ChatEndpointConfig)
    """The settings of the chat endpoint, if `policy` is one."""
    data: DataConfig = field(default_factory=DataConfig)
    """The rows of files that are the held-out tasks, in place of the environment's own."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The source of an episode's reward, in place of the environment."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)

    def __post_init__(self) -> None:
        refuse_credentials(self)
        env, env_kwargs = env_of_data(self.data, self.env, self.env_kwargs)
        object.__setattr__(self, "env", env)
        object.__setattr__(self, "env_kwargs", env_kwargs)
        object.__setattr__(self, "policy", self.policy or model_for(env))
        check_at_least(1, self, "num_tasks", "num_repeats", "max_turns", "turn_tokens", "concurrency", "context_window")
        _ = self.sampling  # checks it
        self.reward.check_repeats(self.num_repeats, "num_repeats")
        check_engine_name(self.engine)
        check_backend(self.model_backend, self.engine)
        if self.engine != "local" and (self.policy in POLICIES or is_url(self.policy)):
            raise ConfigError(f"engine {self.engine} samples from a model, and {self.policy} plays: leave engine out")
        SamplerConfig(env_processes=self.env_processes)
        if self.env_processes and self.policy in POLICIES:
            raise ConfigError(
                f"the policy {self.policy} looks into the environment, which env_processes has in another process:"
                " leave env_processes out, or evaluate a model"
            )
        check_above_zero(self, "stall_s")
        check_date(self.date)
        if self.compaction.at is not None and (self.policy in POLICIES or is_url(self.policy)):
            raise ConfigError(f"{self.policy} is asked for no summary: leave compaction.at out, or evaluate a model")
        if self.agent.name and (self.policy in POLICIES or is_url(self.policy)):
            raise ConfigError(f"the agent {self.agent.name} needs a model that replies: {self.policy} is none")
        self.agent.check_compaction(self.compaction.at)
        if self.history != "append" and is_url(self.policy):
            raise ConfigError("a chat endpoint renders the history itself, by its own template: leave history out")
        if (self.family is not None or self.chat_template or self.chat_template_kwargs) and is_url(self.policy):
            raise ConfigError(
                "a chat endpoint has its own chat format: leave family, chat_template and chat_template_kwargs out"
            )

    @property
    def sampling(self) -> SamplingConfig:
        """The distribution that replies are drawn from; raises ConfigError for one that does not exist."""
        names = [setting.name for setting in fields(SamplingConfig)]
        return SamplingConfig(**{name: getattr(self, name) for name in names})

    def to_json(self) -> dict[str, JSON]:
        """Returns what decides the result, for `config.yaml`: not `concurrency`, `env_processes`, `device`, a key."""
        plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "context_window": None, "engine": "local", "dtype": "auto"}
        plain |= {"model_backend": "auto", "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        names = "env env_kwargs policy num_tasks num_repeats seed temperature max_turns turn_tokens".split()
        settings: dict[str, JSON] = {"kind": "eval", "agentgym": agentgym.__version__}
        settings |= {name: getattr(self, name) for name in names}
        settings |= {name: value for name, off in plain.items() if (value := getattr(self, name)) != off}
        settings |= {"stop": [*self.stop]} if self.stop else {}
        for name, nothing in {"data": DataConfig(), "reward": RewardConfig(), "sandbox": SandboxConfig()}.items():
            settings |= {} if (part := getattr(self, name)) == nothing else {name: plain_settings(part)}
        settings |= {"agent": self.agent.to_json()} if self.agent.name else {}
        if is_url(self.policy):
            endpoint: dict[str, JSON] = {"model": self.endpoint.model, "text_marks": self.endpoint.text_marks}
            return {**settings, "policy": endpoint_url(self.policy), "endpoint": endpoint}
        settings["tokenizer"] = self.tokenizer if self.policy in POLICIES else self.policy
        settings |= {} if self.date is None else {"date": self.date}
        variables = dict(self.chat_template_kwargs)
        settings |= {"chat_template_kwargs": variables} if variables else {}
        settings |= {"chat_template": self.chat_template} if self.chat_template else {}
        return {**settings, "family": self.family, "history": self.history, "compaction": asdict(self.compaction)}


def plain_settings(config: DataConfig | RewardConfig | SandboxConfig) -> dict[str, JSON]:
    """Returns the settings in plain types, for YAML and JSON."""
    plain: dict[str, JSON] = json.loads(json.dumps(asdict(config), default=dict))
    return plain
