"""The tracker of TensorBoard: event files in the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from torch.utils.tensorboard import SummaryWriter

from agentgym.trainers.trackers.protocol import ShownEpisode, TrackedRun

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker:
    """Writes `tensorboard/` in the run folder: `tensorboard --logdir RUN` shows it.

    If a run is resumed, TensorBoard purges the steps that are played again.
    """

    def begin(self, run: TrackedRun) -> None:
        """Opens the event file."""
        folder = run.folder / "tensorboard"
        purge_step = run.step + 1 if folder.exists() else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._writer.add_text("config", _code(json.dumps(run.config, indent=2, default=dict)), run.step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a point of each metric's curve."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def episodes(self, step: int, sample: Sequence[ShownEpisode]) -> None:
        """Logs a text for each episode, in the order of the sample."""
        for number, episode in enumerate(sample):
            facts = dict(zip(episode.columns(), episode.cells, strict=True))
            prompt, replies = str(facts.pop("prompt")), str(facts.pop("replies"))
            facts_text = "  \n".join(f"{name}: {value}" for name, value in facts.items())
            self._writer.add_text(f"episodes/{number}", f"{facts_text}\n\n{_code(prompt)}\n\n{_code(replies)}", step)

    def finish(self) -> None:
        """Closes the event file."""
        self._writer.close()


def _code(text: str) -> str:
    """Returns the text as a Markdown code block: indented, because no text can end such a block."""
    return "\n".join(f"    {line}" for line in text.splitlines())
