"""`gem/ID`: an environment of GEM, such as `gem/game:GuessTheNumber-v0-easy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentgym.envs.adapters.namespaces import needs, unknown_name
from agentgym.envs.adapters.own_randomness import OwnRandomness
from agentgym.envs.adapters.reasoning_gym import evaluates, judge_answer, scored_beside
from agentgym.envs.base.card import EnvCard
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.errors import ConfigError, EnvironmentFault

__all__ = ["Gem", "names"]

LARGEST_SEED = 2**31
QUESTIONS = "rg:"
"""The prefix of the ids of reasoning-gym's questions in GEM."""
DEFAULT_TURNS = 100
"""The turns after which an environment without an end of its own is truncated."""


class Gem(TextEnv):
    """An environment of GEM; observations, rewards and ends are its own. Further keywords are the environment's."""

    max_turns = DEFAULT_TURNS
    own_split = True  # a seed gives the same task as in the library itself

    def __init__(self, render_mode: str | None = None, *, gem_id: str, **settings: Any) -> None:
        super().__init__(render_mode)
        if gem_id not in names():
            raise unknown_name("gem", gem_id, names())
        self.gem_id = gem_id
        self._randomness = OwnRandomness()
        self._env = self._make_env(settings)
        self.card = EnvCard(
            task=f"Play GEM's {gem_id}.",
            reward="What the environment pays, step by step; some take a little off for a reply of the wrong form.",
            reward_range=(-1.0, 1.0),
            data=f"GEM's {gem_id} under the reset seed",
            licence="Apache-2.0",
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Begins an episode."""
        drawn = int(self.np_random.integers(LARGEST_SEED)) if seed is None else seed
        with self._randomness.start_stream(drawn):
            observation, info = self._env.reset(seed=drawn % LARGEST_SEED)
        return _with_suffix(observation, info), {}

    def step(self, action: str) -> StepResult:
        """Plays a reply."""
        with self._randomness.again():
            observation, paid, terminated, truncated, info = self._env.step(str(action))
        if info.get("reward_error"):  # GEM's terminal environments pay 0 if their tests did not run
            raise EnvironmentFault(f"GEM's {self.gem_id} gave no reward: {info['reward_error']}")
        reward = float(paid)
        if not (terminated or truncated):
            return _with_suffix(observation, info), reward, False, False, {}
        # GEM sets both after the last turn: that is a rule of the game, which ends it
        metrics = {"success": float(bool(terminated) and reward >= 1.0)}
        return str(observation), reward, bool(terminated), not terminated, {"metrics": metrics}

    def _make_env(self, settings: dict[str, Any]) -> Any:
        import gem

        try:
            with self._randomness.start_stream(0):
                env = gem.make(self.gem_id, **settings)
        except Exception as error:  # the boundary: some environments download data, or need a search server
            first_line = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"GEM's {self.gem_id} cannot be made here: {type(error).__name__}: {first_line}"
            ) from error
        if self.gem_id.startswith(QUESTIONS):
            _score_beside(env)
        return env


def _score_beside(env: Any) -> None:
    """Scores a question of reasoning-gym, if its scorer evaluates the answer, in a process that runs no answer."""
    while hasattr(env, "env"):
        env = env.env
    dataset, seed = env.name, env.seed

    def score(answer: str | None, entry: Mapping[str, Any]) -> float:
        return judge_answer(dataset, entry, answer, lambda text: scored_beside(dataset, seed, {}, entry, text))[0]

    if evaluates(dataset):
        env.reward_fn = score


def names() -> list[str]:
    """The ids that are registered with GEM."""
    try:
        from gem.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise needs("gem", "gem", error) from error
    return sorted(ENV_REGISTRY)


def _with_suffix(observation: object, info: dict[str, Any]) -> str:
    suffix = info.get("suffix")
    return f"{observation}\n{suffix}" if suffix else str(observation)
