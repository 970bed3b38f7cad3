"""Opens the best sandbox that this machine supports, or reports what each kind lacks."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath

from agentgym.errors import ConfigError, SandboxError, UnknownName, nearest
from agentgym.tools.sandbox.bare import BareSubprocess
from agentgym.tools.sandbox.protocol import Sandbox, SandboxLimits
from agentgym.tools.sandbox.served import ServedSandbox
from agentgym.tools.sandbox.service_settings import backend_of_run, is_service

__all__ = ["BACKENDS", "open_sandbox", "sandbox_faults"]

BACKENDS = ("namespaces", "landlock", "docker")
"""The kinds of sandboxes in the order of preference."""
MACHINES = ("x86_64", "aarch64")


def open_sandbox(
    backend: str = "auto",
    *,
    limits: SandboxLimits | None = None,
    packages: Sequence[Path] = (),
    image: str | None = None,
    folders: Sequence[str] = (),
    unsafe: bool = False,
) -> Sandbox:
    """Opens a sandbox of the kind `backend`; `auto` is the first of namespaces, landlock and docker that works here.

    In a run with a code execution service (`sandbox.url`), `auto` is that service; the URL of one is a backend too.

    `packages` are folders that programs can import from, besides the standard library; programs can read them, so they
    must not contain secrets. `image` is an image in the Docker daemon, with Python 3.11 or newer; by default one is
    made of this machine's Python. `folders`, such as home/user, are in the working folder, and in `namespaces` also at
    /home/user. With `unsafe`, and only if no sandbox works, programs run as bare subprocesses.

    Raises SandboxError, with what each kind lacks.
    """
    backend = backend_of_run(backend)
    if is_service(backend):
        return _open_service(backend, limits, packages, image, folders)
    if backend not in ("auto", *BACKENDS):
        near = nearest(backend, BACKENDS) or "."
        raise UnknownName(f"unknown sandbox {backend!r}{near} There are auto, {', '.join(BACKENDS)}")
    _check_folders(folders, packages, backend)
    if image is not None and backend != "docker":
        raise ConfigError(f"an image is for the sandbox docker, and this is {backend!r}: give backend='docker'")
    limits = limits or SandboxLimits()
    faults = {}
    for name in BACKENDS[: 2 if folders else 3] if backend == "auto" else (backend,):
        fault = _platform_fault()
        try:
            if fault is None:
                return _open_backend(name, limits, packages, image, folders)
        except SandboxError as error:
            fault = str(error)
        faults[name] = fault
    if unsafe:
        return BareSubprocess(limits)
    if backend == "docker":
        raise SandboxError(f"no sandbox of Docker's can be held here: {faults['docker']}")
    lacks = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    raise SandboxError(
        f"no sandbox can be held here ({lacks}). On Linux, allow user namespaces (sysctl user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns=0) or Landlock (Linux 5.13), "
        "or start a Docker daemon. unsafe=True runs code with all rights of yours"
    )


def _check_folders(folders: Sequence[str], packages: Sequence[Path], backend: str) -> None:
    for folder in packages:
        if not folder.is_dir():
            raise ConfigError(f"packages are folders that programs can import from; {str(folder)!r} is none")
    if folders and backend == "docker":
        raise ConfigError("the sandbox docker has one folder to write in: name namespaces or landlock for folders")
    for name in folders:
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise ConfigError(f"folders are paths relative to the root, without '..', such as home/user; got {name!r}")


def _open_service(
    url: str, limits: SandboxLimits | None, packages: Sequence[Path], image: str | None, folders: Sequence[str]
) -> Sandbox:
    if folders:
        raise ConfigError("a code execution service keeps no folders: name a box of this machine, backend=namespaces")
    if packages or image is not None:
        raise ConfigError("a code execution service has its own image and packages: leave packages and image out")
    sandbox: Sandbox = import_module("agentgym.tools.sandbox.service").ServiceSandbox(url, limits or SandboxLimits())
    return sandbox


def _open_backend(
    name: str, limits: SandboxLimits, packages: Sequence[Path], image: str | None, folders: Sequence[str]
) -> Sandbox:
    if name != "docker":
        return ServedSandbox(name, limits, packages, folders)
    docker = import_module("agentgym.tools.sandbox.docker")  # its libraries take a tenth of a second
    sandbox: Sandbox = docker.DockerSandbox(limits, packages, image)
    return sandbox


def sandbox_faults() -> dict[str, str | None]:
    """Tries each kind of sandbox with a program; returns kind to the fault it has here, None if it works."""
    return {name: _fault(lambda name=name: open_sandbox(name)) for name in BACKENDS}  # type: ignore[misc]


def _fault(opened: Callable[[], Sandbox]) -> str | None:
    try:
        with opened() as sandbox:
            outcome = sandbox.run("print(6 * 7)")
    except SandboxError as error:
        return str(error)
    return None if outcome.stdout == "42\n" else f"a program failed in it: {outcome.stderr.strip()[-200:]}"


def _platform_fault() -> str | None:
    if sys.platform != "linux":
        return f"it needs Linux, and this is {platform.system()}"
    machine = platform.machine()
    return None if machine in MACHINES else f"it knows {' and '.join(MACHINES)}, and this is {machine}"
