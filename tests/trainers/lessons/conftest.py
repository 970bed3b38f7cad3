"""Learns batches without a run, as a lesson does step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from agentgym.model.language_model import LanguageModel
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig


def learn_batches(
    model: LanguageModel, batches: Sequence[TrainingBatch], config: LearnerConfig, optimizer: OptimizerConfig
) -> list[StepStats]:
    learner = Learner(model, config, optimizer, total_steps=len(batches))
    stats = [learner.update(batch, version=number) for number, batch in enumerate(batches)]
    learner.close()
    if learner.adapters is not None:
        learner.adapters.merge()
    return stats


@pytest.fixture
def learn() -> Callable[..., list[StepStats]]:
    """`learn(model, batches, config, optimizer)` returns the statistics of its steps; adapters are merged."""
    return learn_batches
