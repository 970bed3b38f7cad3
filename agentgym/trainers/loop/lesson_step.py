"""One step of a lesson: read its rows, update the weights, record the step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TypeVar

from agentgym.errors import AgentGymError
from agentgym.trainers.checkpoints.random_states import random_states
from agentgym.trainers.learner.objective import balance_weight
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.lessons.lesson import Lesson
from agentgym.trainers.loop.session import TrainingSession
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.parallel.gradient_threads import one_core

__all__ = ["lesson_step"]

T = TypeVar("T")


async def lesson_step(session: TrainingSession, lesson: Lesson[T]) -> None:
    """Learns from the rows of the next step, and records it; the engine has the weights before it plays.

    An error leaves the weights as they were, and a checkpoint of them.
    """
    progress, instruments, learner = session.progress, session.instruments, session.learner
    step, started = progress.step + 1, time.perf_counter()
    progress.is_between_steps = False
    try:
        with instruments.doing("generate"):
            items = lesson.take(step)
            batch = lesson.to_batch(items)
        learn_start = time.perf_counter()
        stats, numbers = None, dict(lesson.summarize(items))
        await session.folder.checkpoints.before_update()
        with instruments.doing("learn"), one_core():  # other threads compute the passes
            if batch.num_rows:
                stats = _text_stats(session, learner.update(batch, version=step - 1))
                instruments.record_update(batch)
            if lesson.validation is not None and lesson.measures_after(step, session.config.steps):
                measured = _text_stats(session, learner.measure(lesson.validation))
                numbers["validation_loss"] = measured.loss
                if measured.pairs is not None:
                    numbers["validation_accuracy"] = measured.pairs.accuracy
    except AgentGymError:
        progress.is_between_steps = True
        if progress.step:
            session.save()
        raise
    progress.add_step(time.perf_counter() - started)
    metrics = StepMetrics(
        step=step,
        update=stats,
        generate_s=learn_start - started,
        update_s=time.perf_counter() - learn_start,
        elapsed_s=progress.train_s,
        speed=instruments.lap(0),
        practice=numbers,
    )
    session.record_metrics(metrics, [])
    progress.random = random_states()
    progress.is_between_steps = True


def _text_stats(session: TrainingSession, stats: StepStats) -> StepStats:
    """Returns the statistics with the loss of the text alone, without that of the loads of experts."""
    if stats.router is None:
        return stats
    balance = balance_weight(session.learner.config, session.instruments.model.balance_coefficient)
    return replace(stats, loss=stats.loss - balance * stats.router.router_loss)
