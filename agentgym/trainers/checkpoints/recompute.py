"""Computes a recorded run's advantages and logprobs again, from its rewards, its settings and its checkpoints."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from agentgym.chat_templates.template_folder import chat_folder
from agentgym.errors import AgentGymError
from agentgym.rollout.record.episodes_file import EpisodeRecord
from agentgym.rollout.record.ledger import Ledger, Property, Violation
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.algorithms.estimators import needs_input
from agentgym.trainers.batch.batch import plain_batch
from agentgym.trainers.batch.credits import Advantages, CreditInputs, GroupCredit, credit_groups
from agentgym.trainers.checkpoints.checkpoint import checkpoint_folders, step_of
from agentgym.trainers.checkpoints.run_folder import read_settings
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.lessons.config import config_kind
from agentgym.trainers.parts.engine import load_model
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trajectory import Group, Trajectory

__all__ = ["RecomputedAdvantages", "RecomputedLogprobs", "config_of"]

ADVANTAGES = Property("estimator", "the advantages are those that the run's estimator makes of its rewards", "episodes")
LOGPROBS = Property("model", "the logprobs are those of the weights of the recorded version", "episodes")
RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""The tolerance for float32 and another order of sums in an advantage."""
EXACT_BOUND = 0.01
"""The nats that a logprob may be off if the engine and the learner compute in float32, as at a run's start."""
MEAN_BOUND = 0.05
"""The nats that logprobs may be off on average otherwise."""


def config_of(run: Path) -> TrainConfig:
    """Returns the configuration of a training run from its config.yaml."""
    settings = read_settings(run)
    return config_from_mapping(config_kind(settings), settings)


class RecomputedAdvantages:
    """Checks the property `estimator`, step by step.

    The episodes that a step learned from are those with advantages; an episode without any is in no baseline.
    """

    properties: tuple[Property, ...] = (ADVANTAGES,)

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._reason = _why_not_credited(config)
        self._step: int | None = None
        self._groups: dict[str, list[tuple[int, EpisodeRecord]]] = {}
        self._greedy: dict[str, float] = {}

    def add(self, ledger: Ledger, line: int, record: EpisodeRecord) -> None:
        """Takes the next episode; the previous steps are then complete."""
        if record.step != self._step:
            self._finish(ledger)
            self._step = record.step
        if record.phase == "greedy" and record.trajectory.reward is not None:
            self._greedy[record.trajectory.group] = record.trajectory.reward
        elif record.phase == "train" and record.advantages is not None:
            if self._reason:
                ledger.skip(ADVANTAGES.name, self._reason)
            else:
                self._groups.setdefault(record.trajectory.group, []).append((line, record))

    def close(self, ledger: Ledger) -> None:
        """Checks the last step."""
        self._finish(ledger)

    def _finish(self, ledger: Ledger) -> None:
        groups_of_step, self._groups = self._groups, {}
        greedy, self._greedy = self._greedy, {}
        if not groups_of_step:
            return
        groups = [
            Group(name, members[0][1].trajectory.task, tuple(record.trajectory for _, record in members))
            for name, members in groups_of_step.items()
        ]
        try:
            credits = self._compute_credits(groups, greedy)
        except AgentGymError as error:
            ledger.check(
                ADVANTAGES.name, Violation(None, problem=f"step {self._step} cannot be credited again: {error}")
            )
            return
        for members, credit in zip(groups_of_step.values(), credits, strict=True):
            for (line, record), advantages in zip(members, credit.members, strict=True):
                problem = _advantage_problem(record.advantages or (), advantages or ())
                ledger.check(ADVANTAGES.name, Violation(line, problem=problem) if problem else None)

    def _compute_credits(self, groups: Sequence[Group], greedy: Mapping[str, float]) -> list[GroupCredit]:
        config = self._config
        inputs = CreditInputs(greedy=greedy)
        return credit_groups(groups, config.estimator, config.advantage.settings, allow_single=True, inputs=inputs)


class RecomputedLogprobs:
    """Checks the property `model` on up to `max_episodes` episodes of each version whose weights the run has.

    Those are the weights that it began with, and those of its checkpoints.
    """

    properties: tuple[Property, ...] = (LOGPROBS,)

    def __init__(self, run: Path, config: TrainConfig, max_episodes: int = 8) -> None:
        self._config, self._max_episodes = config, max_episodes
        first = chat_folder(config.model, config.chat_template)
        self._folders = {0: first, **{step_of(folder): folder for folder in checkpoint_folders(run)}}
        self._samples: dict[int, list[tuple[int, Trajectory]]] = {}
        self._num_episodes: dict[int, int] = {}
        self._random = random.Random(0)

    def add(self, ledger: Ledger, line: int, record: EpisodeRecord) -> None:
        """Takes an episode; each episode of a version is kept with the same probability."""
        trajectory = record.trajectory
        if not trajectory.status.trainable or not trajectory.num_trained_tokens or record.phase == "greedy":
            return
        versions = {number for row in trajectory.rows for span in row.spans for number in span.policy_versions or ()}
        if len(versions) > 1:
            ledger.skip(LOGPROBS.name, "sampled by several versions of the weights")
            return
        (version,) = versions
        if version not in self._folders:
            ledger.skip(LOGPROBS.name, "no checkpoint has the weights")
            return
        sample = self._samples.setdefault(version, [])
        self._num_episodes[version] = self._num_episodes.get(version, 0) + 1
        if len(sample) < self._max_episodes:
            sample.append((line, trajectory))
            return
        place = self._random.randrange(self._num_episodes[version])
        if place < self._max_episodes:
            sample[place] = (line, trajectory)

    def close(self, ledger: Ledger) -> None:
        """Computes the logprobs of the kept episodes."""
        for version, sample in sorted(self._samples.items()):
            try:
                problems = self._problems(self._folders[version], [trajectory for _, trajectory in sample])
            except (AgentGymError, OSError) as error:
                ledger.skip(LOGPROBS.name, f"the weights of version {version} cannot be loaded: {error}")
                continue
            for (line, _), problem in zip(sample, problems, strict=True):
                ledger.check(
                    LOGPROBS.name, Violation(line, problem=f"{problem} ({self._folders[version]})") if problem else None
                )
            if left := self._num_episodes[version] - len(sample):
                reason = f"a sample of {self._max_episodes} of each version is taken"
                skipped = ledger.tally(LOGPROBS.name).skipped
                skipped[reason] = skipped.get(reason, 0) + left

    def _problems(self, folder: Path, trajectories: Sequence[Trajectory]) -> list[str]:
        """Returns each episode's difference from the logprobs of the model in the folder, as text; "" for none."""
        config = self._config
        ran = config.learner
        device = ran.device if torch.cuda.is_available() else "cpu"  # a run on a GPU may be checked anywhere
        plain = LearnerConfig(device=device, dtype=ran.compute_dtype, micro_batch_tokens=ran.micro_batch_tokens)
        learner = Learner(
            load_model(folder, replace(config, learner=plain)),
            plain,
            config.optimizer,
            total_steps=1,
            temperature=config.sampling.temperature,
        )
        try:
            batch = plain_batch(trajectories)
            logp_M = learner.logprobs(batch).cpu()
        finally:
            learner.close()
        off = (logp_M - batch.sampled_logp_N[batch.mask_N]).abs()
        episode = batch.trajectory_N[batch.mask_N]
        return [self._problem(off[episode == number]) for number in range(len(trajectories))]

    def _problem(self, off: torch.Tensor) -> str:
        config = self._config
        is_exact = config.engine == "local" and config.executor == "local" and config.learner.compute_dtype == "float32"
        max_nats = config.parity.max_mismatch or EXACT_BOUND
        if is_exact or config.parity.max_mismatch is not None:
            if bool((off <= max_nats).all()):
                return ""
            return f"a logprob is {float(off.max()):.4f} nats off those of the weights, more than {max_nats:g}"
        mean = float(off.mean())
        return (
            ""
            if mean <= MEAN_BOUND
            else f"logprobs are {mean:.4f} nats off those of the weights, more than {MEAN_BOUND:g}"
        )


def _why_not_credited(config: TrainConfig) -> str:
    """Returns the input of the estimator that is not recorded; "" if all inputs are."""
    learner = config.learner
    if config.is_lesson:
        return "a lesson credits no episodes"
    if learner.critic.exists:
        return f"the estimator {config.estimator} takes the critic's values, which are not recorded"
    if needs_input(config.estimator, "proxy_BT"):
        return f"the estimator {config.estimator} takes gradients of the policy, which are not recorded"
    if learner.kl.coefficient > 0 and learner.kl.place == "reward":
        return "the KL penalty is taken off the rewards, and is not recorded"
    return ""


def _advantage_problem(recorded: Sequence[Sequence[float]], recomputed: Advantages | tuple[()]) -> str:
    """Returns the difference between recorded and recomputed advantages, as text; "" for none."""
    if [len(row) for row in recorded] != [len(row) for row in recomputed]:
        return "the estimator gives advantages for other ids"
    for number, (row, other) in enumerate(zip(recorded, recomputed, strict=True)):
        off = ~np.isclose(np.asarray(row), other, rtol=RELATIVE, atol=ABSOLUTE)
        if off.any():
            place = int(off.argmax())
            return f"the advantage of sampled id {place} of row {number} is {row[place]:g}, and {other[place]:g} again"
    return ""
