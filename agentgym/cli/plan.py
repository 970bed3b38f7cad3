"""`agentgym plan`: predicts what a run needs and how fast it is, before there is a machine for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.cli.options import parse_options
from agentgym.cli.terminal import fail, say, show_json, show_table
from agentgym.trainers.planning.config import MeasureSpec, PlanConfig
from agentgym.trainers.planning.layout import GIB, GpuLayout, best_layout, layouts, what_would_fit
from agentgym.trainers.planning.measured import Measured, fitted_rates, read_measured, write_measured
from agentgym.trainers.planning.rates import ASSUMED, Rates, RatesSpec, device_of
from agentgym.trainers.planning.shapes import shape_of
from agentgym.trainers.planning.timing import PlannedMachine
from agentgym.types import JSON

__all__ = ["main"]

SHOWN = 6
"""The most splits in a table."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Predicts memory, seconds of a step and the best split of the GPUs, from published figures and measured ones.

    Exit code 1 if something does not fit; what would fit is then shown.
    """

    run: Annotated[PlanConfig, tyro.conf.arg(name="")]
    rates: RatesSpec = field(default_factory=RatesSpec)
    measured: Path | None = None
    """Figures of one device, as --measure writes them."""
    measure: Path | None = None
    """Measure --model on this machine, write the figures to this file, and stop."""
    measuring: MeasureSpec = field(default_factory=MeasureSpec)
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym plan ...`."""
    options = parse_options(PlanOptions, _gpu_as_option(args), prog="agentgym plan")
    if options.measure is not None:
        return _measure(options, options.measure)
    config = options.run
    measured = read_measured(options.measured) if options.measured else None
    rates = (fitted_rates(measured) if measured else ASSUMED).with_overrides(options.rates)
    device = device_of(config.gpu, config.learner, measured.gpu if measured else None)
    machine = PlannedMachine(shape=shape_of(config.model), device=device, rates=rates)
    best = best_layout(machine, config)
    advice = what_would_fit(machine, config) if best.problems else []
    _show(machine, config, best)
    _show_rates(rates, options.measured)
    for problem in best.problems:
        fail(problem)
    if best.problems:
        fail(f"what would fit: {'; or '.join(advice)}" if advice else "nothing near would fit: take a smaller --model")
    if options.json:
        show_json(_as_json(machine, best, advice))
    return 1 if best.problems else 0


def _gpu_as_option(args: Sequence[str]) -> list[str]:
    """Reads `--gpu h200` as `--gpu.name h200`."""
    return [f"--gpu.name{arg[5:]}" if arg.partition("=")[0] == "--gpu" else arg for arg in args]


def _measure(options: PlanOptions, path: Path) -> int:
    module = import_module("agentgym.trainers.planning.measure")  # torch is needed for this alone
    measured: Measured = module.measure(
        shape_of(options.run.model),
        options.measuring,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
    )
    write_measured(measured, path)
    rows = [
        [
            sample.what,
            sample.model.name,
            f"{sample.rows:,} x {sample.context:,}",
            f"{sample.seconds * 1e3:,.2f}",
            f"{(sample.rows if sample.what == 'decode' else sample.rows * sample.context) / sample.seconds:,.0f}",
            f"{sample.flops / sample.seconds / 1e9:,.1f}",
        ]
        for sample in measured.samples
    ]
    show_table(["work", "model", "rows x tokens", "ms", "tokens/s", "GFLOP/s"], rows)
    _show_rates(fitted_rates(measured), path)
    say(f"figures of {measured.gpu.name}: {path}")
    say(f"try next: agentgym plan --model {options.run.model} --measured {path}")
    if options.json:
        show_json({"file": str(path), "gpu": asdict(measured.gpu), "rates": _rates_json(fitted_rates(measured))})
    return 0


def _show(machine: PlannedMachine, config: PlanConfig, best: GpuLayout) -> None:
    shape, device = machine.shape, machine.device
    if shape.refusal:
        say(f"note: agentgym does not train this model yet: {shape.refusal}")
    say(
        f"{shape.name}: {shape.num_parameters:,} parameters, {shape.kv_floats * config.engine.cache_bytes / 1024:,.0f}"
        f" KiB of keys and values a token; {config.gpus} x {device.name}, {device.memory / GIB:,.0f} GiB each"
    )
    rows = [[f"learner: {name}", _gib(size)] for name, size in best.learner_memory.parts.items()]
    rows.append(["learner, at the largest", _gib(best.learner_memory.total)])
    engine = best.engine_memory
    rows += [
        ["engine: weights", _gib(engine.weights)],
        ["engine: keys and values", f"{_gib(max(0.0, engine.cache))}: {best.sequences:,} whole episodes"],
    ]
    show_table(["memory of a GPU", "GiB"], rows)
    show_table(
        ["split", "learn", "engines", "play s", "learn s", "weights s", "step s", "who waits"],
        _splits(machine, config, best),
    )
    if best.generation is None:
        return
    show_table(["a step", "", ""], _step_rows(config, best))


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size < 10 * GIB else f"{size / GIB:,.1f}"


def _splits(machine: PlannedMachine, config: PlanConfig, best: GpuLayout) -> list[list[str]]:
    """Returns rows of the best split, and of those next to it in time: the best of each number of learners."""
    found: dict[tuple[str, int], GpuLayout] = {}
    for layout in layouts(machine, config):
        key = (layout.kind, layout.learners)
        if not layout.problems and (key not in found or layout.step_s < found[key].step_s):
            found[key] = layout
    ranked = sorted(found.values(), key=lambda layout: layout.step_s)[:SHOWN]
    return [_split(layout) for layout in ranked or [best]]


def _split(layout: GpuLayout) -> list[str]:
    play = f"{layout.generation.seconds:,.2f}" if layout.generation else "-"
    if not layout.overlaps:
        waits = "each for the other"
    else:
        waits = "learners" if layout.balance > 1 else "engines"
        waits += f", {abs(1 - min(layout.balance, 1 / layout.balance)):.0%} of the time"
    engines = f"{layout.engines} x {layout.engine_gpus} GPU" + ("s" if layout.engine_gpus > 1 else "")
    step = f"{layout.step_s:,.2f}" if layout.generation else "-"
    return [
        layout.kind,
        f"{layout.learners}",
        engines,
        play,
        f"{layout.learning.seconds:,.2f}",
        f"{layout.sync_s:,.2f}",
        step,
        waits,
    ]


def _step_rows(config: PlanConfig, best: GpuLayout) -> list[list[str]]:
    play, learn = best.generation, best.learning
    assert play is not None
    bound = "computing" if learn.compute_s >= learn.exchange_s else "exchanging weights and gradients"
    sampled = config.episodes * config.episode.sampled_tokens
    rows = [
        ["episodes/s", f"{config.episodes / best.step_s:,.2f}", f"{config.episodes:,} a step"],
        ["trained tokens/s", f"{sampled / best.step_s:,.0f}", f"{sampled:,} a step"],
        [
            "sampled tokens/s",
            f"{play.tokens_per_s:,.0f}",
            f"while playing; {play.batch:,.1f} requests at once in each engine",
        ],
        ["seconds of an episode", f"{play.episode_s:,.2f}", f"{play.live:,.0f} live at once"],
        ["waiting for the longest", f"{play.tail_s:,.2f}", "seconds of playing"],
        ["micro-batches", f"{learn.micro_batches:,}", f"of each learner GPU, which is bound by {bound}"],
        [
            "tokens learned from",
            f"{learn.packed_tokens:,.0f}",
            f"of which {learn.computed_tokens:,.0f} are computed: prompts are shared",
        ],
    ]
    if best.overlaps:
        age = min(float(config.max_staleness), play.episode_s / best.step_s)
        rows.append(["updates in an episode", f"{age:,.1f}", f"of at most {config.max_staleness}"])
    return rows


def _show_rates(rates: Rates, path: Path | None) -> None:
    """Shows the speeds that were measured or given, and those that are assumed."""
    if sure := {name: rate for name, rate in _rates_json(rates).items() if name not in rates.assumed}:
        source = f"measured ({path}) or given" if path else "given"
        say(f"{source}: {', '.join(f'{name} {rate:.3g}' for name, rate in sure.items())}")
    if rates.assumed:
        rates_text = ", ".join(f"{name} {getattr(rates, name):g}" for name in rates.assumed)
        say(f"assumed: {rates_text}; --rates.NAME gives another, --measure FILE measures")


def _rates_json(rates: Rates) -> dict[str, float]:
    return {name: round(float(value), 6) for name, value in asdict(rates).items() if name != "assumed"}


def _as_json(machine: PlannedMachine, best: GpuLayout, advice: Sequence[str]) -> dict[str, JSON]:
    learn, play = best.learning, best.generation
    return {
        "model": machine.shape.name,
        "parameters": machine.shape.num_parameters,
        "refusal": machine.shape.refusal or None,
        "gpu": machine.device.name,
        "fits": not best.problems,
        "problems": list(best.problems),
        "would_fit": list(advice),
        "layout": best.kind,
        "learner_gpus": best.learners,
        "engines": best.engines,
        "engine_gpus": best.engine_gpus,
        "learner_memory_gib": {name: round(size / GIB, 4) for name, size in best.learner_memory.parts.items()},
        "learner_total_gib": round(best.learner_memory.total / GIB, 4),
        "engine_weights_gib": round(best.engine_memory.weights / GIB, 4),
        "engine_cache_gib": round(best.engine_memory.cache / GIB, 4),
        "engine_sequences": best.sequences,
        "step_s": round(best.step_s, 6) if play else None,
        "generate_s": round(play.seconds, 6) if play else None,
        "learn_s": round(learn.seconds, 6),
        "sync_s": round(best.sync_s, 6),
        "sampled_tokens_per_s": round(play.tokens_per_s, 3) if play else None,
        "micro_batches": learn.micro_batches,
        "rates": _rates_json(machine.rates),
        "assumed": list(machine.rates.assumed),
    }
