"""`agentgym export`: writes a checkpoint's model as a plain model folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from agentgym.chat_templates.families import renderer_for
from agentgym.cli.options import parse_options
from agentgym.cli.run_folder import own_code_options, settings_of_run
from agentgym.cli.terminal import say, show_json
from agentgym.loading import is_code_path

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes the model of a run or checkpoint, without the trainer's state, as a folder that transformers, SGLang and
    vLLM load. Trained adapters (LoRA) are merged into it."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, or one of its checkpoints."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The folder to write; it must not exist, or be empty."""
    step: int | None = None
    """The step whose checkpoint is written; by default the newest."""
    best: bool = False
    """Write the best checkpoint by `checkpoint.keep_best`."""
    adapter: bool = False
    """Write only the adapter of a run with learner.lora, as peft loads it onto the model that the run began with."""
    ema: bool = False
    """Write the average of the weights that a run with learner.ema_decay keeps; of adapters, with --adapter."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type of the weights in the files; training keeps them in float32."""
    trust_run_code: bool = False
    """Run the file or module that the run's `model_backend` names, which may do anything; read it first."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym export ...`."""
    options = parse_options(ExportOptions, args, prog="agentgym export")
    # Here, and not above: help and mistakes need no torch.
    from agentgym.trainers.checkpoints.export import export_adapter, export_model, find_checkpoint

    checkpoint = find_checkpoint(options.source, step=options.step, best=options.best)
    export = export_adapter if options.adapter else export_model
    trust = options.trust_run_code
    written = export(checkpoint, options.folder, dtype=options.dtype, average=options.ema, trust_run_code=trust)
    what = f"{'average of the ' if options.ema else ''}{'adapter' if options.adapter else 'model'}"
    say(f"{what} of step {written.step} ({written.dtype}): {options.folder}")
    if not options.adapter:
        settings = settings_of_run(checkpoint.path.resolve().parent.parent)
        family = str(settings.get("family") or "")
        own = own_code_options(family, str(settings.get("model_backend", "auto")))
        if family and not is_code_path(family) and renderer_for(options.folder).reply_format.name != family:
            own += f" --family {family}"
        if variables := settings.get("chat_template_kwargs"):
            words = (f"{name}={json.dumps(value)}" for name, value in variables.items())
            own += f" --chat-template-kwargs {shlex.join(words)}"
        say(f"try next: agentgym eval --env ID --policy {options.folder}{own}")
    if options.json:
        show_json({"folder": str(written.folder), "checkpoint": str(written.checkpoint), "step": written.step})
    return 0
