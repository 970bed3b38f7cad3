"""Checks an environment by the claims of its card, by playing it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentgym.envs.base.card import version_of
from agentgym.envs.base.policies import POLICIES, Policy, RandomPolicy, policy_for
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.envs.base.text_env import StepResult, TextEnv
from agentgym.envs.base.tool_env import UNPAID
from agentgym.testing.contracts.env_canaries import CANARIES
from agentgym.testing.contracts.env_subject import Check, Complaint, EnvUnderTest, EpisodeResult, play_episode, texts

__all__ = ["CLAIMS"]

NO_CARD = "it has no card (agentgym.envs.EnvCard)"
SEEDS = (*range(8), *range(EVAL_SEED_START, EVAL_SEED_START + 4))
"""The tasks that the oracle, the cheat and the canaries play, in every difficulty."""
BASELINE_SEEDS = range(EVAL_SEED_START, EVAL_SEED_START + 60)
REPEATS = 3
"""The number of times that the one task of an environment is played."""
MAX_ERRORS = 4.0
"""The number of standard errors by which a mean may differ from its claim."""
ROUNDING = 1e-6


def _complete(make: EnvUnderTest) -> Iterator[Complaint]:
    card = make.card()
    if card is None:
        yield "not claimed", NO_CARD
        return
    env = make()
    env.reset(seed=0)
    names = tuple(spec.name for spec in env.tool_specs)
    env.close()
    if set(names) != set(card.tools):
        yield (
            "error",
            f"the card names the tools {', '.join(card.tools) or 'none'}; there are {', '.join(names) or 'none'}",
        )
    version = version_of(make.env_id)
    if version is not None and version != card.version:
        yield "error", f"the card is of version {card.version}, the id {make.env_id} of version {version}"
    for policy, method in (("oracle", "make_oracle"), ("cheat", "make_cheat")):
        claim, there = getattr(card, policy), hasattr(env, method)
        if claim and not there:
            yield "error", f"the card claims {_an(policy)}, and there is no method {method}"
        if there and not claim:
            yield "error", f"there is {_an(policy)} ({method}), and the card does not say how it plays"
    missing = [name for name in ("oracle", "cheat", "licence", "baseline") if not getattr(card, name)]
    if missing:
        yield "not claimed", f"the card leaves out: {', '.join(missing)}"
    for subject in make.difficulties(card):
        subject_env = subject()
        subject_env.reset(seed=0)
        subject_env.close()


def _oracle(make: EnvUnderTest) -> Iterator[Complaint]:
    subjects = _claiming(make, "make_oracle", "oracle")
    if not subjects:
        yield "not claimed", "it has no oracle (a method make_oracle)"
    for subject in subjects:
        for seed, episode in _episodes(subject, "oracle", SEEDS):
            complaint = next((text for error in episode.raised if (text := error.complaint({}))), "")
            if complaint:
                yield "error", f"a call of the oracle: {complaint}"
                return
            if min(episode.score, episode.reward) < 1.0 - ROUNDING:
                yield "error", f"the oracle does not score 1: {_describe_episode(subject, seed, episode)}"
                return


def _cheat(make: EnvUnderTest) -> Iterator[Complaint]:
    subjects = _claiming(make, "make_cheat", "cheat")
    if not subjects:
        yield "not claimed", "it has no cheat (a method make_cheat)"
    for subject in subjects:
        for seed, episode in _episodes(subject, "cheat", SEEDS):
            if max(episode.score, episode.reward) > ROUNDING:
                yield "error", f"the cheat scores above 0: {_describe_episode(subject, seed, episode)}"
                return


def _claiming(make: EnvUnderTest, method: str, field: str = "") -> list[EnvUnderTest]:
    """Returns the environment in every difficulty, if it has a method, or a card that fills a field; [] if not."""
    card = make.card()
    env = make()
    env.close()
    if not callable(getattr(env, method, None)) and not getattr(card, field, ""):
        return []
    return [make] if card is None else list(make.difficulties(card))


def _canaries(make: EnvUnderTest) -> Iterator[Complaint]:
    card = make.card()
    if card is None:
        yield "not claimed", NO_CARD
        return
    for name in CANARIES:
        for subject in make.difficulties(card):
            played = [episode for _, episode in _episodes(subject, name, SEEDS)]
            score = _mean([episode.score for episode in played])
            paid = _mean([episode.reward for episode in played])
            lucky = MAX_ERRORS * card.luck / math.sqrt(len(played))
            if score > card.canary_floor + ROUNDING or paid > card.canary_floor + lucky + ROUNDING:
                yield (
                    "error",
                    f"the canary {name!r} scores {score:.3f} and earns {paid:.3f} on average{_where(subject)}, "
                    f"its floor is {card.canary_floor:g}",
                )
                break


def _baseline(make: EnvUnderTest) -> Iterator[Complaint]:
    card = make.card()
    if card is None or not card.baseline:
        yield "not claimed", NO_CARD if card is None else "the card names no baseline"
        return
    if make.kwargs:
        yield "not claimed", f"a baseline is of the default keywords, and this is {make}"
        return
    for kind, claimed in card.baseline.items():
        if kind not in POLICIES:
            yield "not claimed", f"the baseline {kind!r} needs a model"
            continue
        scores = [episode.score for _, episode in _episodes(make, kind, BASELINE_SEEDS)]
        mean, n = _mean(scores), len(scores)
        spread = max(claimed * (1 - claimed), 1 / n)
        if abs(mean - claimed) > MAX_ERRORS * math.sqrt(spread / n):
            yield "error", f"the card says that {kind} scores {claimed:g}; over {n} tasks it scores {mean:.3f}"


def _reward_range(make: EnvUnderTest) -> Iterator[Complaint]:
    card = make.card()
    low, high = (-math.inf, math.inf) if card is None else card.reward_range
    for name in _players(make):
        for seed, episode in _episodes(make, name, SEEDS[:4] if card is None else SEEDS):
            if not math.isfinite(episode.reward):
                yield "error", f"a reward is not a finite number: {name}, seed {seed}"
                return
            if not low - ROUNDING <= episode.reward <= high + ROUNDING:
                yield "error", f"{name} earns {episode.reward:g} at seed {seed}, out of the card's {low:g} to {high:g}"
                return
    if card is None:
        yield "not claimed", NO_CARD


def _leaks(make: EnvUnderTest) -> Iterator[Complaint]:
    env = make()
    env.close()
    find_leaks = getattr(env, "leaks", None)
    for leak in find_leaks() if callable(find_leaks) else ():
        yield "error", f"the task gives its answer away: {leak}"
    subjects = _claiming(make, "secrets")
    if not subjects and not callable(find_leaks):
        yield "not claimed", "it has no method secrets(), whose texts nothing may show before the episode ends"
    for subject in subjects:
        for name in _players(subject):
            env = subject()
            watch = _SecretWatch(env)
            for seed in SEEDS[:4]:
                play_episode(env, _policy(name, env), seed, watch)
                if watch.found:
                    yield "error", f"{watch.found} ({name}, seed {seed}{_where(subject)})"
                    env.close()
                    return
            env.close()


class _SecretWatch:
    """Looks for the secrets of an environment in all that a step gives, except for what the player wrote before."""

    def __init__(self, env: TextEnv) -> None:
        self._env: Any = env.unwrapped
        self._replies = ""
        self.found = ""

    def __call__(self, reply: str, result: StepResult) -> None:
        observation, _, terminated, truncated, info = result
        self._replies = f"{self._replies}\n{reply}" if reply else ""
        if terminated or truncated or self.found:
            return
        prompt = self._env.system_prompt
        for part, text in (("system prompt", prompt), ("observation", observation), *_infos(info)):
            for secret in self._env.secrets():
                if _holds(text, secret) and not _holds(self._replies, secret):
                    self.found = f"the secret {secret[:40]!r} is in the {part} before the episode ends"
                    return


def _infos(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in info.items():
        for text in texts(value):
            yield f"info[{key!r}]", text


def _holds(text: str, secret: str) -> bool:
    return bool(secret) and re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text, re.IGNORECASE) is not None


def _spaces(make: EnvUnderTest) -> Iterator[Complaint]:
    complaints: list[str] = []
    env = make()

    def watch(reply: str, result: StepResult) -> None:
        if not env.observation_space.contains(result[0]):
            complaints.append(f"the observation {result[0][:60]!r} is not in the observation_space")
        if reply and not env.action_space.contains(reply):
            complaints.append(f"the reply {reply[:60]!r} is not in the action_space")

    for policy in (RandomPolicy(), CANARIES["random text"]()):
        play_episode(env, policy, 0, watch)
    env.close()
    if complaints:
        yield "error", complaints[0]


def _players(make: EnvUnderTest) -> list[str]:
    """Returns all players: the canaries, random, and the oracle and the cheat if the environment has them."""
    return [*CANARIES, "random", *(kind for kind in ("oracle", "cheat") if _claiming(make, f"make_{kind}", kind))]


def _policy(player: str, env: TextEnv) -> Policy:
    return CANARIES[player]() if player in CANARIES else policy_for(env, player)


def _episodes(make: EnvUnderTest, player: str, seeds: Sequence[int]) -> Iterator[tuple[int, EpisodeResult]]:
    """Yields the episodes of a player by their seeds; one that another check has played is not played again."""
    env = make()
    try:
        for seed in seeds[:REPEATS] if env.num_tasks == 1 else seeds:
            key = (str(make), player, seed)
            if key not in make.played:
                make.played[key] = play_episode(env, _policy(player, env), seed)
            yield seed, make.played[key]
    finally:
        env.close()


def _describe_episode(make: EnvUnderTest, seed: int, episode: EpisodeResult) -> str:
    verdict = "no verdict" if episode.success is None else f"success {episode.success:g}"
    text = f"reward {episode.reward:g}, {verdict} at seed {seed}{_where(make)}; {episode.last_turn}"
    return f"{text}. {UNPAID}" if episode.success and episode.reward <= 0.0 else text


def _where(make: EnvUnderTest) -> str:
    return f" with {make}" if make.kwargs else ""


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _an(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


CLAIMS: dict[str, Check] = {
    "spaces": _spaces,
    "card": _complete,
    "oracle": _oracle,
    "cheat": _cheat,
    "canaries": _canaries,
    "baseline": _baseline,
    "reward range": _reward_range,
    "answer leak": _leaks,
}
