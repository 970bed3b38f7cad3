"""`agentgym models`: the architectures that train, and a check of a model before any training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.cli.display.tables import show_table
from agentgym.cli.groups import Subcommand, run_group
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.engines.server_kind import check_engine_name
from agentgym.errors import ConfigError, nearest
from agentgym.loading import is_place
from agentgym.model.architectures import check_backend
from agentgym.model.model_name import EMBEDDED, model_folder
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
    """Checks a model against transformers: logprobs, packed prefixes, gradients, samples, adapters and export.

    A step of two ranks is compared with that of one process. In float32 on the CPU. Exit code 1 if a check failed, 2 if
    there is nothing to check.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A model folder (config.json alone is enough), an id of the Hugging Face hub, or an architecture by its name."""
    model_backend: str = "auto"
    """The code that computes the model: `auto`, `fast`, `transformers`, or your own class, `path/to/file.py:Class`."""
    engine: str = "local"
    """A kind of server, `sglang` or `vllm`, that samples too: it is launched, compared with the learner before and
    after an update, and ended."""
    python: str = ""
    """The interpreter that has the server's library; empty is the one that runs agentgym."""
    small: bool = False
    """Check a random model of the same shape with few layers and experts, as for folders over 2 GiB and those without
    weights."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def _list(args: Sequence[str]) -> int:
    options = parse_options(ModelListOptions, args, prog="agentgym models list")
    version, models = known_models()
    rows, reasons = [], []
    for model in models:
        failed = {name: found for name, (passed, found) in model.results.items() if not passed}
        loads, backend = model.results["loads"]
        is_own = "rows of their own" in model.results.get("prefix", (False, ""))[1]
        computed = [backend, "own" if is_own else "packed"] if loads else ["-", "-"]
        rows.append([model.architecture, *computed, model.family, ", ".join(failed) or "-"])
        reasons += [f"{model.architecture}, {name}: {found}" for name, found in failed.items()]
    show_table(["architecture", "computed by", "rows", "usual calls", "fails"], rows)
    for reason in reasons:
        say(reason)
    say(f"{len(models)} architectures, checked with transformers {version}")
    if options.json:
        stored: dict[str, JSON] = {model.architecture: _as_json(model.results) for model in models}
        show_json({"transformers": version, "models": stored})
    return 0


def _check(args: Sequence[str]) -> int:
    options = parse_options(ModelCheckOptions, args, prog="agentgym models check")
    check_engine_name(options.engine)
    check_backend(options.model_backend, options.engine)
    check_model = import_module("agentgym.trainers.model_check.checks").check_model
    with _folder(options) as folder:
        results = list(check_model(folder, options.model_backend))
        if options.engine != "local" and results[0].passed:
            check_on_server = import_module("agentgym.trainers.model_check.server_checks").check_on_server
            results.append(check_on_server(folder, options.engine, options.python))
    rows = [[result.name, "ok" if result.passed else "FAILED", result.found] for result in results]
    show_table(["check", "verdict", "what was found"], rows)
    failed = sum(not result.passed for result in results)
    say(f"{len(results) - failed} of {len(results)} checks passed")
    if options.json:
        show_json(_as_json({result.name: (result.passed, result.found) for result in results}))
    return 1 if failed else 0


def _as_json(results: Mapping[str, tuple[bool, str]]) -> dict[str, JSON]:
    return {name: {"passed": passed, "found": found} for name, (passed, found) in results.items()}


@contextmanager
def _folder(options: ModelCheckOptions) -> Iterator[Path]:
    """Yields the folder to check, which may hold a small model for the time of the check."""
    small_models = import_module("agentgym.trainers.model_check.small_models")
    name = options.model
    is_path = name == EMBEDDED or "/" in name or Path(name).is_dir()
    if not is_path and name not in small_models.ARCHITECTURES:
        near = nearest(name, small_models.ARCHITECTURES)
        raise ConfigError(f"{name!r} is no model folder, id or known architecture{near}")
    folder = model_folder(name) if is_path else None
    if folder is not None and not (options.small or _needs_small(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            small_models.save_small_model(name, Path(made))
        else:
            config = import_module("agentgym.model.decoder_config").folder_config(folder)
            say("a small random model of the same shape is checked")
            own = options.model_backend if is_place(options.model_backend) else None
            small_models.save_small_model(small_models.shrink(config), Path(made), own)
        yield Path(made)


def _needs_small(folder: Path) -> bool:
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return not sizes or sum(sizes) > _BIG


COMMANDS = {
    "check": Subcommand("compare a model with transformers, before any training", _check),
    "list": Subcommand("show the architectures that were checked", _list),
}
