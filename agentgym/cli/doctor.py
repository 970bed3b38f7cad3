"""`agentgym doctor`: what is installed, what can run, and the command for what is missing."""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from agentgym.cli.display.installed_agents import agent_rows, installed_agents
from agentgym.cli.display.tables import show_table
from agentgym.cli.installation import (
    DISTRIBUTION,
    ServerLibrary,
    TorchBuild,
    Unfit,
    engine_home,
    installed_version,
    is_importable,
    pip_install,
    requirements,
    server_libraries,
    torch_build,
    unfit,
)
from agentgym.cli.machine import Docker, Gpu, Machine, docker, gpus, machine
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.embedded import EMBEDDED
from agentgym.engines.local.kernels.cpp_compiler import cpp_compiler
from agentgym.engines.server_kind import SERVERS
from agentgym.errors import AgentGymError
from agentgym.model.architectures import SUPPORTED
from agentgym.model.model_name import model_folder
from agentgym.tools.sandbox import sandbox_faults
from agentgym.types import JSON

__all__ = ["TESTED_TORCH", "main"]

TESTED_TORCH = "2.13.0"
"""Exact, as a range would let pip take the newest, whose engines and kernels are untested with agentgym."""
FEW_FILES = 1024  # the usual limit of Linux; an episode on a server holds a file
SMALL_SHARED_GIB = 1.0  # a container has 64 MiB by default; engines on several GPUs need more

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
class Advice:
    """One thing to do: `Advice(kind="optional", what="no C++ compiler", command="apt-get install g++", why="...")`."""

    kind: Literal["needed", "mismatch", "optional"]
    what: str
    """The part that is missing or wrong."""
    command: str | None
    """The exact command; None if only the user can decide or do it."""
    why: str
    """The purpose of the part, or what else can be done."""

    def __str__(self) -> str:
        text = f"{self.kind}: {self.what} ({self.why})"
        return text if self.command is None else f"{text}\n    {self.command}"


@dataclass(frozen=True, kw_only=True)
class DoctorFindings:
    """The findings that advice is based on."""

    missing: Sequence[str]
    """Distributions that agentgym needs and that are not installed."""
    missing_for_training: Sequence[str]
    torch: TorchBuild | None
    """The installed torch; None if it is missing."""
    unfit: Sequence[Unfit]
    servers: Sequence[ServerLibrary]
    model_error: str | None
    """The fault of the embedded model, if any."""
    compiler: str | None
    docker: Docker
    gpus: Sequence[Gpu]
    machine: Machine


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
    findings = _examine()
    todo = _advise(findings)
    engines, boxes = _engines(findings), sandbox_faults()
    show_table(["part", "version", "for"], _library_rows(findings))
    show_table(["engine", "usable", "how"], [[name, "yes" if ok else "no", how] for name, (ok, how) in engines.items()])
    show_table(["machine", ""], _machine_rows(findings))
    agents = installed_agents()
    show_table(["agent", "version", ""], agent_rows(agents))
    show_table(["sandbox", "usable", "what it lacks"], _sandbox_rows(boxes))
    for item in todo:
        say(str(item))
    if not any(item.kind != "optional" for item in todo):
        say("nothing that is needed is missing" if todo else "nothing is missing")
    ok = all(item.kind == "optional" for item in todo)
    if options.json:
        usable: list[JSON] = [name for name, fault in boxes.items() if fault is None]
        show_json({**_report(findings, engines, todo, ok), "sandboxes": usable, "agents": agents})
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


def _engines(findings: DoctorFindings) -> dict[str, tuple[bool, str]]:
    """Returns for each engine whether it can be used now, and how."""
    trains = not findings.missing_for_training and findings.torch is not None and findings.torch.error is None
    where = "on GPU" if findings.torch is not None and findings.torch.num_gpus else "on CPU"
    engines = {
        "scripted": (True, "the oracle, cheat and random policies"),
        "openai": (True, "any server of chat completions: eval --policy URL"),
        "local": (trains, f"in process, {where}: {SUPPORTED}; others by transformers" if trains else "needs torch"),
    }
    for name in SERVERS:
        pythons = [f"{library.version} by {library.python}" for library in findings.servers if library.engine == name]
        attach = (
            f"a running server: --engine {name} --server.urls URL"
            if trains
            else "needs torch to train; a server: eval --policy URL"
        )
        engines[name] = (trains, "; ".join([attach, *pythons]) if pythons else f"{attach}; none to launch here")
    return engines


def _library_rows(findings: DoctorFindings) -> list[list[str]]:
    torch = findings.torch
    built = "" if torch is None else f", CUDA {torch.cuda or 'none'}, {torch.num_gpus} GPUs"
    purpose = "training, and models in evaluation"
    rows = [
        ["python", platform.python_version(), sys.executable],
        [DISTRIBUTION, _version_or_missing(DISTRIBUTION), ""],
    ]
    rows += [[name, _version_or_missing(name), ""] for name in requirements()]
    absent = findings.missing_for_training
    for name in requirements("train"):
        rows.append(
            [name, "missing" if name in absent else _version_or_missing(name) + built * (name == "torch"), purpose]
        )
    rows += [[name, _version_or_missing(name), purpose] for name, purpose in OTHERS.items()]
    rows += [[library.engine, library.version, library.python] for library in findings.servers]
    rows += [["embedded model", "there" if findings.model_error is None else "missing", findings.model_error or ""]]
    rows += [["C++ compiler", findings.compiler or "missing", "faster sampling from small models on CPU; not needed"]]
    daemon = f"daemon {findings.docker.server}" if findings.docker.server else "no daemon answers"
    return [*rows, ["docker command", findings.docker.client or "missing", daemon if findings.docker.client else ""]]


def _version_or_missing(name: str) -> str:
    return installed_version(name) or "missing"


def _machine_rows(findings: DoctorFindings) -> list[list[str]]:
    size = findings.machine
    rows = [["system", size.system], ["cores", str(size.num_cores)], ["memory", f"{size.memory_gib:.1f} GiB"]]
    if size.shared_memory_gib is not None:
        rows.append(["shared memory", f"{size.shared_memory_gib:.1f} GiB"])
    rows.append(["open files", "no limit" if size.open_files < 0 else str(size.open_files)])
    rows += [["GPU", f"{gpu.name}, {gpu.memory_gib:.0f} GiB, driver {gpu.driver}"] for gpu in findings.gpus]
    return rows if findings.gpus else [*rows, ["GPU", "none"]]


def _sandbox_rows(boxes: Mapping[str, str | None]) -> list[list[str]]:
    """Returns a row for each kind of sandbox, in the order of preference; tools that run code take the first usable."""
    return [[name, "yes" if fault is None else "no", fault or ""] for name, fault in boxes.items()]


def _report(
    findings: DoctorFindings, engines: dict[str, tuple[bool, str]], todo: Sequence[Advice], ok: bool
) -> dict[str, JSON]:
    absent = findings.missing_for_training
    names = (DISTRIBUTION, *requirements(), *requirements("train"), *OTHERS)
    versions: dict[str, JSON] = {name: None if name in absent else installed_version(name) for name in names}
    versions.update({library.engine: library.version for library in findings.servers})
    return {
        "ok": ok,
        "versions": {"python": platform.python_version(), **versions},
        "engines": [name for name, (usable, _) in engines.items() if usable],
        "torch": None if findings.torch is None else asdict(findings.torch),
        "servers": [asdict(library) for library in findings.servers],
        "gpus": [asdict(gpu) for gpu in findings.gpus],
        "machine": asdict(findings.machine),
        "docker": asdict(findings.docker),
        "compiler": findings.compiler,
        "model": findings.model_error is None,
        "fixes": [asdict(item) for item in todo],
    }


def _advise(findings: DoctorFindings) -> list[Advice]:
    """Returns what to do, the most pressing first."""
    return [*_python(findings), *_torch(findings), *_servers(findings), *_optional(findings), *_limits(findings)]


def _python(findings: DoctorFindings) -> Iterator[Advice]:
    if findings.missing:
        requirements_by_name = requirements()
        command = pip_install([requirements_by_name[name] for name in findings.missing])
        yield Advice(kind="needed", what=f"{', '.join(findings.missing)} missing", command=command, why="to run at all")
    if findings.missing_for_training:
        training = requirements("train")
        words = [
            f"torch=={TESTED_TORCH}" if name == "torch" else training[name] for name in findings.missing_for_training
        ]
        command = pip_install(words)
        size = "" if findings.gpus or platform.system() != "Linux" else _SMALL_TORCH
        yield Advice(
            kind="optional",
            what=f"{' and '.join(findings.missing_for_training)} missing",
            command=command,
            why=f"to train, and to evaluate models without a server{size}",
        )
    own = [misfit for misfit in findings.unfit if misfit.asked_by == DISTRIBUTION]
    if own:
        conflicts = ", ".join(f"{misfit.wanted} is wanted and {misfit.version} is installed" for misfit in own)
        yield Advice(
            kind="mismatch",
            what=conflicts,
            command=pip_install([misfit.wanted for misfit in own]),
            why="asked for by agentgym",
        )
    if findings.model_error is not None:
        yield Advice(kind="needed", what=findings.model_error, command=None, why="install agentgym again: it is a part")


_SMALL_TORCH = "; an index may send a build with gigabytes of CUDA: pytorch.org/get-started shows the small one for CPU"


def _torch(findings: DoctorFindings) -> Iterator[Advice]:
    torch = findings.torch
    if torch is None:
        return
    if torch.error is not None:
        command = pip_install(["--force-reinstall", "--no-deps", f"torch=={installed_version('torch')}"])
        yield Advice(kind="mismatch", what=f"torch cannot be imported: {torch.error}", command=command, why="to train")
    elif findings.gpus and not torch.num_gpus:
        built = "without CUDA" if torch.cuda is None else f"for CUDA {torch.cuda}"
        yield Advice(
            kind="mismatch",
            what=f"torch cannot use the GPU: it is built {built}, the driver is {findings.gpus[0].driver}",
            command=None,
            why="pytorch.org/get-started shows the build for a driver",
        )


def _servers(findings: DoctorFindings) -> Iterator[Advice]:
    here = {library.engine for library in findings.servers if library.is_here}
    for engine in sorted(here):
        misfits = [misfit for misfit in findings.unfit if misfit.asked_by in SERVERS[engine].distributions]
        if misfits:
            conflicts = ", ".join(
                f"{misfit.asked_by} wants {misfit.wanted} and {misfit.version} is installed" for misfit in misfits
            )
            yield Advice(
                kind="mismatch",
                what=conflicts,
                command=_move_command(engine, findings),
                why="give it its own environment",
            )
        elif len(here) > 1:
            conflicts = f"{engine} shares an environment with {', '.join(sorted(here - {engine}))}"
            yield Advice(
                kind="optional", what=conflicts, command=_move_command(engine, findings), why="each pins its own torch"
            )
    for engine, kind in SERVERS.items():
        if not kind.distributions or any(library.engine == engine for library in findings.servers):
            continue
        command = _engine_command(engine, on_gpu=bool(findings.gpus))
        python = engine_home() / engine / "bin" / "python"
        device = "" if findings.gpus else " --server.device cpu"
        use = f"`--engine {engine} --server.python {python}{device}`"
        why = f"for {use}; gigabytes; a server that runs elsewhere needs nothing here"
        if command is None:
            use = f"`--engine {engine} --server.urls URL`"
            why = f"to launch one here takes a GPU; a server that runs elsewhere works: {use}"
        yield Advice(kind="optional", what=f"{engine} is not installed", command=command, why=why)


def _engine_command(engine: str, *, on_gpu: bool) -> str | None:
    """Returns the command that installs an engine in an environment of its own; None if it cannot run."""
    folder, kind = engine_home() / engine, SERVERS[engine]
    python = str(folder / "bin" / "python")
    create = f"{shlex.quote(sys.executable)} -m venv {shlex.quote(str(folder))}"
    if on_gpu:
        return f"{create} && {pip_install([requirements(engine)[kind.distributions[0]]], python)}"
    if not kind.cpu_distribution:
        return None
    removal = f"{shlex.quote(python)} -m pip uninstall --yes {shlex.join(kind.cpu_unfit)}"
    return f"{create} && {pip_install([kind.cpu_distribution], python)} && {removal}"


def _move_command(engine: str, findings: DoctorFindings) -> str:
    """Returns the command that moves an engine out of this environment, into its own if it can run here."""
    names = [name for name in SERVERS[engine].distributions if installed_version(name)]
    away = f"{shlex.quote(sys.executable)} -m pip uninstall --yes {shlex.join(names)}"
    has_own = any(library.engine == engine and not library.is_here for library in findings.servers)
    install = None if has_own else _engine_command(engine, on_gpu=bool(findings.gpus))
    return away if install is None else f"{away} && {install}"


_CONTAINERS = "for the docker sandbox and DockerEnv; bundled environments run without"


def _optional(findings: DoctorFindings) -> Iterator[Advice]:
    if findings.compiler is None:
        why = "faster sampling from small models on CPU"
        yield Advice(kind="optional", what="no C++ compiler", command=_system_package("g++"), why=why)
    if findings.docker.client is None:
        yield Advice(kind="optional", what="no docker command", command=_system_package("docker.io"), why=_CONTAINERS)
    elif findings.docker.server is None:
        running = Path("/run/systemd/system").is_dir()
        command = f"{_sudo()}systemctl start docker" if running else None
        yield Advice(
            kind="optional", what=f"no Docker daemon: {findings.docker.error}", command=command, why=_CONTAINERS
        )
    if installed_version("ray") is None:
        why = "training in many processes, on one machine or several: --executor ray"
        yield Advice(kind="optional", what="ray is not installed", command=pip_install(["ray"]), why=why)


def _limits(findings: DoctorFindings) -> Iterator[Advice]:
    files, hard = findings.machine.open_files, findings.machine.open_files_hard
    if 0 <= files <= FEW_FILES:
        best = 65536 if hard == -1 else min(hard, 65536)
        yield Advice(
            kind="optional",
            what=f"at most {files} open files",
            command=f"ulimit -n {best}" if best > files else None,
            why=f"an episode on a server holds one: about {max(files - 100, 0)} at a time",
        )
    shared = findings.machine.shared_memory_gib
    if findings.gpus and shared is not None and shared < SMALL_SHARED_GIB:
        why = "engines on several GPUs need more: start the container with --shm-size=16g"
        yield Advice(kind="optional", what=f"{shared:.2f} GiB of shared memory", command=None, why=why)


def _system_package(name: str) -> str | None:
    if shutil.which("apt-get") is None:
        return None
    return f"{_sudo()}apt-get update && {_sudo()}apt-get install --yes {name}"


def _sudo() -> str:
    return "sudo " if shutil.which("sudo") else ""
