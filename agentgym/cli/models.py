"""`agentgym models`: the architectures that train, and a check of a model before any training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import tyro

from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.chat_templates.template_folder import template_for
from agentgym.cli.display.tables import show_table
from agentgym.cli.groups import Subcommand, run_group
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.engines.server_kind import check_engine_name
from agentgym.errors import AgentGymError, ConfigError, nearest
from agentgym.loading import is_code_path
from agentgym.model.architectures import check_backend, refusal
from agentgym.model.decoder_config import folder_config
from agentgym.model.model_name import model_folder, names_model
from agentgym.trainers.model_check.findings import CheckResult, TemplateReport
from agentgym.trainers.model_check.known import known_models
from agentgym.types import JSON

__all__ = ["COMMANDS", "main"]

_BIG = 2 << 30
"""The bytes of safetensors from which a small model of the same shape is checked."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym models ...`."""
    return run_group("models", args, COMMANDS)


@dataclass(frozen=True, kw_only=True)
class ModelListOptions:
    """Shows the architectures that were checked, each as a small random model, and what does not work.

    Every other causal language model of transformers may train too: `agentgym models check FOLDER` says so of one.
    """

    json: bool = False
    """Print one line of JSON, and all else on standard error."""


@dataclass(frozen=True, kw_only=True)
class ModelCheckOptions:
    """Checks before any training that a model can be trained on exactly: its chat template, and what it computes.

    The tokenizer and its template are tried with a hundred adversarial conversations, in seconds. A property is `ok`,
    `FAILED` (training would be wrong), or `noted` (the template does not keep it, and what is trained is exact all the
    same). What the model computes is compared with transformers, in float32 on the CPU: logprobs, packed prefixes,
    gradients, samples, adapters, export, and a step of two ranks with that of one process. Exit code 1 if a check
    failed, 2 if there is nothing to check.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A model folder, a GGUF file, `embedded`, an id of the Hugging Face hub, or an architecture by its name. The
    template needs no weights, and of a config.json alone a small model of the same shape is computed."""
    only: Literal["template", "computation"] | None = None
    """The checks to make: of the `template`, which need no torch, or of the `computation`; None makes both."""
    chat_template: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = ""
    """A chat template that is used instead of the folder's: a file (Jinja), or qwen3, chatml, llama3, gemma3 or
    granite4."""
    family: Annotated[str | None, tyro.conf.arg(metavar="F")] = None
    """The format of the replies, of those that `agentgym tools families` shows, or path/to/file.py:name, a function
    `(tokenizer)` that returns a `TemplateRenderer`; by default the template's own."""
    model_backend: str = "auto"
    """The code that computes the model: `auto`, `fast`, `transformers`, or your own class, `path/to/file.py:Class`."""
    engine: str = "local"
    """A kind of server, `sglang` or `vllm`, that samples too: it is launched, compared with the learner before and
    after an update, and ended."""
    python: str = ""
    """The interpreter that has the server's library; empty is the one that runs agentgym."""
    small: bool = False
    """Compute a random model of the same shape with few layers and experts, as for folders over 2 GiB and those without
    weights."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def _list(args: Sequence[str]) -> int:
    options = parse_options(ModelListOptions, args, prog="agentgym models list")
    version, models = known_models()
    rows, reasons = [], []
    for model in models:
        failed = {name: result for name, (passed, result) in model.results.items() if not passed}
        loads, backend = model.results["loads"]
        is_own = "rows of their own" in model.results.get("prefix", (False, ""))[1]
        computed = [backend, "own" if is_own else "packed"] if loads else ["-", "-"]
        rows.append([model.architecture, *computed, model.family, ", ".join(failed) or "-"])
        reasons += [f"{model.architecture}, {name}: {result}" for name, result in failed.items()]
    show_table(["architecture", "computed by", "rows", "usual calls", "fails"], rows)
    for reason in reasons:
        say(reason)
    say(f"{len(models)} architectures, checked with transformers {version}")
    if options.json:
        stored: dict[str, JSON] = {model.architecture: _as_json(model.results) for model in models}
        show_json({"transformers": version, "models": stored})
    return 0


def _as_json(results: Mapping[str, tuple[bool, str]]) -> dict[str, JSON]:
    return {name: {"passed": passed, "found": result} for name, (passed, result) in results.items()}


def _check(args: Sequence[str]) -> int:
    options = parse_options(ModelCheckOptions, args, prog="agentgym models check")
    check_engine_name(options.engine)
    check_backend(options.model_backend, options.engine)
    if options.family is not None and not is_code_path(options.family):
        FORMATS[options.family]  # an unknown name is reported before anything is loaded
    name = options.model
    is_folder = names_model(name) or "/" in name or Path(name).is_dir()
    if not is_folder and options.only == "template":
        raise ConfigError(f"no model folder {name!r}: an architecture has no chat template to check")
    folder = model_folder(name) if is_folder else None
    has_config = folder is not None and (folder / "config.json").is_file()
    reason = refusal(folder_config(folder)) if folder is not None and has_config else None
    if reason is not None:
        say(f"transformers computes this model, not the fast decoder: {reason}")
    report = None if folder is None or options.only == "computation" else _check_template(folder, options)
    computes = options.only != "template" and (has_config or report is None)
    if not computes and options.only is None:
        say("what the model computes is not checked: the folder has no config.json")
    results = _check_computation(folder, options) if computes else []
    if options.json:
        template: JSON = None if report is None else report.to_json()
        computed: dict[str, JSON] = {result.name: result.to_json() for result in results}
        show_json({"refusal": reason, "template": template, **computed})
    return 0 if all(result.ok for result in results) and (report is None or report.ok) else 1


def _check_template(folder: Path, options: ModelCheckOptions) -> TemplateReport | None:
    """Shows what is found of a folder's tokenizer and chat template; None if it has none and none was asked for."""
    has_template_options = options.only or options.chat_template or options.family
    try:
        check_folder_template = import_module("agentgym.trainers.model_check.template").check_folder_template
        template = template_for(folder, options.chat_template) if options.chat_template else None
        report: TemplateReport = check_folder_template(folder, template, options.family)
    except AgentGymError as error:
        if has_template_options:
            raise
        say(f"the chat template is not checked: {error}")
        return None
    show_table(["property", "verdict", "what was found"], [result.row() for result in report.results])
    say(report.summary())
    return report


def _check_computation(folder: Path | None, options: ModelCheckOptions) -> list[CheckResult]:
    """Shows what is found of what a folder's model computes, or a small one of the architecture without a folder."""
    checks = import_module("agentgym.trainers.model_check.checks")
    results: list[CheckResult] = []
    with _computed_folder(folder, options) as computed:
        size = import_module("agentgym.model.model_folder").count_parameters(computed)
        say(f"{size / 1e6:,.1f} million parameters: up to {checks.memory_of_checks(size) / 1e9:.2g} GB of memory")
        _say_row("check", "verdict", "what was found")
        for result in checks.check_model(computed, options.model_backend):
            results.append(result)
            _say_row(*result.row())
        if options.engine != "local" and results[0].ok:
            check_on_server = import_module("agentgym.trainers.model_check.server_checks").check_on_server
            results.append(check_on_server(computed, options.engine, options.python))
            _say_row(*results[-1].row())
    say(f"{sum(result.ok for result in results)} of {len(results)} checks passed")
    return results


def _say_row(check: str, verdict: str, measurement: str) -> None:
    """Prints a row as soon as it is known: the checks of a large model take minutes."""
    say(f"{check:<12}{verdict:<9}{measurement}")


@contextmanager
def _computed_folder(folder: Path | None, options: ModelCheckOptions) -> Iterator[Path]:
    """Yields the folder to compute, which may hold a small model for the time of the check."""
    small_models = import_module("agentgym.trainers.model_check.small_models")
    if folder is None and options.model not in small_models.ARCHITECTURES:
        near = nearest(options.model, small_models.ARCHITECTURES)
        raise ConfigError(f"{options.model!r} is not a model folder, id or known architecture{near}")
    if folder is not None and not (options.small or _needs_small(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        if folder is None:
            small_models.save_small_model(options.model, Path(temporary))
        else:
            config = folder_config(folder)
            say("a small random model of the same shape is checked")
            own = options.model_backend if is_code_path(options.model_backend) else None
            small_models.save_small_model(small_models.shrink(config), Path(temporary), own)
        yield Path(temporary)


def _needs_small(folder: Path) -> bool:
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return not sizes or sum(sizes) > _BIG


COMMANDS = {
    "check": Subcommand("check a model, its chat template and what it computes, before any training", _check),
    "list": Subcommand("show the architectures that were checked", _list),
}
