"""A trial of a lesson's player before anything is learned: its success, and what the model cannot say or see."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.envs.catalog.resolve import make_env, turn_limit
from agentgym.errors import AgentGymError, ConfigError, EnvironmentFault
from agentgym.tools.calling.worker import Worker
from agentgym.trainers.lessons.config import SftConfig
from agentgym.trainers.lessons.demonstrations import Demonstration, DemonstrationConfig, ReplyEncoder, demonstrate
from agentgym.trainers.lessons.tokenizer_fit import describe_characters, describe_words
from agentgym.types import JSON, Message

__all__ = ["try_player"]

MIN_TRIED, MAX_TRIED = 8, 32
"""The fewest and the most demonstrations that a trial plays without mistakes, and again with them."""
TRIAL_S = 10.0
"""The seconds of a trial after which it plays no more demonstrations than `MIN_TRIED`."""


@dataclass(eq=False, kw_only=True)
class PlayerTrial:
    """The first demonstrations of a lesson, which a thread of their own plays, since a player may hang."""

    config: SftConfig
    renderer: TemplateRenderer
    first_seed: int
    num_replies: int = 0
    """The replies so far, of which a player that hangs gives no more."""

    def play(self) -> tuple[list[Demonstration], list[Demonstration]]:
        """Returns the demonstrations without mistakes, and as they are learned.

        Raises EnvironmentFault if the environment or a policy raises, ConfigError as `demonstrate` does.
        """
        settings = self.config.demonstrations
        alone = self._demonstrate(replace(settings, mistakes=0.0))
        if not settings.mistakes:
            return alone, alone
        try:
            return alone, self._demonstrate(settings)
        except AgentGymError as error:
            raise EnvironmentFault(f"{error} (only after a mistake; --mistakes 0 plays none)") from error

    def _demonstrate(self, settings: DemonstrationConfig) -> list[Demonstration]:
        encoder, started = ReplyEncoder(self.renderer), time.monotonic()

        def encode(message: Message) -> tuple[int, ...]:
            self.num_replies += 1
            return encoder(message)

        env = make_env(self.config.env, cast(Mapping[str, JSON], self.config.env_kwargs))
        rows: list[Demonstration] = []
        try:
            while len(rows) < MAX_TRIED and (len(rows) < MIN_TRIED or time.monotonic() - started < TRIAL_S):
                rows.append(demonstrate(env, self.renderer, self.first_seed + len(rows), settings, encode))
        finally:
            env.close()
        return rows


def try_player(config: SftConfig, renderer: TemplateRenderer, window: int, first_seed: int) -> tuple[str, ...]:
    """Plays a few of the demonstrations of a lesson; returns lines on the player's success and on what does not fit.

    Raises ConfigError for an oracle that never succeeds or hangs, and for a prompt that fills the model's window;
    otherwise as `PlayerTrial.play` does.
    """
    alone, learned = _play(PlayerTrial(config=config, renderer=renderer, first_seed=first_seed))
    name = f"the {config.policy} policy of {config.env}"
    if config.policy == "oracle" and not any(row.success for row in alone):
        raise ConfigError(
            f"{name} succeeds in none of {len(alone)} tasks, so there is nothing to imitate; watch it with `agentgym"
            f" eval --env {config.env} --policy oracle`: an episode succeeds by self.end(success=True, reward=1.0), or"
            ' by info["metrics"]["success"] of its last step'
        )
    if not any(any(row.mask[: window + 1]) for row in learned):
        raise ConfigError(f"the first prompt of {config.env} fills the model's window of {window} tokens: shorten it")
    lines = [f"{config.policy}: success {_share(alone)}"]
    if config.mistakes:
        effect = "learned too" if config.learn_mistakes else "not learned"
        lines.append(
            f"with mistakes: success {_share(learned)}; at {config.mistakes:g} of the turns a random player moves"
            f" (--mistakes), so that the model sees how play goes on from there; these moves are {effect}"
        )
    messages = [message for row in alone for message in row.messages]
    replies = [message for message in messages if message.role == "assistant"]
    answers = [message for message in messages if message.role != "assistant"]
    tokenizer = renderer.tokenizer
    lines += [*describe_words(tokenizer, replies), *describe_characters(tokenizer, replies, answers)]
    return *lines, *_lengths(config, learned, window)


def _play(trial: PlayerTrial) -> tuple[list[Demonstration], list[Demonstration]]:
    """Plays the trial; raises ConfigError if one reply and what follows it take longer than an environment may."""
    worker, limit_s = Worker("agentgym-trial"), trial.config.limits.env_step_s
    playing = worker.submit(trial.play)
    try:
        while True:
            num_before = trial.num_replies
            try:
                return playing.result(limit_s)
            except TimeoutError:
                if playing.done() or trial.num_replies == num_before:
                    raise ConfigError(
                        f"{trial.config.env} or its {trial.config.policy} policy hangs: no reply within {limit_s:g} s"
                        " (limits.env_step_s)"
                    ) from None
    finally:
        worker.stop()


def _share(rows: Sequence[Demonstration]) -> str:
    number = sum(row.success is True for row in rows)
    return f"{number / len(rows):.3f} ({number} of {len(rows)} tasks)"


def _lengths(config: SftConfig, rows: Sequence[Demonstration], window: int) -> list[str]:
    """Returns lines on demonstrations beyond the window, and on replies beyond the limit that one has in play."""
    lines = []
    sizes = [len(row.ids) for row in rows]
    if too_long := sum(size > window + 1 for size in sizes):
        lines.append(
            f"beyond the window: {too_long} of {len(rows)} demonstrations have more than the model's {window:,} tokens"
            f" (the longest {max(sizes):,}); the rest of them is not learned, and play ends there"
        )
    limit = config.limits.turn_tokens_in(window, turn_limit(config.env, cast(Mapping[str, JSON], config.env_kwargs)))
    flags = (group for row in rows for group in itertools.groupby(row.mask))
    longest = max(sum(members) for _, members in flags)
    if longest > limit:
        lines.append(f"cut replies: the longest has {longest} tokens, and in play {limit} (--limits.turn-tokens)")
    return lines
