"""The metrics of a step and of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from agentgym.engines.protocol import WeightSync
from agentgym.rollout.record.task_names import task_names
from agentgym.rollout.scores.pass_at_k import AtK, repeat_scores
from agentgym.trainers.batch.credits import GroupCredit
from agentgym.trainers.learner.critic import CriticStats
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.monitoring.collapse import Symptom
from agentgym.trainers.monitoring.repetition import Repetition
from agentgym.trainers.monitoring.tool_faults import ToolFaults
from agentgym.trainers.speed.step_speed import StepSpeed
from agentgym.trajectory import Group, Trajectory
from agentgym.types import JSON, Task

__all__ = ["EvalScore", "RolloutSummary", "StepMetrics", "score"]

NO_UPDATE: Mapping[str, JSON] = {"loss": 0.0, "optimizer_steps": 0, "learned_tokens": 0}
"""The numbers of an update in the line of a step without one."""
OF_SAMPLES = ("clip_fraction", "ratio_max", "mismatch_", "stale_tokens", "correct", "sampled_")
"""The beginnings of the numbers of what sampled the learner's tokens, which a lesson does not know."""


@dataclass(frozen=True, kw_only=True)
class RolloutSummary:
    """The episodes of a step, left-out groups included; rates and means are over those that have a reward."""

    episodes: int
    failed: int
    """The number of episodes without a reward: environment, engine, time-out."""
    truncated: int
    replies_cut: int
    """The number of replies that a limit of tokens ended (`finish_reason` length), in episodes that have a reward."""
    replies_cut_by_window: int
    """The number of cut replies that the context window ended, and not `limits.turn_tokens`."""
    longest_reply: int
    """The number of ids of the longest reply."""
    left_out: int
    """The number of episodes with a reward that the step did not learn from: truncated or rejected ones that its
    settings leave out, and those of groups without a signal that were replaced."""
    success: float
    reward_mean: float
    turns_mean: float
    tokens: int
    """The number of ids of all rows."""
    trained_tokens: int
    """The number of trained ids."""
    tool_calls: int
    malformed_calls: int
    """The number of calls that could not be parsed."""
    truncated_calls: int
    """The number of calls that the end of their reply cut."""
    unknown_tools: int
    """The number of calls of a tool that does not exist."""
    invalid_arguments: int
    """The number of calls whose arguments the tool's schema rejects."""
    tool_errors: int
    """The number of calls that failed with a tool's error, timed out, or exceeded `max_calls_per_turn`."""
    tool_faults: int
    """The number of calls whose tool failed without a mistake of the model."""
    tool_fault_share: float
    """The largest share of such calls among the calls of one tool."""
    faulty_tool: str | None
    """The tool that has this share, or None without a fault."""
    groups: int
    dead_groups: int
    """The number of groups without an advantage other than 0; they carry no signal."""
    dead_group_share: float
    """The share of dead groups among all groups."""
    tool_calls_per_turn: float | None
    """The number of calls, parsed or not, over the number of replies, both of episodes that have a reward; None without
    a reply."""
    sampled_entropy: float | None
    """Minus the mean logprob of the trained tokens when they were sampled, in nats: an estimate of the policy's entropy
    that steps without an update have too. None without a token."""
    repeated_ngrams: float
    """The repetition within replies; see `Repetition`, also for the next two fields."""
    repeated_replies: float
    """The repetition within episodes."""
    identical_episodes: float
    """The repetition within groups."""

    @property
    def lost_calls(self) -> int:
        """The number of calls that reached no tool."""
        return self.malformed_calls + self.truncated_calls + self.unknown_tools + self.invalid_arguments

    @classmethod
    def of(cls, groups: Sequence[Group], advantages: Sequence[GroupCredit]) -> RolloutSummary:
        """Summarizes a step's groups."""
        played = [trajectory for group in groups for trajectory in group.trajectories]
        trainable = [trajectory for trajectory in played if trajectory.status.trainable]

        def total(name: str, of: Sequence[Trajectory] = played) -> int:
            return int(sum(trajectory.metrics.get(name, 0) for trajectory in of))

        num_dead = sum(credit.dead for credit in advantages)
        num_turns = sum(len(trajectory.turns) for trajectory in trainable)
        num_trained = sum(trajectory.num_trained_tokens for trajectory in trainable)
        logprob = sum(
            float(row.logprobs[row.mask].sum(dtype="float64")) for trajectory in trainable for row in trajectory.rows
        )
        return cls(
            episodes=len(played),
            failed=len(played) - len(trainable),
            truncated=sum(trajectory.status == "truncated" for trajectory in trainable),
            left_out=_num_left_out(groups, advantages),
            replies_cut=sum(trajectory.num_cut_replies for trajectory in trainable),
            replies_cut_by_window=sum(trajectory.ends_at_window for trajectory in trainable),
            longest_reply=max((tokens for trajectory in played for tokens in trajectory.reply_tokens), default=0),
            success=mean([float(bool(trajectory.success)) for trajectory in trainable]),
            reward_mean=mean([trajectory.reward or 0.0 for trajectory in trainable]),
            turns_mean=mean([len(trajectory.turns) for trajectory in trainable]),
            tokens=sum(trajectory.num_tokens for trajectory in played),
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
            tool_calls_per_turn=total("num_tool_calls", trainable) / num_turns if num_turns else None,
            sampled_entropy=max(0.0, -logprob) / num_trained if num_trained else None,
            **asdict(ToolFaults.of(played)),
            **asdict(Repetition.of(groups)),
        )


def _num_left_out(groups: Sequence[Group], advantages: Sequence[GroupCredit]) -> int:
    """Returns the number of episodes that have a reward and no advantages."""
    return sum(
        trajectory.status.trainable and member is None
        for group, credit in zip(groups, advantages, strict=True)
        for trajectory, member in zip(group.trajectories, credit.members, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """A line of `metrics.jsonl`; `docs/metrics.md` lists its names."""

    step: int
    """The optimizer step, from 1; also the policy version that it produced."""
    rollout: RolloutSummary | None = None
    """The episodes of the step; None for a lesson, which plays none."""
    update: StepStats | None
    """The statistics of the update; None if no group carried a signal, so that there was no update.

    In an update without an optimizer step, an off-policy correction rejected all tokens."""
    critic: CriticStats | None = None
    """The statistics of the critic; None without one, and if there was nothing to learn."""
    sync: WeightSync | None = None
    """The transfer of the step's weights to the engine; None for a lesson, which samples from no engine."""
    generate_s: float
    """The seconds of playing the step's episodes, or of reading its rows."""
    update_s: float
    """The seconds of learning and the weight update together."""
    elapsed_s: float
    """The seconds of training since the run began, without evaluations."""
    speed: StepSpeed | None = None
    """The speed of the step; None if it was not measured."""
    practice: Mapping[str, float] = field(default_factory=dict)
    """The metrics of mixes, curriculum, replay and filter, by name, and how far ahead the step was played:
    `docs/sampling.md` and `docs/asynchronous.md` list them. Of a lesson, those of its rows and of its validation."""
    symptoms: tuple[Symptom, ...] = ()
    """The symptoms of collapse at this step."""
    held_out: EvalScore | None = None
    """The evaluation before this step, if there was one: of the weights that sampled the step's episodes."""

    def to_json(self) -> dict[str, JSON]:
        """Returns a flat mapping with the names that curves and viewers use; `warnings` has the step's new symptoms."""
        update: dict[str, JSON] = asdict(self.update) if self.update else dict(NO_UPDATE)
        for name in ("router", "pairs"):
            part = update.pop(name, None)
            update |= part if isinstance(part, dict) else {}
        if self.update and self.update.merge_lost is None:
            del update["merge_lost"]
        if self.update and not self.update.kl_coefficient:
            update["kl"] = None  # without a reference model there is none, which is not the same as 0
        update |= asdict(self.critic) if self.critic else {}
        times = {"generate_s": self.generate_s, "update_s": self.update_s, "elapsed_s": self.elapsed_s}
        sync: dict[str, JSON] = {}
        if self.sync:
            times |= {f"sync_{name}": getattr(self.sync, name) for name in ("gather_s", "transfer_s", "load_s")}
            names = {"version": "version", "bytes": "num_bytes", "checksum": "checksum"}
            sync = {f"sync_{name}": getattr(self.sync, field) for name, field in names.items()}
        rounded = {name: round(value, 4) for name, value in times.items()}
        symptoms: dict[str, JSON] = {
            "signs": [symptom.name for symptom in self.symptoms],
            "warnings": [str(symptom) for symptom in self.symptoms if symptom.step == self.step],
        }
        speed: dict[str, JSON] = asdict(self.speed) if self.speed else {}
        if self.rollout is None:
            update, speed = (
                {name: value for name, value in numbers.items() if not name.startswith(OF_SAMPLES)}
                for numbers in (update, speed)
            )
        rollout: dict[str, JSON] = asdict(self.rollout) if self.rollout else {}
        return {
            "step": self.step,
            **rollout,
            **update,
            **sync,
            **rounded,
            **speed,
            **self.practice,
            **(self.held_out.to_metrics() if self.held_out else {}),
            **symptoms,
        }


@dataclass(frozen=True, kw_only=True)
class EvalScore:
    """The score of an evaluation on held-out tasks, at one point of the run."""

    step: int
    success: float
    reward_mean: float
    episodes: int
    failed: int
    won: tuple[float, ...] = field(default=(), repr=False)
    """The success of each episode that has a reward: 1 for a success, else 0."""
    tasks: tuple[str, ...] = field(default=(), repr=False)
    """The task of each of these episodes, equal for equal tasks."""
    at_k: tuple[AtK, ...] = field(default=(), repr=False)
    """pass@k, pass^k and best@k for k from 2; empty if every task was played once."""
    by_env: Mapping[str, EvalScore] = field(default_factory=dict, repr=False)
    """The scores of the environments of a mix, by name."""

    def to_metrics(self) -> dict[str, JSON]:
        """Returns the numbers by the names that `metrics.jsonl` and trackers have."""
        numbers: dict[str, JSON] = {"eval_success": self.success, "eval_reward_mean": self.reward_mean}
        for at in self.at_k:
            numbers |= {f"eval_pass_at_{at.k}": at.pass_at_k, f"eval_best_at_{at.k}": at.best_at_k}
        for env, part in self.by_env.items():
            numbers |= {f"{name}/{env}": value for name, value in part.to_metrics().items()}
        return numbers


def score(step: int, trajectories: Sequence[Trajectory], label: Callable[[Task], str] | None = None) -> EvalScore:
    """Returns success and mean reward of the episodes that have one; `label` names the part of a task, "" for none."""
    parts: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        parts.setdefault(label(trajectory.task) if label else "", []).append(trajectory)
    trainable = [trajectory for trajectory in trajectories if trajectory.status.trainable]
    won = tuple(float(bool(trajectory.success)) for trajectory in trainable)
    return EvalScore(
        step=step,
        success=mean(won),
        won=won,
        tasks=tuple(task_names(trainable)),
        reward_mean=mean([trajectory.reward or 0.0 for trajectory in trainable]),
        episodes=len(trainable),
        failed=len(trajectories) - len(trainable),
        at_k=tuple(at for scores in repeat_scores(trajectories)[:1] for at in scores.at if at.k > 1),
        by_env={name: score(step, own) for name, own in parts.items() if name},
    )


def mean(values: Sequence[float]) -> float:
    """Returns the mean, or 0 without values."""
    return sum(values) / len(values) if values else 0.0
