"""What a training run shows while it goes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentgym.cli.terminal import say
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.speed.step_speed import StepSpeed
from agentgym.trajectory import Trajectory

__all__ = ["TrainingDisplay"]

COLUMNS = (
    *("step", "success", "reward", "loss", "entropy", "grad", "dead", "failed", "cut", "calls lost"),
    *("play s", "learn s"),
)
"""`cut` counts replies that a limit of tokens ended."""
SERVER_COLUMNS = ("sync s", "mismatch")
"""With an engine that is a server: seconds of the weight update (part of `learn s`), and the largest difference of its
logprobs from ours, in nats."""
SPEED_COLUMNS = ("sampled/s", "trained/s", "mfu", "bubble")
"""Tokens a second, model flops utilization of learning, and the share of the step in which
neither engine nor learner worked. On a terminal they are shown where it is wide enough."""
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
        self._columns = COLUMNS if config.engine == "local" else (*COLUMNS, *SERVER_COLUMNS)
        self._rows: list[dict[str, str]] = []
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
                say("  ".join([*self._columns, *SPEED_COLUMNS]))
        elif name not in PHASES:
            say(name)  # above the table, where it stays: a server's address, its token
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
        rollout, update, sync = metrics.rollout, metrics.update, metrics.sync
        row = {
            "step": f"{metrics.step}/{self._config.steps}",
            "success": f"{rollout.success:.3f}",
            "reward": f"{rollout.reward_mean:.3f}",
            "loss": f"{update.loss:.4f}" if update else "-",
            "entropy": f"{update.entropy:.3f}" if update else "-",
            "grad": f"{update.grad_norm:.2f}" if update else "-",
            "dead": f"{rollout.dead_groups}/{rollout.groups}",
            "failed": str(rollout.failed),
            "cut": str(rollout.replies_cut),
            "calls lost": str(rollout.lost_calls),
            "play s": f"{metrics.generate_s:.1f}",
            "learn s": f"{metrics.update_s:.1f}",
            "sync s": f"{sync.gather_s + sync.transfer_s + sync.load_s:.1f}",
            "mismatch": f"{update.mismatch_max:.0e}" if update else "-",
            **_speed_cells(metrics.speed),
        }
        self._rows.append(row)
        if not self._live:
            say("  ".join(row[column].rjust(len(column)) for column in (*self._columns, *SPEED_COLUMNS)))
        self._draw()

    def _draw(self) -> None:
        if not self._live:
            return
        shown = self._rows[-SHOWN_STEPS:]
        columns = self._fitting(shown, self._live.console.width)
        title = f"{self._config.algo} on {self._envs}, seed {self._config.seed}   {self._folder}"
        table = Table(*columns, title=title, title_justify="left", caption=self._caption(), caption_justify="left")
        for row in shown:
            table.add_row(*(row[column] for column in columns))
        self._live.update(table)

    def _fitting(self, rows: Sequence[dict[str, str]], width: int) -> list[str]:
        """The columns, with those of speed as far as there is room."""
        columns = [*self._columns]
        for column in SPEED_COLUMNS:
            widths = [max(len(one), *(len(row[one]) for row in rows), 0) for one in (*columns, column)]
            if sum(widths) + 3 * len(widths) + 1 <= width:
                columns.append(column)
        return columns

    def _caption(self) -> str:
        if self._phase == PHASES["train"] or not self._total:
            return self._phase
        won = f", success {self._won / self._played:.3f}" if self._played else ""
        return f"{self._phase}: {self._played}/{self._total}{won}"


def _speed_cells(speed: StepSpeed | None) -> dict[str, str]:
    """A step's cells of `SPEED_COLUMNS`."""
    if speed is None:
        return dict.fromkeys(SPEED_COLUMNS, "-")
    rates = (speed.sampled_tokens_per_s, speed.trained_tokens_per_s)
    shares = (speed.mfu, speed.bubble)
    cells = [f"{one:,.0f}" if one is not None else "-" for one in rates]
    cells += [f"{one:.0%}" if one is not None else "-" for one in shares]
    return dict(zip(SPEED_COLUMNS, cells, strict=True))
