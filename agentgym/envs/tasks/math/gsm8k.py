"""GSM8K-v0: word problems of grade-school mathematics, with their official answers."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from agentgym.envs.base.card import EnvCard
from agentgym.envs.base.cheater import Trickster
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.envs.tasks.math.final_number import marked_number
from agentgym.errors import ConfigError
from agentgym.tools.calculator import calculator
from agentgym.tools.code import CodeTools
from agentgym.types import Message

__all__ = ["DATA_SHA256", "GSM8K", "Problem", "problems"]

Split = Literal["train", "test"]
DATA_SHA256 = "81045e26292f2fe1667c19db8d112bf1b589c668720d72b957e265119a6a25b7"
"""The hash of the problems that belong to v0: train, then test."""
TOOLS: dict[str, tuple[str, ...]] = {"none": (), "calculator": ("calculator",), "python": ("python",)}
SPLITS = ("auto", "train", "test")
LARGEST_SEED = 1 << 63
"""The limit of given seeds. Without one, Gymnasium draws a seed of 128 bits, which holds no problem out."""
TURNS_WITH_TOOL = 12
ANSWER_FORM = "'#### ' and the number alone"


class GSM8K(ToolEnv):
    """A word problem; the reply that ends in `#### ` and a number is the answer. Reward 1 for the right number.

    `split="auto"` plays the official test set at held-out seeds (in order: `agentgym eval -n 1319` is all of it, once)
    and 1,000 training problems at others; "train" and "test" play one of them alone. `tool` is "none" (one reply),
    "calculator", or "python" in a sandbox; replies with calls come before the answer. `reset(options={"index": 7})`
    plays a problem of the split by its place in the data set.
    """

    metadata = {**ToolEnv.metadata, "data_sha256": DATA_SHA256}
    card = EnvCard(
        task="Solve a word problem of grade-school mathematics; calculate with a tool where wanted.",
        tools=("calculator",),
        reward="1 when the number after the last '#### ' of the answer is the official one, else 0.",
        oracle="says the recorded official solution",
        cheat="gives neighbours, all numbers at once, the right number in the wrong place or form, and claims",
        baseline={"random": 0.0},
        data="GSM8K (Cobbe et al. 2021): all 1,319 test problems and the first 1,000 of training, in the package",
        licence="MIT (data), Apache-2.0 (environment)",
    )
    tools_optional = True
    own_split = True

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        split: Literal["auto", "train", "test"] = "auto",
        tool: Literal["none", "calculator", "python"] = "calculator",
    ) -> None:
        if split not in SPLITS:
            raise ConfigError(f"GSM8K has the splits {', '.join(SPLITS)}; got split {split!r}")
        if tool not in TOOLS:
            raise ConfigError(f"GSM8K is played with the tools {', '.join(TOOLS)}; got tool {tool!r}")
        self.runs_inline = tool != "python"
        super().__init__(
            render_mode,
            tools=(calculator,) if tool == "calculator" else (),
            tool_sources=(functools.partial(CodeTools, names=("python",)),) if tool == "python" else (),
        )
        self.card = replace(GSM8K.card, tools=TOOLS[tool])
        self.split, self.tool = split, tool
        self.max_turns = TURNS_WITH_TOOL if TOOLS[tool] else 1
        help_ = f"You may calculate with the tool {tool}. " if TOOLS[tool] else ""
        self.system_prompt = f"Solve the problem step by step. {help_}End the last reply with {ANSWER_FORM}."
        self._drawing: np.random.Generator | None = None

    def start(self, options: dict[str, Any]) -> str:
        """Chooses the problem."""
        split, index = self._choose_problem()
        index = options.get("index", index)
        among = problems(split)
        if type(index) is not int or not 0 <= index < len(among):
            raise ConfigError(f"options['index'] is from 0 to {len(among) - 1} in the split {split}, got {index!r}")
        self.problem = among[index]
        self.metrics["difficulty"] = float(self.problem.num_steps)
        return self.problem.question

    def on_message(self, text: str) -> str:
        """Judges an answer."""
        number = marked_number(text)
        if number is None and self.tool != "none":
            return f"There is no answer in that reply. End the last reply with {ANSWER_FORM}."
        right = number == self.problem.answer
        self.end(success=right, reward=float(right))
        if number is None:
            return f"That has no answer: a reply ends with {ANSWER_FORM}."
        return "That is right." if right else "That is wrong."

    def secrets(self) -> tuple[str, ...]:
        """The recorded solution, and the answer in its form; by itself if no count and no problem names it."""
        answer = str(self.problem.answer)
        is_rare = len(answer) > 3 and answer not in re.findall(r"\d+", self.problem.question.replace(",", ""))
        return (self.problem.solution, f"#### {answer}", *([answer] if is_rare else []))

    def make_oracle(self) -> Policy:
        """A policy that knows the recorded solution."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but the answer in its form."""
        return Trickster("calculator", _tricks)

    def _choose_problem(self) -> tuple[Split, int]:
        """The split and the index that the seed selects; a reset without a seed draws on."""
        fresh = self._drawing is not self.np_random
        self._drawing = self.np_random
        held_out = self.np_random_seed - EVAL_SEED_START if fresh and self.np_random_seed < LARGEST_SEED else -1
        split: Split = "test" if self.split == "test" or (self.split == "auto" and held_out >= 0) else "train"
        size = len(problems(split))
        return split, held_out % size if held_out >= 0 else int(self.np_random.integers(size))


@dataclass(frozen=True)
class Problem:
    """A problem with its recorded solution, whose last line is `#### 72`."""

    question: str
    solution: str
    answer: Fraction

    @property
    def num_steps(self) -> int:
        """The number of lines of the solution before the answer."""
        return self.solution.count("\n")


@functools.cache
def problems(split: Split) -> tuple[Problem, ...]:
    """The problems of a split, in the order of the data set."""
    return _data()[split]


@functools.cache
def _data() -> dict[str, tuple[Problem, ...]]:
    folder = files("agentgym.envs").joinpath("data", "gsm8k")
    texts = {split: gzip.decompress(folder.joinpath(f"{split}.jsonl.gz").read_bytes()) for split in ("train", "test")}
    if hashlib.sha256(b"".join(texts.values())).hexdigest() != DATA_SHA256:
        raise ConfigError("the problems of GSM8K-v0 were changed; others need a new version of the id")
    return {split: tuple(map(_problem, text.splitlines())) for split, text in texts.items()}


def _problem(line: bytes) -> Problem:
    row = json.loads(line)
    answer = marked_number(row["answer"])
    assert answer is not None  # the hash guarantees it
    return Problem(row["question"], row["answer"], answer)


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._game = game_of(env, GSM8K)

    def act(self, observation: str) -> Message:
        return Message("assistant", self._game.problem.solution)


def _tricks(env: TextEnv) -> list[Message]:
    problem = game_of(env, GSM8K).problem
    answer, wrong = problem.answer, problem.answer + 1
    texts = (
        f"#### {wrong}",
        f"#### {-answer or 1}",
        f"#### {answer}\n#### {wrong}",
        f"#### {wrong} {answer}",
        f"#### {wrong} = {answer}",
        f"#### {answer} + 0",
        f"#### {answer}7",
        f"#### {answer}e1" if answer else "#### 1e1",
        f"#### {answer}/3" if answer else "#### 1/3",
        f"The answer is {answer}.",
        f"#####{answer}",
        "#### " + " ".join(str(number) for number in range(-20, 2000) if number != answer),
        "#### " + "9" * 100_000,
        "#### nan",
        "#### ",
        problem.question,
    )
    return [Message("assistant", text) for text in texts]
