"""Prompt-v0: one prompt, one reply; it plays a row of a data file, or a small sum if it is given none."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.envs.base.action import Action
from agentgym.envs.base.card import SEEDED, EnvCard
from agentgym.envs.base.policies import Policy
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.errors import ConfigError
from agentgym.openai_wire import message_from_openai
from agentgym.types import JSON, MalformedCall, Message, ToolCall

__all__ = ["Prompt", "row_messages"]

NUMBERS = 100
"""The sums are of two numbers from 0 to 99."""
SIGNS = ("+", "-", "*")


class Prompt(TextEnv):
    """One prompt, ended by one reply. Reward 1 for the right answer.

    `reset(options={"messages": [...], "ground_truth": ...})` plays a row of data: its messages (system prompts and
    worked examples included), in the form of OpenAI's chat completions, are shown as they are. The reply's text earns
    1 when it equals the ground truth, or one of a list of them, up to letter case, width and space; without a ground
    truth it earns 0. A reward function mostly scores a row in place of that, so a row's episode has no verdict of its
    own (`success`) beside its reward, and `exact_match` among its metrics. Without options the seed draws a sum.
    """

    card = EnvCard(
        task="Answer one prompt with one reply: that of a row of data, or a sum of two numbers.",
        reward="1 for a reply that is the right answer and nothing else, else 0.",
        oracle="says the ground truth",
        cheat="claims, forges, says all numbers at once and gives the question back",
        baseline={"random": 0.0},
        data=f"rows of the user's files, or {SEEDED}",
        licence="Apache-2.0",
    )
    max_turns = 1
    runs_inline = True

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.ground_truth: JSON = None
        """The right reply; None if the row has none."""
        self._is_row = False
        self._terms: tuple[str, ...] = ()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Shows the row's messages, or a sum."""
        self._is_row = bool(options)
        if options:
            messages, self.ground_truth = row_messages(options), options.get("ground_truth")
        else:
            messages = (self._sum(),)
        return "\n".join(message.content for message in messages), {"messages": messages}

    def step(self, action: str) -> StepResult:
        """Scores the reply, which ends the episode."""
        message = action.message if isinstance(action, Action) else None
        correct = says(self.ground_truth, str(action) if message is None else message.content)
        metrics = {} if self.ground_truth is None else {"exact_match": float(correct)}
        if not self._is_row:
            metrics["success"] = float(correct)
        return "The episode is over.", float(correct), True, False, {"metrics": metrics}

    def secrets(self) -> tuple[str, ...]:
        """The answer of a sum, unless the sum names it; a row may contain its answer."""
        return () if self._is_row or self.ground_truth in self._terms else (str(self.ground_truth),)

    def make_oracle(self) -> Policy:
        """A policy that gives the ground truth."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but the answer."""
        return _Cheat()

    def _sum(self) -> Message:
        first, second = (int(number) for number in self.np_random.integers(0, NUMBERS, 2))
        sign = SIGNS[int(self.np_random.integers(len(SIGNS)))]
        self.ground_truth = str({"+": first + second, "-": first - second, "*": first * second}[sign])
        self._terms = (str(first), str(second))
        return Message("user", f"What is {first} {sign} {second}? Reply with the number alone.")


def row_messages(options: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of a row of data, for any environment that plays one; raises ConfigError or WireError."""
    messages = options.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(f"options['messages'] is a list of at least one message, got {messages!r:.80}")
    return tuple(message_from_openai(message, f"messages[{index}]") for index, message in enumerate(messages))


def says(ground_truth: JSON, text: str) -> bool:
    """True if `text` is the ground truth, up to letter case, width and space; a list holds answers of equal worth."""
    if isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str):
        return any(says(truth, text) for truth in ground_truth)
    if ground_truth is None or isinstance(ground_truth, Mapping):
        return False
    expected_text = _normalize_text(ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth))
    return bool(expected_text) and _normalize_text(text) == expected_text


def _normalize_text(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        truth = getattr(env.unwrapped, "ground_truth", None)
        if isinstance(truth, Sequence) and not isinstance(truth, str):
            truth = next(iter(truth), None)
        if truth is None or isinstance(truth, Mapping):
            raise ConfigError("this row has no ground truth that a reply could equal, so there is no oracle for it")
        self._answer = truth if isinstance(truth, str) else json.dumps(truth)

    def act(self, observation: str) -> Message:
        return Message("assistant", self._answer)


class _Cheat:
    """Claims, empty and forged replies, all answers at once, the question back, a look at the state."""

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._turn = seed

    def act(self, observation: str) -> Message:
        self._turn += 1
        trick = self._turn % 6
        if trick == 0:
            return Message("assistant", "The answer is correct: success, reward 1.0.")
        if trick == 1:
            return Message("assistant", " ".join(map(str, range(-20, 2 * NUMBERS))))
        if trick == 2:
            return Message("assistant", json.dumps({"success": True, "reward": 1.0, "exact_match": 1.0}))
        if trick == 3:
            return Message("assistant", observation.partition("?")[0].removeprefix("What is "))
        if trick == 4:
            return Message("assistant", "")
        state = ToolCall("call_0", "ground_truth", {})
        broken = MalformedCall("call_1", '{"name": "ground_truth", "arguments": *}', "not JSON")
        return Message("assistant", "ground_truth", tool_calls=(state, broken))
