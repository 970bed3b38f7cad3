"""Traces of chosen steps, written by `torch.profiler`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from agentgym.rollout.record.manifest import replacing
from agentgym.trainers.settings.speed import ProfileConfig

__all__ = ["trace_step"]

logger = logging.getLogger(__name__)


@contextmanager
def trace_step(config: ProfileConfig, step: int, folder: Path) -> Iterator[None]:
    """Traces the step in the `with` statement, if it is chosen, and writes the trace into the run folder.

    Logs a warning if the trace cannot be written.
    """
    if step not in config.steps:
        yield
        return
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    # Without it the profile contains only the thread that starts it, and the learner and the engine have their own.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every_thread) as profiler:
        yield
    path = folder / "profile" / f"step-{step:06d}.json.gz"
    try:
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as part:
            profiler.export_chrome_trace(str(part))
    except (OSError, RuntimeError) as error:
        logger.warning("the trace of step %d could not be written to %s: %s", step, path, error)
    else:
        logger.warning("the trace of step %d is in %s: open it at https://ui.perfetto.dev", step, path)
