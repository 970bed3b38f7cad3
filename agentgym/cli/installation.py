"""The installed packages: versions, conflicts according to their metadata, and the commands that install."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agentgym.engines.server_kind import SERVERS
from agentgym.extras import DISTRIBUTION

__all__ = [
    "DISTRIBUTION",
    "ServerLibrary",
    "TorchBuild",
    "Unfit",
    "engine_home",
    "installed_version",
    "is_importable",
    "pip_install",
    "requirements",
    "server_libraries",
    "torch_build",
    "unfit",
]

SHARED = frozenset({"huggingface-hub", "numpy", "tokenizers", "torch", "transformers"})
"""Libraries that engines pin and others use too: here a shared environment causes conflicts."""
PROBE = """
import json, torch
num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"cuda": torch.version.cuda, "num_gpus": num_gpus}))
"""
PROBE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The report of torch on itself, imported in a process of its own."""

    cuda: str | None
    """The CUDA that it was built for; None for a build without."""
    num_gpus: int
    """The number of GPUs that it can use."""
    error: str | None = None
    """The reason why it cannot be imported; None if it can."""


@dataclass(frozen=True, kw_only=True)
class ServerLibrary:
    """An engine's library that is installed."""

    engine: str
    version: str
    python: str
    """The interpreter that has it."""
    is_here: bool
    """True if that is the interpreter that runs agentgym."""


@dataclass(frozen=True, kw_only=True)
class Unfit:
    """A library that another one cannot work with."""

    name: str
    version: str
    asked_by: str
    wanted: Requirement


def installed_version(name: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def engine_home() -> Path:
    """Returns the folder in which `doctor` suggests to keep the environments of engines, a folder for each."""
    return Path.home() / ".agentgym"


def is_importable(name: str) -> bool:
    """True if a module of this name can be found."""
    return find_spec(name) is not None


def requirements(extra: str = "") -> dict[str, Requirement]:
    """Returns the requirements of agentgym: those to run at all, or those that an extra such as `train` adds."""
    every = (Requirement(text) for text in requires(DISTRIBUTION) or ())
    chosen = [requirement for requirement in every if (requirement.marker is None) == (not extra)]
    return {
        requirement.name: _bare(requirement)
        for requirement in chosen
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    }


def _bare(requirement: Requirement) -> Requirement:
    """Returns the requirement without its marker, the condition under which it applies, which holds."""
    requirement.marker = None
    return requirement


def pip_install(words: Sequence[object], python: str = sys.executable) -> str:
    """Returns the command that installs `words` for an interpreter."""
    quoted = shlex.join(str(word) for word in words)
    if python == sys.executable and not is_importable("pip") and shutil.which("uv"):
        return f"uv pip install --python {shlex.quote(python)} {quoted}"
    return f"{shlex.quote(python)} -m pip install {quoted}"


def unfit() -> list[Unfit]:
    """Returns the installed libraries that agentgym or an installed engine requires in another version."""
    misfits = [
        _find_misfit(DISTRIBUTION, requirement)
        for requirement in [*requirements().values(), *requirements("train").values()]
    ]
    for name in (name for kind in SERVERS.values() for name in kind.distributions if installed_version(name)):
        requirements_of_server = [Requirement(text) for text in requires(name) or ()]
        plain = [
            requirement
            for requirement in requirements_of_server
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
        misfits += [
            _find_misfit(name, requirement) for requirement in plain if canonicalize_name(requirement.name) in SHARED
        ]
    return [misfit for misfit in misfits if misfit is not None]


def _find_misfit(asked_by: str, requirement: Requirement) -> Unfit | None:
    version = installed_version(requirement.name)
    if version is None or requirement.specifier.contains(version, prereleases=True):
        return None
    return Unfit(name=requirement.name, version=version, asked_by=asked_by, wanted=requirement)


def server_libraries() -> list[ServerLibrary]:
    """Returns the libraries of servers that are installed: next to agentgym, in folders of `engine_home()`, or built by
    `make engines`."""
    built = Path(os.environ.get("AGENTGYM_ENGINES") or Path.home() / ".cache" / "agentgym-engines")
    folders = [folder for home in (engine_home(), built) for folder in sorted(home.glob("*/bin"))]
    return [*_libraries(None), *(library for folder in folders for library in _libraries(folder))]


def _libraries(folder: Path | None) -> Iterator[ServerLibrary]:
    if folder is None:
        versions = {name: installed_version(name) for kind in SERVERS.values() for name in kind.distributions}
    else:
        paths = [str(path) for path in folder.parent.glob("lib/python*/site-packages")]
        versions = {
            canonicalize_name(distribution.metadata["Name"]): distribution.version
            for distribution in distributions(path=paths)
            if "Name" in distribution.metadata  # one that is being installed has none yet
        }
    if folder is None:
        python = sys.executable
    else:  # `make engines` builds for CPU, and its interpreter begins with the variables that this needs
        own = folder / "agentgym-python"
        python = str(own if own.exists() else folder / "python")
    for engine, kind in SERVERS.items():
        for name in kind.distributions:
            if (number := versions.get(name)) is not None:
                yield ServerLibrary(engine=engine, version=number, python=python, is_here=folder is None)


def torch_build() -> TorchBuild:
    """Imports torch in a process of its own, so that a broken one is reported and does no harm."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return TorchBuild(cuda=None, num_gpus=0, error=f"its import took more than {PROBE_S:g} s")
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return TorchBuild(cuda=None, num_gpus=0, error=re.sub(r"\s+", " ", words[-1]))
    report = json.loads(done.stdout.splitlines()[-1])
    return TorchBuild(cuda=report["cuda"], num_gpus=report["num_gpus"])
