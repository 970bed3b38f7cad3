"""Every algorithm by kind and name, with its inputs, settings and source, as read from the functions themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentgym.settings.functions import settings_of
from agentgym.trainers.algorithms.advantages import ADVANTAGES
from agentgym.trainers.algorithms.aggregation import AGGREGATIONS
from agentgym.trainers.algorithms.corrections import CORRECTION_INPUTS, CORRECTIONS
from agentgym.trainers.algorithms.kl import KL_PENALTIES
from agentgym.trainers.algorithms.losses import LOSSES
from agentgym.trainers.algorithms.optimizers import OPTIMIZERS, SCHEDULES
from agentgym.trainers.algorithms.presets import PRESETS

__all__ = ["TABLES", "Algorithm", "AlgorithmTable", "all_algorithms"]


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """One kind of algorithm: `AlgorithmTable("advantage", "ADVANTAGES", ADVANTAGES, "--algo NAME")`."""

    kind: str
    variable: str
    """Its name in `agentgym.trainers`."""
    entries: Mapping[str, Callable[..., object]]
    option: str
    """The options of `train` that take its names."""


TABLES = (
    AlgorithmTable(
        "advantage",
        "ADVANTAGES",
        ADVANTAGES,
        "--algo NAME or --advantage.name NAME, with --advantage.settings SETTING=VALUE",
    ),
    AlgorithmTable("loss", "LOSSES", LOSSES, "--learner.loss NAME, with --learner.loss-settings SETTING=VALUE"),
    AlgorithmTable("kl", "KL_PENALTIES", KL_PENALTIES, "--learner.kl.penalty NAME, with --learner.kl.coefficient"),
    AlgorithmTable("aggregation", "AGGREGATIONS", AGGREGATIONS, "--aggregation NAME"),
    AlgorithmTable(
        "correction", "CORRECTIONS", CORRECTIONS, "--learner.correction NAME, with --learner.correction-settings"
    ),
    AlgorithmTable("optimizer", "OPTIMIZERS", OPTIMIZERS, "--optimizer.name NAME, with --optimizer.settings"),
    AlgorithmTable("schedule", "SCHEDULES", SCHEDULES, "--optimizer.decay NAME, with --optimizer.decay-settings"),
)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One function of a table, as its docstring and signature describe it."""

    kind: str
    name: str
    summary: str
    """The first paragraph of its docstring, on one line."""
    details: str
    """The other paragraphs: source, equation, differences."""
    inputs: tuple[str, ...]
    """The tensors that it takes."""
    settings: Mapping[str, object]
    """The defaults of its settings by name."""


def all_algorithms() -> list[Algorithm]:
    """Every preset and every entry of every table, those that a user added included."""
    presets = [
        Algorithm(
            kind="preset",
            name=name,
            summary=preset.summary,
            details="",
            inputs=(),
            settings=preset.command_line_settings(),
        )
        for name, preset in PRESETS.items()
    ]
    return presets + [_read(table, name, function) for table in TABLES for name, function in table.entries.items()]


def _read(table: AlgorithmTable, name: str, function: Callable[..., object]) -> Algorithm:
    settings = settings_of(function, CORRECTION_INPUTS)
    parameters = inspect.signature(function).parameters.values()
    inputs = [parameter for parameter in parameters if parameter.name not in settings]
    summary, _, details = (inspect.getdoc(function) or "").partition("\n\n")
    return Algorithm(
        kind=table.kind,
        name=name,
        summary=" ".join(summary.split()),
        details=details,
        inputs=tuple(parameter.name for parameter in inputs),
        settings=settings,
    )
