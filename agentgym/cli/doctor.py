"""`agentgym doctor`: what is installed, what can run, and the command for what is missing."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json, show_table
from agentgym.engines.compiler import cpp_compiler
from agentgym.errors import AgentGymError
from agentgym.evaluation.model_folder import EMBEDDED, model_folder
from agentgym.types import JSON

__all__ = ["main"]

NEEDED = (
    "gymnasium",
    "jinja2",
    "jsonschema",
    "matplotlib",
    "numpy",
    "pyyaml",
    "rich",
    "tokenizers",
    "transformers",
    "tyro",
)
TRAINING = ("torch", "safetensors")
DISTRIBUTION = "agentgym-llm"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Shows versions, usable engines, and the exact command for what is missing; exit code 1 if something needed is."""

    json: bool = False
    """End with one line of JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym doctor ...`."""
    options = parse_options(DoctorOptions, args, prog="agentgym doctor")
    versions = {name: _version(name) for name in (DISTRIBUTION, *NEEDED, *TRAINING)}
    model, compiler = _embedded_model(), cpp_compiler()
    fixes = _fixes(versions, model)
    rows = [["python", platform.python_version(), sys.executable]]
    rows += [[name, found or "missing", _purpose(name)] for name, found in versions.items()]
    rows += [["embedded model", "there" if model is None else "missing", model or ""]]
    rows += [["C++ compiler", compiler or "missing", "faster sampling from small models on CPU; not needed"]]
    show_table(["part", "version", "for"], rows)
    engines = ["scripted", *(["hf"] if _has_torch() else [])]
    say(f"engines: {', '.join(engines)}")
    for fix in fixes:
        say(f"to do: {fix}")
    broken = [name for name in NEEDED if versions[name] is None]
    if not fixes:
        say("nothing is missing")
    if options.json:
        found: dict[str, JSON] = {"python": platform.python_version(), **versions}
        show_json({"ok": not broken, "versions": found, "engines": engines, "compiler": compiler, "fixes": fixes})
    return 1 if broken else 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _has_torch() -> bool:
    return all(find_spec(name) is not None for name in TRAINING)


def _purpose(name: str) -> str:
    return "training, and models in evaluation" if name in TRAINING else ""


def _embedded_model() -> str | None:
    """What is wrong with the embedded model, if anything."""
    try:
        folder = model_folder(EMBEDDED)
    except AgentGymError as error:
        return str(error)
    return None if list(folder.glob("*.safetensors")) else f"{folder} holds no weights"


def _fixes(versions: dict[str, str | None], model: str | None) -> list[str]:
    """The commands that put right what is missing."""
    missing = [name for name in NEEDED if versions[name] is None]
    fixes = [f"{_install(missing)}   # nothing runs without"] if missing else []
    if not _has_torch():
        fixes.append(f"{_install(TRAINING)}   # to train, and to evaluate models")
    if model is not None:
        fixes.append("install agentgym again: its embedded model is not there")
    return fixes


def _install(names: Sequence[str]) -> str:
    """The command that installs the versions that agentgym asks for."""
    wanted = {}
    for requirement in requires(DISTRIBUTION) or ():
        specifier = requirement.partition(";")[0].strip()
        wanted[re.split(r"[^A-Za-z0-9_.-]", specifier, maxsplit=1)[0].lower()] = specifier
    return f"pip install {shlex.join(wanted.get(name, name) for name in names)}"
