"""The display of a running training: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentgym.cli.terminal import say, terminal_width
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.observer import PHASES
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.speed.step_speed import StepSpeed
from agentgym.trajectory import Trajectory

__all__ = ["TrainingDisplay"]

COLUMNS = (
    *"step success held-out reward loss left cut failed dead entropy grad".split(),
    "calls lost",
    "play s",
    "learn s",
    "sync s",
    *"mismatch sampled/s trained/s mfu bubble".split(),
)
"""The columns, the most important first: a narrow terminal shows as many as fit. `left` is the estimated time to the
last step, `cut` counts replies that a token limit ended, and `held-out` is the success of an evaluation before the step
(with eval.every)."""
SERVER_COLUMNS = ("sync s", "mismatch")
"""The columns for an engine that is a server: seconds of the weight update (part of `learn s`), and the largest
difference between its logprobs and ours, in nats."""
SPEED_COLUMNS = ("sampled/s", "trained/s", "mfu", "bubble")
"""The columns of speed: tokens a second, model flops utilization of learning, and the share of the step in which
neither engine nor learner worked."""
WIDTHS = {name: len(name) for name in COLUMNS} | {"step": 7, "loss": 7, "left": 6, "dead": 5}
"""The characters that a column is given at least."""
SHOWN_STEPS = 12
PLAIN_WIDTH = 1000
"""The characters of a plain line where there is no terminal and no COLUMNS: enough for every column."""


class TrainingDisplay:
    """An Observer of the trainer that shows its progress."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._envs = " and ".join(config.practice.mix) or config.env
        is_server = config.engine != "local"
        left_out = {*(() if is_server else SERVER_COLUMNS), *(() if config.eval.every else ("held-out",))}
        self._columns = [name for name in COLUMNS if name not in left_out]
        self._began = 0.0
        self._rows: list[dict[str, str]] = []
        self._phase, self._num_played, self._total, self._num_won = "", 0, 0, 0
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

    def follow(self, config: TrainConfig) -> None:
        """Takes the complete settings of the run, whose steps may be those of its epochs."""
        self._config = config

    def on_phase(self, name: str, episodes: int) -> None:
        """Shows that a phase begins."""
        self._phase, self._num_played, self._total, self._num_won = PHASES.get(name, name), 0, episodes, 0
        if name == "train" and self._began:  # it goes on after an evaluation
            return
        if name == "train":
            self._began = time.monotonic()
        if not self._live:
            what = f"{self._config.steps} steps of {episodes}" if name == "train" else str(episodes)
            say(f"{self._phase}: {what} episodes of {self._envs}" if episodes else self._phase)
            if name == "train":
                self._columns = self._fitting([], terminal_width(PLAIN_WIDTH), 2)
                say(_plain_line({name: name for name in self._columns}))
        elif name not in PHASES:
            say(name)  # above the table, where it stays: a server's address, its token
        self._draw()

    def on_episode(self, trajectory: Trajectory) -> None:
        """Counts a finished evaluation episode."""
        self._num_played += 1
        self._num_won += bool(trajectory.success)
        if self._live:
            self._draw()
        elif self._num_played == self._total:
            say(f"  success {self._num_won / self._total:.3f}")

    def on_step(self, metrics: StepMetrics) -> None:
        """Shows a step's row."""
        rollout, sync = metrics.rollout, metrics.sync
        assert rollout is not None and sync is not None, "a lesson has a display of its own"
        update = metrics.update if metrics.update and metrics.update.optimizer_steps else None
        row = {
            "step": f"{metrics.step}/{self._config.steps}",
            "success": f"{rollout.success:.3f}",
            "held-out": f"{metrics.held_out.success:.3f}" if metrics.held_out else "",
            "reward": f"{rollout.reward_mean:.3f}",
            "loss": f"{update.loss:.4f}" if update else "-",
            "left": self._time_left(metrics.step),
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
            say(_plain_line({name: row[name] for name in self._columns}))
        self._draw()

    def _draw(self) -> None:
        if not self._live:
            return
        last_rows = self._rows[-SHOWN_STEPS:]
        columns = self._fitting(last_rows, self._live.console.width, 3)
        title = f"{self._config.algo} on {self._envs}, seed {self._config.seed}   {self._folder}"
        table = Table(*columns, title=title, title_justify="left", caption=self._caption(), caption_justify="left")
        for row in last_rows:
            table.add_row(*(row[column] for column in columns))
        self._live.update(table)

    def _fitting(self, rows: Sequence[dict[str, str]], width: int, gap: int) -> list[str]:
        """Returns the columns that fit into a width with a gap after each; those up to `cut` always."""
        widths = [max([WIDTHS[name], *(len(row[name]) for row in rows)]) + gap for name in self._columns]
        num_fitting = sum(total < width for total in accumulate(widths))
        return self._columns[: max(self._columns.index("cut") + 1, num_fitting)]

    def _time_left(self, step: int) -> str:
        """Returns the time until the last step, or until `max_minutes` if that is sooner, at the mean speed so far."""
        used_s = time.monotonic() - self._began
        left_s = used_s / (len(self._rows) + 1) * (self._config.steps - step)
        if self._config.max_minutes is not None:
            left_s = min(left_s, max(0.0, self._config.max_minutes * 60 - used_s))
        minutes, seconds = divmod(round(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}h{minutes:02}m" if hours else f"{minutes}:{seconds:02}"

    def _caption(self) -> str:
        if self._phase == PHASES["train"] or not self._total:
            return self._phase
        won = f", success {self._num_won / self._num_played:.3f}" if self._num_played else ""
        return f"{self._phase}: {self._num_played}/{self._total}{won}"


def _plain_line(cells: Mapping[str, str]) -> str:
    return "  ".join(cell.rjust(WIDTHS[name]) for name, cell in cells.items())


def _speed_cells(speed: StepSpeed | None) -> dict[str, str]:
    """Returns a step's cells of `SPEED_COLUMNS`."""
    if speed is None:
        return dict.fromkeys(SPEED_COLUMNS, "-")
    rates = (speed.sampled_tokens_per_s, speed.trained_tokens_per_s)
    shares = (speed.mfu, speed.bubble)
    cells = [f"{rate:,.0f}" if rate is not None else "-" for rate in rates]
    cells += [f"{share:.0%}" if share is not None else "-" for share in shares]
    return dict(zip(SPEED_COLUMNS, cells, strict=True))
