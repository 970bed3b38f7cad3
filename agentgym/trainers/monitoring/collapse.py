"""Detects symptoms that a run has stopped learning, while there is still something to save."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from agentgym.trainers.monitoring.step_health import StepHealth
from agentgym.trainers.settings.collapse import CollapseConfig, SymptomName

__all__ = ["Symptom", "symptoms_of_collapse"]


FIRST, LATELY = 5, 20
"""The numbers of steps that define what was usual: a run's first ones, and the last ones before the judged ones."""
RARE_CALLS = 0.1
"""The tool calls per turn below which their format is not judged."""
MAX_CUT_SHARE = 0.25
"""The cut replies per episode above which the limit of a reply decides what is learned."""
MAX_MERGE_LOST = 0.5
"""The share of what adapters learned that rounded weights may lack."""
MIN_BEFORE = 3
"""The fewest steps that a gradient norm is compared with."""
SMALL_NORM = 0.01
"""A median norm below this counts as this: what is learned already has gradients of any size, all of them small."""


@dataclass(frozen=True)
class Symptom:
    """A symptom of collapse."""

    name: SymptomName
    step: int
    """The step that showed it first."""
    text: str
    """The observation and the remedy, in one sentence."""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def symptoms_of_collapse(history: Sequence[StepHealth], config: CollapseConfig) -> dict[SymptomName, str]:
    """Returns the symptoms that all of the last steps show, one sentence by name.

    The result is empty for a healthy run and for a short history. A step is compared with the run itself: its first
    steps, and the last ones before those that are judged.
    """
    view = _View(history, config.patience)
    if len(view.recent) < config.patience:
        return {}
    return {name: text for name, rule in _RULES.items() if (text := rule(view, config))}


@dataclass(frozen=True)
class _View:
    """A history, split into the steps that are judged and those before them."""

    history: Sequence[StepHealth]
    patience: int

    @property
    def recent(self) -> Sequence[StepHealth]:
        return self.history[-self.patience :]

    @property
    def before(self) -> Sequence[StepHealth]:
        return self.history[: -self.patience]

    def values(self, name: str) -> tuple[list[float], list[float]]:
        """Returns the values that are judged and those before them, of the steps that measured them.

        The first list is empty if the newest step did not measure the value, or too few steps did.
        """
        values = [value for health in self.history if (value := getattr(health, name)) is not None]
        if getattr(self.history[-1], name) is None or len(values) < self.patience:
            return [], values
        return values[-self.patience :], values[: -self.patience]

    @property
    def improves(self) -> bool:
        """True if the last steps succeed more than the steps before them."""
        if not self.before:
            return False
        return fmean(step.success for step in self.recent) > _medians([step.success for step in self.before])[1] + 0.05


def _medians(before: Sequence[float]) -> tuple[float, float]:
    """Returns the median of the first steps, and that of the last ones."""
    return median(before[:FIRST]), median(before[-LATELY:])


def _tool_faults(view: _View, config: CollapseConfig) -> str:
    shares = [step.tool_fault_share for step in view.recent]
    if min(shares) >= config.threshold("tool_faults"):
        return (
            f"{shares[-1]:.0%} of the calls of the tool {view.recent[-1].faulty_tool!r} failed by no mistake of the"
            " model, and their episodes are lost; read their errors, see whether its service is down, and have what the"
            " model can mend raise ToolFailure"
        )
    return ""


def _replies_cut(view: _View, config: CollapseConfig) -> str:
    if not all(step.replies_cut > MAX_CUT_SHARE * step.episodes for step in view.recent):
        return ""
    cut, episodes = sum(step.replies_cut for step in view.recent), sum(step.episodes for step in view.recent)
    by_window = sum(step.replies_cut_by_window for step in view.recent)
    longest = max(step.longest_reply for step in view.recent)
    seen = f"{cut} replies in {episodes} episodes were cut before their end"
    if by_window > cut / 2:
        return (
            f"{seen}, as the context window was full; raise limits.context_window or local.window where they are below"
            " the model's own window, shorten the prompt, or begin with a model that says less"
        )
    return (
        f"{seen}, after {longest} tokens at most, so what they were to do never happened; raise the limit"
        f" (--limits.turn-tokens {max(512, 4 * longest)}), or begin with a model that says less"
    )


def _all_dead(view: _View) -> bool:
    return all(0 < step.groups == step.dead_groups for step in view.recent)


def _dead_groups(view: _View, config: CollapseConfig) -> str:
    if any(step.rejects_all for step in view.recent) and all(step.is_dead for step in view.recent):
        return (
            "the off-policy correction rejected every token, so nothing was learned; widen its bounds, or learn from"
            " fresher episodes (a smaller max_staleness)"
        )
    if all(step.success < 0.05 for step in view.recent) and _all_dead(view):
        if _replies_cut(view, config):
            return (
                "no episode succeeds, so nothing can be learned; raise the limit that cuts replies first (replies_cut)"
            )
        return (
            "no episode succeeds, so no group carries a signal and nothing can be learned; begin with easier tasks, or"
            " with a model that succeeds now and then"
        )
    longer = _View(view.history, config.patience + 1)  # chance makes all groups dead more easily if some succeed
    if len(longer.recent) > config.patience and _all_dead(longer) and not _all_solved(view, config):
        return (
            "within each group all episodes earn the same, so nothing can be learned; raise group_size or the"
            " temperature, or mix in other tasks"
        )
    return ""


def _all_solved(view: _View, config: CollapseConfig) -> str:
    if all(step.success > 0.95 for step in view.recent) and _all_dead(view):
        return "every episode succeeds, so nothing is left to learn; give harder tasks, or end here (collapse.stop_on)"
    return ""


def _success_lost(view: _View, config: CollapseConfig) -> str:
    before = [step.success for step in view.before]
    best = max((median(before[end - FIRST : end]) for end in range(FIRST, len(before) + 1)), default=0.0)
    now = max(step.success for step in view.recent)
    groups = max(1, sum(step.groups for step in view.recent))
    if now < 0.5 * best and best - now > 4 * 0.5 / math.sqrt(groups):  # a group's success deviates by 0.5 at most
        return (
            f"the success fell from {best:.0%} to {now:.0%}; unless the tasks became harder, lower the learning rate,"
            " or go on from an earlier checkpoint"
        )
    return ""


def _without_format(health: StepHealth) -> bool:
    if health.tool_calls_per_turn is not None and health.tool_calls_per_turn < RARE_CALLS:
        return False  # an environment without tools, in which a model calls one now and then
    return health.lost_calls > 0.5 * max(1, health.tool_calls)


def _no_format(view: _View, config: CollapseConfig) -> str:
    if _replies_cut(view, config):  # the format of a call that the limit cut is unknown
        return ""
    if all(map(_without_format, view.recent)) and _without_format(view.history[0]):
        return (
            "most tool calls cannot be read or run, from the first step on; unless it rises by itself, begin with a"
            " model that `agentgym sft` taught this environment"
        )
    return ""


def _format_lost(view: _View, config: CollapseConfig) -> str:
    if all(map(_without_format, view.recent)) and not _without_format(view.history[0]):
        return "most tool calls cannot be read or run any more; lower the learning rate"
    return ""


def _tools_lost(view: _View, config: CollapseConfig) -> str:
    recent, before = view.values("tool_calls_per_turn")
    if recent and before and max(recent) < 0.1 * max(_medians(before)):
        return (
            f"the model calls {max(recent):.2g} tools a turn where it called {max(_medians(before)):.2g}; see whether"
            " the reward pays for calls, or lower the learning rate"
        )
    return ""


def _entropy_lost(view: _View, config: CollapseConfig) -> str:
    recent, before = view.values("entropy")
    usual = max(_medians(before)) if before else 0.0
    if recent and max(recent) < max(1e-3, 0.02 * usual) and max(step.success for step in view.recent) < 0.9:
        return (
            f"the entropy fell to {max(recent):.2g} nats a token, and not all episodes succeed: the same is said again"
            " and again; add an entropy bonus or a KL term, or lower the learning rate"
        )
    return ""


def _entropy_exploded(view: _View, config: CollapseConfig) -> str:
    recent, before = view.values("entropy")
    usual = min(_medians(before)) if before else 0.0
    if recent and before and min(recent) > max(3 * usual, usual + 0.5) and not view.improves:
        return (
            f"the entropy rose from {usual:.2g} to {min(recent):.2g} nats a token, and the success did not: replies"
            " dissolve into noise; lower the learning rate or the entropy bonus"
        )
    return ""


def _repetition(view: _View, config: CollapseConfig) -> str:
    descriptions = {"repeated_ngrams": "a reply's own runs of 4 tokens", "repeated_replies": "an episode's own replies"}
    for name, what in descriptions.items():
        recent, before = view.values(name)
        rise = min(recent) - min(_medians(before)) if recent and before else 0.0
        if rise > config.threshold("repetition") and not view.improves:
            return (
                f"{min(recent):.0%} of what is said repeats {what}, {rise:.0%} more than before, and the success did"
                " not rise; lower the learning rate, add a KL term, or bound turns and tokens"
            )
    return ""


def _tokens_clipped(view: _View, config: CollapseConfig) -> str:
    recent, _ = view.values("clip_fraction")
    if recent and min(recent) > config.threshold("clipped"):
        return (
            f"{min(recent):.0%} of the tokens are clipped, so next to nothing is learned; lower the learning rate, or"
            " the age of what is trained on"
        )
    return ""


def _gradient_exploded(view: _View, config: CollapseConfig) -> str:
    recent, before = view.values("grad_norm")
    if not recent or len(before) < MIN_BEFORE:
        return ""
    usual = _medians(before)[1]
    if min(recent) > config.threshold("gradient_exploded") * max(usual, SMALL_NORM):
        return (
            f"the gradient norm is {min(recent):.3g}, where its median was {usual:.3g}; lower the learning rate, or"
            " look for rewards out of scale"
        )
    return ""


def _kl_exploded(view: _View, config: CollapseConfig) -> str:
    recent, _ = view.values("kl")
    if recent and min(recent) > config.threshold("kl_exploded"):
        return (
            f"the policy is {min(recent):.3g} nats a token from the reference model; raise learner.kl.coefficient, or"
            " lower the learning rate"
        )
    return ""


def _merge_lost(view: _View, config: CollapseConfig) -> str:
    recent, _ = view.values("merge_lost")
    if recent and min(recent) > MAX_MERGE_LOST:
        return (
            f"the weights that the engine samples with lack {min(recent):.0%} of what the adapters learned, which is"
            " less than their last bit; train in float32 (learner.dtype), or raise learner.lora.learning_rate"
        )
    return ""


_RULES: Mapping[SymptomName, Callable[[_View, CollapseConfig], str]] = {
    "tool_faults": _tool_faults,
    "replies_cut": _replies_cut,
    "dead_groups": _dead_groups,
    "solved": _all_solved,
    "success_lost": _success_lost,
    "no_format": _no_format,
    "format_lost": _format_lost,
    "tools_lost": _tools_lost,
    "entropy_lost": _entropy_lost,
    "entropy_exploded": _entropy_exploded,
    "repetition": _repetition,
    "clipped": _tokens_clipped,
    "gradient_exploded": _gradient_exploded,
    "kl_exploded": _kl_exploded,
    "merge_lost": _merge_lost,
}
"""The rule of each symptom; `nan` has none, as the update that finds it raises."""
