"""Signs that a run has stopped learning, named while there is still something to save."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.trainers.metrics import RolloutSummary, StepMetrics

__all__ = ["signs_of_collapse"]

PATIENCE = 2
"""Steps in a row that show a sign before it is named."""


def signs_of_collapse(history: Sequence[StepMetrics]) -> list[str]:
    """What the last steps have in common, one sentence each; [] for a healthy run.

    Named are: every group dead without success, most calls unreadable or unrunnable (since the first step, or only
    later), no calls where there were some, and an entropy that fell to nothing while the success did not rise.
    """
    recent = history[-PATIENCE:]
    if len(recent) < PATIENCE:
        return []
    rollouts = [step.rollout for step in recent]
    signs = []
    if all(one.dead_groups == one.groups and one.success < 0.05 for one in rollouts):
        signs.append("dead groups: no episode succeeds, so no group carries a signal and nothing can be learned")
    if all(_no_format(one) for one in rollouts):
        had_it = not _no_format(history[0].rollout)
        signs.append(
            "lost format: most tool calls cannot be read or run; lower the learning rate"
            if had_it
            else "no format: most tool calls cannot be read or run, from the first step on; unless it rises by itself,"
            " begin with a model that `agentgym sft` taught this environment"
        )
    if all(one.tool_calls == 0 for one in rollouts) and any(step.rollout.tool_calls for step in history):
        signs.append("lost tools: the model calls none any more")
    entropies = [step.update.entropy for step in recent if step.update]
    if len(entropies) == PATIENCE and max(entropies) < 1e-3 and max(one.success for one in rollouts) < 0.5:
        signs.append("lost entropy: every reply is the same and most of them fail; add an entropy bonus or a KL term")
    return signs


def _no_format(rollout: RolloutSummary) -> bool:
    return rollout.failed_calls > 0.5 * max(1, rollout.tool_calls)
