"""The settings of a judge: its question, what one verdict scores, and the format of its scores."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from agentgym.engines.openai.config import ModelRequestConfig, endpoint_url
from agentgym.errors import ConfigError
from agentgym.rewards.judge.templates import GROUP, REPLY, RUBRIC, TURNS, check_template
from agentgym.rewards.judge.verdicts import SCORE
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_pair

__all__ = ["Criterion", "JudgeConfig"]


@dataclass(frozen=True, slots=True)
class Criterion:
    """A criterion of a rubric."""

    name: str
    text: str
    weight: float = 1.0


@config_class
class JudgeConfig:
    """The judge model, its question, and the format of its score."""

    url: str = ""
    """The endpoint's address, `http://HOST:PORT/v1`; empty for no judge."""
    endpoint: ModelRequestConfig = field(default_factory=ModelRequestConfig)
    """Model, key, time-outs, retries, rate limits."""
    unit: Literal["episode", "turn", "group"] = "episode"
    """The subject of one verdict: an `episode`, each `turn` of one, or the members of a `group`, which are ranked."""
    rubric: str | Mapping[str, object] = ""
    """Criteria by name, each a text, or `text` and `weight`: a mapping, or the path of a YAML or JSON file with one.
    The verdict has a score for each, and their weighted mean is the reward."""
    template: str = ""
    """The question, or the path of a `.txt` or `.md` file with it; `{question}`, `{reply}`, `{ground_truth}`,
    `{conversation}`, `{turns}`, `{replies}`, `{rubric}`, `{lowest}` and `{highest}` are replaced. Empty for a question
    that fits the unit and the rubric."""
    score: str = SCORE
    """The regular expression that the whole last line of the verdict must match; its first group is the score. A
    rubric, turns and groups have formats of their own."""
    scale: tuple[float, float] = (0.0, 10.0)
    """The scores that become the rewards 0 and 1; a score outside of both is not a verdict."""
    max_tokens: int = 1024
    """The most tokens of a verdict; a truncated one is not a verdict."""
    temperature: float = 0.0
    """The judge's sampling temperature."""

    def __post_init__(self) -> None:
        check_pair("judge.scale", self.scale)
        if not self.scale[0] < self.scale[1]:
            raise ConfigError(f"a judge's lowest score is below its highest, got {self.scale[0]} and {self.scale[1]}")
        try:
            groups = re.compile(self.score).groups
        except re.error as error:
            raise ConfigError(f"the judge's score is a regular expression, got {self.score!r}: {error}") from None
        if groups < 1:
            raise ConfigError(
                f"the judge's score has a group around the number, such as Score: (\\d+); got {self.score!r}"
            )
        if self.rubric and self.unit != "episode":
            raise ConfigError(f"a rubric scores an episode: leave judge.rubric or judge.unit={self.unit} out")
        if (self.rubric or self.unit != "episode") and self.score != SCORE:
            raise ConfigError("judge.score is the format of a single score: leave it out with a rubric or another unit")
        if self.url:
            endpoint_url(self.url)

    def question(self) -> str:
        """Returns the template's text; raises ConfigError for an unknown placeholder or a missing file."""
        by_unit = {"episode": RUBRIC if self.rubric else REPLY, "turn": TURNS, "group": GROUP}
        text = self.template or by_unit[self.unit]
        if "\n" not in text and text.endswith((".txt", ".md")):
            text = _read_file(text, "template")
        check_template(text, {"turn": ("turns",), "group": ("replies",)}.get(self.unit, ("reply", "conversation")))
        if self.rubric and "{rubric}" not in text:
            raise ConfigError("the judge's template does not show the {rubric}")
        return text

    def criteria(self) -> tuple[Criterion, ...]:
        """Returns the rubric's criteria; raises ConfigError for a file or an entry that is none."""
        if not self.rubric:
            return ()
        rubric: object = self.rubric
        if isinstance(rubric, str):
            try:
                rubric = yaml.safe_load(_read_file(rubric, "rubric"))
            except yaml.YAMLError as error:
                raise ConfigError(
                    f"the judge's rubric {self.rubric!r} is not YAML: {' '.join(str(error).split())}"
                ) from None
        if not isinstance(rubric, Mapping) or not rubric:
            raise ConfigError(f"a judge's rubric is a mapping of criteria by name, got {rubric!r:.80}")
        criteria = tuple(_criterion(str(name), entry) for name, entry in rubric.items())
        if len({criterion.name.casefold() for criterion in criteria}) < len(criteria):
            raise ConfigError("two criteria of the judge's rubric have the same name")
        return criteria


def _criterion(name: str, entry: object) -> Criterion:
    parts = {"text": entry} if isinstance(entry, str) else entry
    if not isinstance(parts, Mapping) or not {*parts} <= {"text", "weight"} or not isinstance(parts.get("text"), str):
        raise ConfigError(f"a criterion is a text, or {{text: ..., weight: 1.0}}; {name!r} is {entry!r:.80}")
    weight = parts.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise ConfigError(f"the weight of criterion {name!r} is a number above 0, got {weight!r}")
    if not re.fullmatch(r"\w[^:*\n]*", name) or name != name.strip():
        raise ConfigError(f"a criterion's name begins with a letter and has no colon, got {name!r}")
    return Criterion(name, parts["text"].strip(), float(weight))


def _read_file(path: str, noun: str) -> str:
    if not Path(path).is_file():
        raise ConfigError(f"no file {path!r} for the judge's {noun}")
    return Path(path).read_text(encoding="utf-8-sig")
