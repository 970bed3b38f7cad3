"""`agentgym doctor`: what is installed, what can run, and the command for what is missing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from agentgym.cli.advice import Advice, DoctorFindings, advice
from agentgym.cli.installation import (
    DISTRIBUTION,
    installed_version,
    is_importable,
    requirements,
    server_libraries,
    torch_build,
    unfit,
)
from agentgym.cli.machine import docker, gpus, machine
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json, show_table
from agentgym.engines.local.cpp_compiler import cpp_compiler
from agentgym.errors import AgentGymError
from agentgym.evaluation.play.model_folder import EMBEDDED, model_folder
from agentgym.model.architectures import SUPPORTED
from agentgym.tools.sandbox import sandbox_faults
from agentgym.types import JSON

__all__ = ["main"]

OTHERS = {
    "ray": "training in many processes: --executor ray",
    "math-verify": "Math-v0, and the reward `math`",
    "mcp": "tools of MCP servers",
    "docker": "containers: sandbox --backend docker, DockerEnv",
    "reasoning-gym": "environments reasoning_gym/...",
    "textarena": "environments textarena/...",
    "gem-llm": "environments gem/...",
}
"""Distributions that only one part needs, and that part."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Shows versions, what is usable here, and the exact command for what is missing or does not fit.

    Exit code 1 if something that agentgym needs is missing, or if two libraries do not fit together.
    """

    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym doctor ...`."""
    options = parse_options(DoctorOptions, args, prog="agentgym doctor")
    found = _examine()
    todo = advice(found)
    engines, boxes = _engines(found), sandbox_faults()
    show_table(["part", "version", "for"], _library_rows(found))
    show_table(["engine", "usable", "how"], [[name, "yes" if ok else "no", how] for name, (ok, how) in engines.items()])
    show_table(["machine", ""], _machine_rows(found))
    show_table(["sandbox", "usable", "what it lacks"], _sandbox_rows(boxes))
    for item in todo:
        say(str(item))
    if not any(item.kind != "optional" for item in todo):
        say("nothing that is needed is missing" if todo else "nothing is missing")
    ok = all(item.kind == "optional" for item in todo)
    if options.json:
        usable: list[JSON] = [name for name, fault in boxes.items() if fault is None]
        show_json({**_report(found, engines, todo, ok), "sandboxes": usable})
    return 0 if ok else 1


def _examine() -> DoctorFindings:
    missing = [name for name in requirements() if installed_version(name) is None]
    untrained = [name for name in requirements("train") if installed_version(name) is None or not is_importable(name)]
    return DoctorFindings(
        missing=missing,
        missing_for_training=untrained,
        torch=None if "torch" in untrained else torch_build(),
        unfit=unfit(),
        servers=server_libraries(),
        model_error=_model_error(),
        compiler=cpp_compiler(),
        docker=docker(),
        gpus=gpus(),
        machine=machine(),
    )


def _model_error() -> str | None:
    """Returns the fault of the embedded model, or None."""
    try:
        folder = model_folder(EMBEDDED)
    except AgentGymError as error:
        return str(error)
    return None if list(folder.glob("*.safetensors")) else f"the embedded model in {folder} holds no weights"


def _engines(found: DoctorFindings) -> dict[str, tuple[bool, str]]:
    """Returns for each engine whether it can be used now, and how."""
    trains = not found.missing_for_training and found.torch is not None and found.torch.error is None
    where = "on GPU" if found.torch is not None and found.torch.num_gpus else "on CPU"
    engines = {
        "scripted": (True, "the oracle, cheat and random policies"),
        "openai": (True, "any server of chat completions: eval --policy URL"),
        "local": (trains, f"in process, {where}: {SUPPORTED}" if trains else "needs torch"),
    }
    for name in ("sglang", "vllm"):
        pythons = [f"{library.version} by {library.python}" for library in found.servers if library.engine == name]
        attach = (
            f"a running server: --{name}.urls URL" if trains else "needs torch to train; a server: eval --policy URL"
        )
        engines[name] = (trains, "; ".join([attach, *pythons]) if pythons else f"{attach}; none to launch here")
    return engines


def _library_rows(found: DoctorFindings) -> list[list[str]]:
    torch = found.torch
    built = "" if torch is None else f", CUDA {torch.cuda or 'none'}, {torch.num_gpus} GPUs"
    purpose = "training, and models in evaluation"
    rows = [
        ["python", platform.python_version(), sys.executable],
        [DISTRIBUTION, _version_or_missing(DISTRIBUTION), ""],
    ]
    rows += [[name, _version_or_missing(name), ""] for name in requirements()]
    absent = found.missing_for_training
    for name in requirements("train"):
        rows.append(
            [name, "missing" if name in absent else _version_or_missing(name) + built * (name == "torch"), purpose]
        )
    rows += [[name, _version_or_missing(name), purpose] for name, purpose in OTHERS.items()]
    rows += [[library.engine, library.version, library.python] for library in found.servers]
    rows += [["embedded model", "there" if found.model_error is None else "missing", found.model_error or ""]]
    rows += [["C++ compiler", found.compiler or "missing", "faster sampling from small models on CPU; not needed"]]
    daemon = f"daemon {found.docker.server}" if found.docker.server else "no daemon answers"
    return [*rows, ["docker command", found.docker.client or "missing", daemon if found.docker.client else ""]]


def _version_or_missing(name: str) -> str:
    return installed_version(name) or "missing"


def _machine_rows(found: DoctorFindings) -> list[list[str]]:
    size = found.machine
    rows = [["system", size.system], ["cores", str(size.num_cores)], ["memory", f"{size.memory_gib:.1f} GiB"]]
    if size.shared_memory_gib is not None:
        rows.append(["shared memory", f"{size.shared_memory_gib:.1f} GiB"])
    rows.append(["open files", "no limit" if size.open_files < 0 else str(size.open_files)])
    rows += [["GPU", f"{gpu.name}, {gpu.memory_gib:.0f} GiB, driver {gpu.driver}"] for gpu in found.gpus]
    return rows if found.gpus else [*rows, ["GPU", "none"]]


def _sandbox_rows(boxes: Mapping[str, str | None]) -> list[list[str]]:
    """Returns a row for each kind of sandbox, in the order of preference; tools that run code take the first usable."""
    return [[name, "yes" if fault is None else "no", fault or ""] for name, fault in boxes.items()]


def _report(
    found: DoctorFindings, engines: dict[str, tuple[bool, str]], todo: Sequence[Advice], ok: bool
) -> dict[str, JSON]:
    absent = found.missing_for_training
    names = (DISTRIBUTION, *requirements(), *requirements("train"), *OTHERS)
    versions: dict[str, JSON] = {name: None if name in absent else installed_version(name) for name in names}
    versions.update({library.engine: library.version for library in found.servers})
    return {
        "ok": ok,
        "versions": {"python": platform.python_version(), **versions},
        "engines": [name for name, (usable, _) in engines.items() if usable],
        "torch": None if found.torch is None else asdict(found.torch),
        "servers": [asdict(library) for library in found.servers],
        "gpus": [asdict(gpu) for gpu in found.gpus],
        "machine": asdict(found.machine),
        "docker": asdict(found.docker),
        "compiler": found.compiler,
        "model": found.model_error is None,
        "fixes": [asdict(item) for item in todo],
    }
