"""What a training run shows while it goes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentgym.cli.terminal import say
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.metrics import StepMetrics
from agentgym.trajectory import Trajectory

__all__ = ["TrainingDisplay"]

COLUMNS = ("step", "success", "reward", "loss", "entropy", "grad", "dead", "failed", "calls lost", "play s", "learn s")
SERVER_COLUMNS = ("sync s", "mismatch")
"""With an engine that is a server: seconds of the weight update (part of `learn s`), and the largest difference of its
logprobs from ours, in nats."""
SHOWN_STEPS = 12
PHASES = {
    "compile": "compiling the engine's step (10 seconds the first time, 4 later)",
    "eval_before": "held-out play before training",
    "eval_after": "held-out play after training",
    "train": "training",
}


class TrainingDisplay:
    """An Observer of the trainer."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._envs = " and ".join(config.practice.mix) or config.env
        self._columns = COLUMNS if config.engine == "hf" else (*COLUMNS, *SERVER_COLUMNS)
        self._rows: list[list[str]] = []
        self._phase, self._played, self._total, self._won = "", 0, 0, 0
        self._live: Live | None = None
        if sys.stdout.isatty():
            self._live = Live(console=Console(highlight=False), refresh_per_second=4, transient=False)

    def __enter__(self) -> TrainingDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def on_phase(self, name: str, episodes: int) -> None:
        """A stage begins."""
        self._phase, self._played, self._total, self._won = PHASES.get(name, name), 0, episodes, 0
        if not self._live:
            what = f"{self._config.steps} steps of {episodes}" if name == "train" else str(episodes)
            say(f"{self._phase}: {what} episodes of {self._envs}" if episodes else self._phase)
            if name == "train":
                say("  ".join(self._columns))
        self._draw()

    def on_episode(self, trajectory: Trajectory) -> None:
        """An evaluation episode is finished."""
        self._played += 1
        self._won += bool(trajectory.success)
        if self._live:
            self._draw()
        elif self._played == self._total:
            say(f"  success {self._won / self._total:.3f}")

    def on_step(self, metrics: StepMetrics) -> None:
        """A step is recorded."""
        rollout, update = metrics.rollout, metrics.update
        numbers = [f"{update.loss:.4f}", f"{update.entropy:.3f}", f"{update.grad_norm:.2f}"] if update else ["-"] * 3
        row = [f"{metrics.step}/{self._config.steps}", f"{rollout.success:.3f}", f"{rollout.reward_mean:.3f}", *numbers]
        row += [f"{rollout.dead_groups}/{rollout.groups}", str(rollout.failed)]
        row += [str(rollout.failed_calls)]
        sync = metrics.sync
        row += [f"{metrics.generate_s:.1f}", f"{metrics.update_s:.1f}"]
        row += [f"{sync.gather_s + sync.transfer_s + sync.load_s:.1f}", f"{update.mismatch_max:.0e}" if update else "-"]
        self._rows.append(row)
        if not self._live:
            cells = zip(row, self._columns, strict=False)
            say("  ".join(cell.rjust(len(column)) for cell, column in cells))
        self._draw()

    def _draw(self) -> None:
        if not self._live:
            return
        title = f"{self._config.algo} on {self._envs}, seed {self._config.seed}   {self._folder}"
        table = Table(
            *self._columns, title=title, title_justify="left", caption=self._caption(), caption_justify="left"
        )
        for row in self._rows[-SHOWN_STEPS:]:
            table.add_row(*row[: len(self._columns)])
        self._live.update(table)

    def _caption(self) -> str:
        if self._phase == PHASES["train"] or not self._total:
            return self._phase
        won = f", success {self._won / self._played:.3f}" if self._played else ""
        return f"{self._phase}: {self._played}/{self._total}{won}"
