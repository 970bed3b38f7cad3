"""A demonstration holds the ids of the rollout that a model saying the same would have made, and masks its replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.policies import Policy, Script, ScriptedPolicy, policy_for
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.envs.catalog.resolve import make_env
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.replies import reply_ids
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.tools import tool
from agentgym.trainers.lessons.demonstrations import Demonstration, DemonstrationConfig, demonstrate, stream
from agentgym.trajectory import Trajectory
from agentgym.types import Message, Task

GAMES = ["TextGame-v0", "GuessNumber-v0", "WordLadder-v0", "Prompt-v0"]


@pytest.fixture(scope="module")
def renderer(tokenizer_folder: Path) -> Renderer:
    return renderer_for(tokenizer_folder)


class Parrot:
    """Says the observation back."""

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        """There is nothing to prepare."""

    def act(self, observation: str) -> Message:
        """The observation."""
        return Message("assistant", observation)


class Echo(TextEnv):
    """Ends after `num_turns` turns, with no metrics at all."""

    runs_inline = True
    system_prompt = "Repeat."

    def __init__(self, num_turns: int = 2) -> None:
        super().__init__()
        self.num_turns = num_turns

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[str, Info]:
        """A number."""
        return f"number {seed}", {}

    def step(self, action: str) -> StepResult:
        """Another number."""
        return f"turn {self.turns}", 0.0, self.turns == self.num_turns, False, {}

    def make_oracle(self) -> Parrot:
        """The right answer is the observation."""
        return Parrot()


class Breaks(Echo):
    """Raises on the first step."""

    def step(self, action: str) -> StepResult:
        """Fails."""
        raise ZeroDivisionError("the dice fell off the table")


def rolled_out(env: TextEnv, renderer: Renderer, seed: int, kind: str = "oracle") -> Trajectory:
    """The same policy through the rollout loop, its replies given by a scripted engine."""
    policy = policy_for(env, kind)

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        observation = env._last_observation
        if not env.turns:
            policy.reset(env, observation, seed)
        return reply_ids(renderer, policy.act(observation))

    loop = RolloutLoop(ScriptedEngine(reply), renderer, Limits(max_turns=200, turn_tokens=4096))
    return asyncio.run(loop.run(env, Episode(Task("demonstrated", seed), "g", 0, 0)))


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ids_and_mask_are_those_of_a_rollout_of_the_same_policy(name: str, seed: int, renderer: Renderer) -> None:
    demo = demonstrate(make_env(name), renderer, seed, DemonstrationConfig())
    trajectory = rolled_out(make_env(name), renderer, seed)
    (row,) = trajectory.rows
    assert demo.ids == tuple(row.ids)
    assert demo.mask == tuple(bool(flag) for flag in row.mask)
    assert demo.success is True and trajectory.success


def test_a_demonstration_worked_by_hand(renderer: Renderer) -> None:
    demo = demonstrate(Echo(), renderer, 4, DemonstrationConfig())
    texts, start = [], 0
    for place in range(1, len(demo.ids) + 1):
        if place == len(demo.ids) or demo.mask[place] != demo.mask[start]:
            texts.append((demo.mask[start], renderer.decode(demo.ids[start:place])))
            start = place
    assert texts == [
        (False, "<|im_start|>system\nRepeat.<|im_end|>\n<|im_start|>user\nnumber 4<|im_end|>\n<|im_start|>assistant\n"),
        (True, "number 4<|im_end|>"),
        (False, "\n<|im_start|>user\nturn 1<|im_end|>\n<|im_start|>assistant\n"),
        (True, "turn 1<|im_end|>"),
    ]
    assert demo.success is False, "an environment that tells no success has none"


def test_mistakes_are_played_and_seen_but_not_learned(renderer: Renderer) -> None:
    env, seeds = make_env("TextGame-v0"), range(8)
    careless = DemonstrationConfig(mistakes=0.5)
    learned = DemonstrationConfig(mistakes=0.5, learn_mistakes=True)
    without = [demonstrate(env, renderer, seed, careless) for seed in seeds]
    with_them = [demonstrate(env, renderer, seed, learned) for seed in seeds]
    assert [demo.ids for demo in without] == [demo.ids for demo in with_them], "the play is the same either way"
    assert [demo.ids for demo in without] != [demonstrate(env, renderer, s, DemonstrationConfig()).ids for s in seeds]
    num_learned, num_said = (sum(sum(demo.mask) for demo in some) for some in (without, with_them))
    assert 0.3 < num_learned / num_said < 0.7
    assert all(y or not x for a, b in zip(without, with_them, strict=True) for x, y in zip(a.mask, b.mask, strict=True))


def test_nothing_but_mistakes_is_the_random_policy(renderer: Renderer) -> None:
    config = DemonstrationConfig(mistakes=1.0, learn_mistakes=True)
    demo = demonstrate(make_env("GuessNumber-v0"), renderer, 3, config)
    again = demonstrate(make_env("GuessNumber-v0"), renderer, 3, DemonstrationConfig(mistakes=1.0, learn_mistakes=True))
    assert demo == again
    assert demo.ids != demonstrate(make_env("GuessNumber-v0"), renderer, 3, DemonstrationConfig()).ids


def test_a_stream_takes_environments_in_turn_and_seeds_upwards(renderer: Renderer) -> None:
    envs = [Echo(1), Echo(3)]
    demos = list(islice(stream(envs, renderer, 10, DemonstrationConfig()), 4))
    assert demos == [demonstrate(envs[seed % 2], renderer, seed, DemonstrationConfig()) for seed in (10, 11, 12, 13)]
    assert len({demo.ids for demo in demos}) == 4


def test_a_play_without_end_is_cut_after_its_last_whole_reply(renderer: Renderer) -> None:
    demo = demonstrate(Echo(10**9), renderer, 0, DemonstrationConfig(max_turns=3))
    assert demo.ids[-1] in renderer.stop_ids and demo.mask[-1]
    assert sum(index in renderer.stop_ids for index, own in zip(demo.ids, demo.mask, strict=True) if own) == 3


def test_the_first_ids_of_a_demonstration_keep_their_mask() -> None:
    demo = Demonstration((1, 5, 2, 9), (False, True, True, False), success=True)
    assert demo.first(3) == Demonstration((1, 5, 2), (False, True, True), success=True)
    assert demo.first(9) == demo


def test_an_environment_that_raises_is_named_with_its_seed(renderer: Renderer) -> None:
    with pytest.raises(EnvironmentFault, match="Breaks failed with seed 5: ZeroDivisionError: the dice") as caught:
        demonstrate(Breaks(), renderer, 5, DemonstrationConfig())
    assert caught.value.seed == 5
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "settings", [{"mistakes": -0.1}, {"mistakes": 1.5}, {"mistakes": 1.0}, {"max_turns": 0}], ids=str
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        DemonstrationConfig(**settings)  # type: ignore[arg-type]


def test_a_scripted_oracle_wins_with_mistakes_in_between(renderer: Renderer) -> None:
    class Last(ToolEnv):
        max_turns = 40
        runs_inline = True

        def start(self, options: dict[str, object]) -> str:
            self.number = int(self.np_random.integers(100, 1000))
            return f"The number is {self.number}."

        @tool
        def ask(self) -> str:
            """Tells a number."""
            return f"The code is {self.number + 1}."

        @tool
        def answer(self, code: int) -> str:
            """Ends the episode with the right code."""
            if code == self.number + 1:
                self.end(success=True, reward=1.0)
            return "Right." if code == self.number + 1 else "Wrong."

        def make_oracle(self) -> Policy:
            return ScriptedPolicy(self.solve)

        def solve(self, observation: str) -> Script:
            text = yield "ask", {}
            yield "answer", {"code": int(text.split()[-1].strip("."))}

    config = DemonstrationConfig(mistakes=0.5)
    demos = [demonstrate(Last(), renderer, seed, config) for seed in range(30)]
    assert any(len(demo.ids) > len(shorter.ids) for demo in demos for shorter in demos)  # there were mistakes
    assert sum(demo.success is True for demo in demos) == 30
