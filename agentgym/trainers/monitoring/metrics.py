"""What a step reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentgym.engines.protocol import WeightSync
from agentgym.rollout.record.task_names import task_names
from agentgym.trainers.batch.credits import GroupCredit
from agentgym.trainers.learner.critic import CriticStats
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.monitoring.collapse import Sign
from agentgym.trainers.monitoring.repetition import Repetition
from agentgym.trainers.monitoring.tool_faults import ToolFaults
from agentgym.trainers.speed.step_speed import StepSpeed
from agentgym.trajectory import Group, Trajectory
from agentgym.types import JSON, Task

__all__ = ["EvalScore", "RolloutSummary", "StepMetrics", "score"]


@dataclass(frozen=True, kw_only=True)
class RolloutSummary:
    """The episodes of a step, of groups that it left out too; rates and means are over those that have a reward."""

    episodes: int
    failed: int
    """Episodes without a reward: environment, engine, time-out."""
    truncated: int
    replies_cut: int
    """Replies that a limit of tokens ended (`finish_reason` length)."""
    replies_cut_by_window: int
    """Of these, the ones that the context window ended, and not `limits.turn_tokens`."""
    longest_reply: int
    """Ids of the longest reply."""
    left_out: int
    """Episodes with a reward that the step did not learn from: truncated or rejected ones that its settings leave out,
    and those of groups without a signal that were replaced."""
    success: float
    reward_mean: float
    turns_mean: float
    tokens: int
    """Ids of all rows."""
    trained_tokens: int
    """Trained ids."""
    tool_calls: int
    malformed_calls: int
    """Calls that could not be read."""
    truncated_calls: int
    """Calls that the end of their reply cut."""
    unknown_tools: int
    """Calls of a tool that does not exist."""
    invalid_arguments: int
    """Calls whose arguments the tool's schema refuses."""
    tool_errors: int
    """Calls that were answered with an error of their tool, or not in time, or exceeded `max_calls_per_turn`."""
    tool_faults: int
    """See `ToolFaults`; so are the next two."""
    tool_fault_share: float
    faulty_tool: str | None
    groups: int
    dead_groups: int
    """Groups without an advantage other than 0; they carry no signal."""
    dead_group_share: float
    """Of all groups."""
    tool_calls_per_turn: float | None
    """Calls, readable or not, over replies; None without a reply."""
    sampled_entropy: float | None
    """Minus the mean logprob of the trained tokens when they were sampled, in nats: an estimate of the policy's entropy
    that steps without an update have too. None without a token."""
    repeated_ngrams: float
    """Within replies, see `Repetition`; so are the next two."""
    repeated_replies: float
    """Within episodes."""
    identical_episodes: float
    """Within groups."""

    @property
    def lost_calls(self) -> int:
        """Calls that reached no tool."""
        return self.malformed_calls + self.truncated_calls + self.unknown_tools + self.invalid_arguments

    @classmethod
    def of(cls, groups: Sequence[Group], advantages: Sequence[GroupCredit]) -> RolloutSummary:
        """Summarizes a step's groups."""
        played = [trajectory for group in groups for trajectory in group.trajectories]
        kept = [trajectory for trajectory in played if trajectory.status.trainable]

        def total(name: str) -> int:
            return int(sum(one.metrics.get(name, 0) for one in played))

        num_dead = sum(credit.dead for credit in advantages)
        num_turns = sum(len(one.turns) for one in played)
        num_trained = sum(one.num_trained_tokens for one in kept)
        logprob = sum(float(row.logprobs[row.mask].sum(dtype="float64")) for one in kept for row in one.rows)
        return cls(
            episodes=len(played),
            failed=len(played) - len(kept),
            truncated=sum(one.status == "truncated" for one in kept),
            left_out=_num_left_out(groups, advantages),
            **_reply_counts(played),
            success=mean([float(bool(one.success)) for one in kept]),
            reward_mean=mean([one.reward or 0.0 for one in kept]),
            turns_mean=mean([len(one.turns) for one in kept]),
            tokens=sum(one.num_tokens for one in played),
            trained_tokens=num_trained,
            tool_calls=total("num_tool_calls"),
            malformed_calls=total("malformed_calls"),
            truncated_calls=total("truncated_calls"),
            unknown_tools=total("unknown_tools"),
            invalid_arguments=total("invalid_arguments"),
            tool_errors=total("tool_errors"),
            groups=len(groups),
            dead_groups=num_dead,
            dead_group_share=num_dead / max(1, len(groups)),
            tool_calls_per_turn=total("num_tool_calls") / num_turns if num_turns else None,
            sampled_entropy=max(0.0, -logprob) / num_trained if num_trained else None,
            **asdict(ToolFaults.of(played)),
            **asdict(Repetition.of(groups)),
        )


def _num_left_out(groups: Sequence[Group], advantages: Sequence[GroupCredit]) -> int:
    """The number of episodes that have a reward and no advantages."""
    return sum(
        one.status.trainable and member is None
        for group, credit in zip(groups, advantages, strict=True)
        for one, member in zip(group.trajectories, credit.members, strict=True)
    )


def _reply_counts(played: Sequence[Trajectory]) -> dict[str, Any]:
    return {
        "replies_cut": sum(one.num_cut_replies for one in played),
        "replies_cut_by_window": sum(one.ends_at_window for one in played),
        "longest_reply": max((tokens for one in played for tokens in one.reply_tokens), default=0),
    }


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of `metrics.jsonl`; `docs/metrics.md` lists its names."""

    step: int
    """The optimizer step, from 1; also the policy version it made."""
    rollout: RolloutSummary
    update: StepStats | None
    """None when no group carried a signal, so there was nothing to step on."""
    critic: CriticStats | None = None
    """None without a critic, and where there was nothing to learn."""
    sync: WeightSync
    """How the step's weights reached the engine."""
    generate_s: float
    update_s: float
    """Learning and the weight update together."""
    elapsed_s: float
    """Training time since the run began, evaluations not counted."""
    speed: StepSpeed | None = None
    """None where it was not measured."""
    practice: Mapping[str, float] = field(default_factory=dict)
    """What mixes, curriculum, replay and filter say of the step, by name, and how far ahead it was played:
    `docs/sampling.md` and `docs/asynchronous.md` list them."""
    signs: tuple[Sign, ...] = ()
    """The signs of collapse that stand at this step."""

    def to_json(self) -> dict[str, JSON]:
        """Flat, with the names that curves and viewers use; `warnings` tells the signs that are new at this step."""
        update: dict[str, JSON] = asdict(self.update) if self.update else {"loss": 0.0}
        if self.update and not self.update.kl_coefficient:
            update["kl"] = None  # without a reference model there is none, which is not the same as 0
        update |= asdict(self.critic) if self.critic else {}
        times = {"generate_s": self.generate_s, "update_s": self.update_s, "elapsed_s": self.elapsed_s}
        times |= {f"sync_{name}": getattr(self.sync, name) for name in ("gather_s", "transfer_s", "load_s")}
        rounded = {name: round(value, 4) for name, value in times.items()}
        sync = {"sync_version": self.sync.version, "sync_checksum": self.sync.checksum}
        told: dict[str, JSON] = {
            "signs": [sign.name for sign in self.signs],
            "warnings": [str(sign) for sign in self.signs if sign.step == self.step],
        }
        speed = asdict(self.speed) if self.speed else {}
        return {
            "step": self.step,
            **asdict(self.rollout),
            **update,
            **sync,
            **rounded,
            **speed,
            **self.practice,
            **told,
        }


@dataclass(frozen=True, kw_only=True)
class EvalScore:
    """Held-out play at one point of the run."""

    step: int
    success: float
    reward_mean: float
    episodes: int
    failed: int
    won: tuple[float, ...] = ()
    """By episode that has a reward: 1 for a success, else 0."""
    tasks: tuple[str, ...] = ()
    """The task of each of them, equal for equal tasks."""
    by_env: Mapping[str, EvalScore] = field(default_factory=dict)
    """Of a mix: the scores of its environments, by name."""


def score(step: int, trajectories: Sequence[Trajectory], label: Callable[[Task], str] | None = None) -> EvalScore:
    """Success and mean reward of the episodes that have one; `label` names the part that a task is of, "" for none."""
    parts: dict[str, list[Trajectory]] = {}
    for one in trajectories:
        parts.setdefault(label(one.task) if label else "", []).append(one)
    kept = [one for one in trajectories if one.status.trainable]
    won = tuple(float(bool(one.success)) for one in kept)
    return EvalScore(
        step=step,
        success=mean(won),
        won=won,
        tasks=tuple(task_names(kept)),
        reward_mean=mean([one.reward or 0.0 for one in kept]),
        episodes=len(kept),
        failed=len(trajectories) - len(kept),
        by_env={name: score(step, own) for name, own in parts.items() if name},
    )


def mean(values: Sequence[float]) -> float:
    """The mean, 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
