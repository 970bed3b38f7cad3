"""Traces of chosen steps, as `torch.profiler` writes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from agentgym.trainers.settings.speed import ProfileConfig

__all__ = ["traced"]

logger = logging.getLogger(__name__)


@contextmanager
def traced(config: ProfileConfig, step: int, folder: Path) -> Iterator[None]:
    """Around a step: writes its trace into the run folder where it is one of the chosen. What cannot be written is
    warned of."""
    if step not in config.steps:
        yield
        return
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    # Without it only the thread that begins the profile is in it, and the learner's and the engine's are others.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every_thread) as found:
        yield
    path = folder / "profile" / f"step-{step:06d}.json.gz"
    try:
        path.parent.mkdir(exist_ok=True)
        found.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        logger.warning("the trace of step %d could not be written to %s: %s", step, path, error)
    else:
        logger.warning("the trace of step %d is in %s: open it at https://ui.perfetto.dev", step, path)
