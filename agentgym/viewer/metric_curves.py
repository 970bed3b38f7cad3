"""The curves of a run's metrics, and the symptoms of collapse in them, in the form of its pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentgym.types import JSON
from agentgym.viewer.run_data import JSONObject

__all__ = ["EVALUATED", "collapse_signs", "metric_curves"]

MAX_CURVE_POINTS = 2_000
EVALUATED = ("success", "reward_mean")
"""The curves that evaluations have points of."""
CURVES = (
    ("success", "Success"),
    ("reward_mean", "Reward"),
    ("loss", "Loss"),
    ("entropy", "Entropy"),
    ("kl", "KL"),
    ("grad_norm", "Gradient norm"),
    ("clip_fraction", "Clip fraction"),
    ("dead_group_share", "Dead-group share"),
    ("repeated_ngrams", "Repeated n-grams"),
    ("repeated_replies", "Repeated replies"),
    ("identical_episodes", "Identical episodes"),
    ("tool_calls_per_turn", "Tool calls / turn"),
    ("malformed_calls", "Malformed calls"),
    ("truncated_calls", "Truncated calls"),
    ("unknown_tools", "Unknown tools"),
    ("invalid_arguments", "Invalid arguments"),
    ("tool_faults", "Tool faults"),
    ("sampled_tokens_per_s", "Sampled / s"),
    ("trained_tokens_per_s", "Trained / s"),
    ("mfu", "MFU"),
    ("bubble", "Bubble"),
    ("staleness_mean", "Staleness, mean"),
    ("learner_wait_s", "Learner waits, s"),
)


def metric_curves(metrics: Sequence[JSONObject], evaluated: Collection[str]) -> JSON:
    """Returns `{"steps": [...], "series": [{"key", "title", "values", "extra"}]}`, thinned to `MAX_CURVE_POINTS`.

    Those that are `evaluated` are there without values too: evaluations are drawn into them.
    """
    stride = max(1, -(-len(metrics) // MAX_CURVE_POINTS))
    records = [record for position, record in enumerate(metrics) if (len(metrics) - 1 - position) % stride == 0]
    titles = dict(CURVES)
    others = sorted({key for record in records for key in record} - {*titles, "step", "elapsed_s"})
    series: list[JSON] = []
    for key, title in [*CURVES, *((key, key) for key in others)]:
        values = [_value(record, key) for record in records]
        if any(value is not None for value in values) or (records and key in evaluated):
            series.append({"key": key, "title": title, "values": values, "extra": key not in titles})
    return {"steps": [record.get("step", position) for position, record in enumerate(records)], "series": series}


def collapse_signs(metrics: Sequence[JSONObject]) -> list[JSON]:
    """Returns the symptoms of collapse in the run: `{"text", "step", "last"}`, with the steps that showed them."""
    last: dict[str, JSON] = {}
    reports: list[tuple[str, JSON]] = []
    for record in metrics:
        names, warnings, step = record.get("signs"), record.get("warnings"), record.get("step")
        last.update({str(name): step for name in names} if isinstance(names, list) else {})
        reports += [(str(text), step) for text in warnings] if isinstance(warnings, list) else []
    return [{"text": text, "step": step, "last": last.get(text.partition(":")[0], step)} for text, step in reports]


def _value(record: JSONObject, key: str) -> float | None:
    value = record.get(key)
    if key == "sampled_tokens_per_s" and value is None:
        tokens, seconds = record.get("trained_tokens"), record.get("generate_s")
        if isinstance(tokens, int | float) and isinstance(seconds, int | float) and seconds > 0:
            value = tokens / seconds
    return float(f"{value:.6g}") if isinstance(value, int | float) else None
