"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentgym.rollout.record.manifest import replacing
from agentgym.viewer.run_data import EvaluationPoint, JSONObject

__all__ = ["write_curve"]


def write_curve(metrics: Sequence[JSONObject], path: Path, evaluations: Sequence[EvaluationPoint] = ()) -> Path:
    """Draws success and reward against the optimizer step, evaluations as points, into the PNG `path`; returns it."""
    # Imported here, so that a program which needs the page alone does not wait for matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = (("success", "success", "#2563eb"), ("reward_mean", "reward", "#0d9488"))
    for axes, (key, title, colour) in zip(figure.subplots(1, 2), panels, strict=True):
        steps, values = _series(metrics, key)
        if values:
            axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
            axes.plot(steps, _smooth(values), color=colour, linewidth=2, label="train (smoothed)")
        for marker, phase in (("D", "eval_before"), ("o", "eval"), ("o", "eval_during"), ("*", "eval_after")):
            points = [point for point in evaluations if point.phase == phase]
            heights = [point.success if key == "success" else point.reward_mean for point in points]
            if points:
                label = phase.replace("_", " ")
                positions = [point.step for point in points]
                axes.scatter(positions, heights, marker=marker, s=60, color="#ea580c", zorder=3, label=label)
        if key == "success":
            axes.set_ylim(-0.03, 1.03)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    with replacing(path) as part:
        figure.savefig(part, metadata={"Software": None})
    return path


def _series(metrics: Sequence[JSONObject], key: str) -> tuple[list[float], list[float]]:
    pairs = [(record.get("step"), record.get(key)) for record in metrics]
    numbers = [(float(x), float(y)) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]
    return [x for x, _ in numbers], [y for _, y in numbers]


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average over about a twentieth of the curve, without the bias of its start."""
    keep = 1 - 1 / max(1.0, len(values) / 20)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total = keep * total + value
        weight = keep * weight + 1
        smoothed.append(total / weight)
    return smoothed
