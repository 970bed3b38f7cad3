"""One step of learning: credit the episodes, update the weights, publish them to the engine, record the step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from agentgym.engines.protocol import Engine, WeightSync
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.errors import TrainingHalted
from agentgym.trainers.batch.batch import build_batch
from agentgym.trainers.batch.credits import GroupCredit, credit_of_all
from agentgym.trainers.checkpoints.random_states import random_states
from agentgym.trainers.learner.finite import NotFinite, check_finite
from agentgym.trainers.learner.mismatch import MismatchFound
from agentgym.trainers.learner.objective import needs_all_rows
from agentgym.trainers.loop.session import TrainingSession, WeightPublisher
from agentgym.trainers.loop.step_credit import credit_step
from agentgym.trainers.monitoring.halt import HaltedStep
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.parallel.gradient_threads import one_core
from agentgym.trainers.tasks import StepGroups

__all__ = ["learn_step", "publish"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


async def learn_step(
    session: TrainingSession,
    groups: StepGroups,
    greedy: Mapping[str, float],
    *,
    started: float,
    played: float,
    evaluation: asyncio.Task[None] | None = None,
) -> None:
    """Learns from the groups of the next step, gives the engine the new weights, and records the step.

    `greedy` has the rewards of greedy episodes by group. `started` and `played` are the times at which playing began
    and ended. The engine is paused until it has the new weights, unless it plays meanwhile: steps ahead, or the
    `evaluation`, which has the weights of before.
    """
    config, learner, done = session.config, session.learner, session.progress.step
    session.progress.is_between_steps = False
    step = stats = critic = None
    num_steps = learner.num_steps
    is_beside = config.max_staleness > 0 or evaluation is not None
    with session.instruments.doing("learn"):
        await session.folder.checkpoints.before_update()
        if not is_beside:
            await session.engine.pause()
        try:
            with one_core():  # other threads compute the passes
                credits = await _call(is_beside, credit_step, groups.kept, config, learner, greedy, version=done)
                step = await _call(is_beside, _with_batch, session, groups, credits)
                if step.batch.num_rows:
                    if done >= config.learner.critic.warmup_steps:
                        update = partial(learner.update, step.batch, version=done, bound=session.gate.current_bound)
                        stats = await asyncio.to_thread(update) if is_beside else update()
                        if stats.stale_tokens < step.batch.num_trained_tokens:
                            session.gate.note(stats.mismatch_rms)
                        session.instruments.record_update(step.batch)
                        check_finite(await _call(is_beside, learner.logprobs, step.batch.select([0])))
                    critic = await _call(is_beside, learner.update_critic, step.batch)
        except TrainingHalted as halted:
            step = step or HaltedStep.without_credit(done + 1, groups.kept)
            await _leave_out(session, step, halted, is_whole=learner.num_steps == num_steps)
        waited_s = await _wait_for(evaluation)
        sync = await publish(session.engine, session.publisher, done + 1, is_paused=not is_beside)
    learned = time.perf_counter() - waited_s
    session.progress.add_step(learned - started)
    times = {"generate_s": played - started, "update_s": learned - played}
    await _record(session, groups, step.credits, {"update": stats, "critic": critic, "sync": sync, **times})


async def _wait_for(evaluation: asyncio.Task[None] | None) -> float:
    """Waits until the evaluation is played, and returns the seconds that this took."""
    if evaluation is None:
        return 0.0
    started = time.perf_counter()
    await evaluation
    return time.perf_counter() - started


async def _record(
    session: TrainingSession, groups: StepGroups, credits: Sequence[GroupCredit], update_metrics: Mapping[str, Any]
) -> None:
    """Records the step that was just learned, with its metrics, of which `update_metrics` are those of learning."""
    practice = await _finish_groups(session, groups, session.progress.step - 1)
    rollout = await session.record_episodes(groups.groups, credit_of_all(groups.groups, groups.kept, credits))
    metrics = StepMetrics(
        step=session.progress.step,
        rollout=rollout,
        elapsed_s=session.progress.train_s,
        speed=session.instruments.lap(rollout.trained_tokens),
        practice=practice,
        **update_metrics,
    )
    session.record_metrics(metrics, groups.groups)
    await session.gate.check(session.progress.step, session.progress.step)
    session.progress.random = random_states()
    session.progress.is_between_steps = True


async def _finish_groups(session: TrainingSession, groups: StepGroups, version: int) -> Mapping[str, float]:
    """Reports the groups to the source of their tasks, and returns the metrics of tasks and playing."""
    session.source.finish(session.progress.step, groups.groups)
    metrics = {**groups.metrics(), **session.source.metrics()}
    return {**metrics, **await session.player.metrics(groups.groups, version)}


async def _call(is_beside: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of `work`, called in another thread if sampling goes on meanwhile."""
    if is_beside:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


def _with_batch(session: TrainingSession, groups: StepGroups, credits: Sequence[GroupCredit]) -> HaltedStep:
    """Returns the step with its batch, as it is saved if its update fails."""
    config = session.config
    batch = build_batch(
        groups.kept,
        credits,
        aggregation=config.aggregation or "",
        norm_tokens=config.norm_tokens,
        drop_zero=not needs_all_rows(config.learner, session.instruments.model.balance_coefficient),
    )
    return HaltedStep(step=session.progress.step + 1, groups=groups.kept, credits=credits, batch=batch)


async def publish(engine: Engine, publisher: WeightPublisher, version: int, *, is_paused: bool = False) -> WeightSync:
    """Publishes the weights while the engine is paused, and resumes it.

    An engine that loads weights while it samples is not paused at all.
    """
    if not is_paused:
        if isinstance(engine, ReplicatedEngine) and engine.updates_running:
            return await publisher.publish(version)
        await engine.pause()
    sync = await publisher.publish(version)
    await engine.resume()
    return sync


async def _leave_out(session: TrainingSession, step: HaltedStep, halted: TrainingHalted, *, is_whole: bool) -> None:
    """Saves a halted step, and a checkpoint of the step before if the weights have not changed since (`is_whole`).

    Returns if the run goes on without the rest of the step; raises otherwise.
    """
    folder = await asyncio.to_thread(step.save, session.folder.path)
    message = f"{halted}. The step's episodes and its batch are in {folder}"
    done = session.progress.step
    if is_whole and done:
        session.save()
    if isinstance(halted, MismatchFound):
        logger.warning("%s", message)
        await session.engine.resume()
        await session.gate.refuse(halted, done, step.batch)
    if not is_whole:  # an optimizer step of this batch was taken, and may have destroyed the weights
        try:
            check_finite(session.learner.logprobs(step.batch.select([0])))
        except NotFinite as lost:
            raise NotFinite(f"{lost}. First seen as: {message}" if lost.args != halted.args else message) from halted
    if "nan" in session.config.collapse.stop_on:
        raise NotFinite(f"{message}. Without nan in collapse.stop_on, such a step is left out") from halted
    session.watch.add_symptom("nan", f"{message}; the step is left out")
