"""Rewards from a learned model: a sequence classifier on the whole conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from agentgym.rewards.reply import conversation
from agentgym.rewards.reward import RewardFailure
from agentgym.rollout.hosting.env_code import attempt
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least
from agentgym.tools.calling.worker import Worker
from agentgym.trajectory import Trajectory

if TYPE_CHECKING:
    from agentgym.rewards.reward_model import RewardModel

__all__ = ["LearnedReward", "RewardModelConfig"]


@config_class
class RewardModelConfig:
    """The classifier that scores, and its device."""

    folder: str = ""
    """A model folder of `transformers`, its tokenizer with a chat template inside; empty for no model."""
    device: str = "cpu"
    """The device that it runs on: `cpu`, `cuda`, `cuda:1`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of its weights."""
    max_tokens: int = 4096
    """The tokens of the longest conversation; a longer one is not truncated, its episode fails."""
    label: int | None = None
    """The index of the model's output that is the reward; None is for a model with one output."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "max_tokens")
        check_at_least(0, self, "label")


class LearnedReward:
    """Scores conversations one at a time: in a batch, the other conversations would change a score's bits."""

    together = False
    takes_environment = False
    num_at_once = 1

    def __init__(self, config: RewardModelConfig, timeout_s: float) -> None:
        self.config = config
        self.timeout_s = timeout_s
        self._worker = Worker("agentgym-reward-model")
        self._model: RewardModel | None = None

    async def open(self) -> None:
        """Loads the model; raises RunFolderError or ConfigError if it is not a reward model."""
        self._model = await self._worker.run(self._load)

    def _load(self) -> RewardModel:
        from agentgym.rewards.reward_model import RewardModel  # imported here, since only a model needs torch

        config = self.config
        return RewardModel(
            config.folder, device=config.device, dtype=config.dtype, max_tokens=config.max_tokens, label=config.label
        )

    async def score(self, trajectories: Sequence[Trajectory], env: HostedEnv | None = None) -> Sequence[object]:
        model, messages = self._model, conversation(trajectories[0])
        assert model is not None
        while messages and messages[-1].role != "assistant":
            messages = messages[:-1]  # it was trained on conversations that end with a reply
        try:
            async with asyncio.timeout(self.timeout_s):
                error, value = await self._worker.run(lambda: attempt(lambda: model.score(messages)))
        except TimeoutError:
            raise RewardFailure(f"the reward model took over {self.timeout_s:g} s (reward.timeout_s)") from None
        if error is not None:
            raise RewardFailure.of(error)
        return [value]

    async def close(self) -> None:
        self._worker.stop()
        self._model = None
