"""`agentgym sandbox`: runs a program in a box, as tools do, and reports why it ended; removes what a crash left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from agentgym.cli.groups import Subcommand, run_group
from agentgym.cli.options import parse_options
from agentgym.cli.signals import end_of_serving
from agentgym.cli.terminal import say, show_json
from agentgym.errors import ConfigError
from agentgym.http_guard import TOKEN_VARIABLE, HttpGuard, choose_token, shown_token
from agentgym.tools.containers.daemon import Daemon
from agentgym.tools.containers.reaper import reap_resources
from agentgym.tools.sandbox import Ended, Language, Outcome, SandboxLimits, open_sandbox
from agentgym.tools.sandbox.service_server import SandboxServer

__all__ = ["main"]

TIME_LIMIT_CODE, KILLED_CODE = 124, 137
"""The exit codes that `timeout` and a shell use."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Runs a Python program, or a shell script (`FILE.sh`), in a box; its output and exit code are the program's.

    The last line on standard error is the reason why it ended. A program that passed the time limit ends with exit code
    124, one that something else ended with 137 or 128 plus the signal.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The program; `-` reads it from standard input."""
    backend: Literal["auto", "namespaces", "landlock", "docker"] = "auto"
    """The kind of box; by default the first one that works here."""
    time_limit_s: float = 10.0
    """Seconds that the program may take."""
    memory_mb: int = 512
    """MiB that all its processes may hold."""
    packages: tuple[Path, ...] = ()
    """Folders that it can import from, besides the standard library."""
    image: str | None = None
    """The image for `--backend docker`: one of the daemon, with Python 3.11 or newer; by default this Python's."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


@dataclass(frozen=True, kw_only=True)
class ReapOptions:
    """Removes the containers, images and networks that processes which have ended left in the Docker daemon.

    What belongs to a process that still runs stays, and so does what belongs to one of another machine.
    """

    json: bool = False
    """Print one line of JSON, and all else on standard error."""


@dataclass(frozen=True, kw_only=True)
class SandboxServeOptions:
    """Runs the programs that others post (`--sandbox.url`), each in a box of its own. Ctrl-C ends it.

    It speaks the API of SandboxFusion: `POST /run_code` with `code` and `language` (`python` or `bash`).
    """

    port: int = 8080
    """The port to listen on; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is reachable from other machines, and demands a token."""
    backend: Literal["auto", "namespaces", "landlock", "docker"] = "auto"
    """The kind of box; by default the first one that works here."""
    time_limit_s: float = 60.0
    """The most seconds that a request may ask for; without its own limit a program has 10."""
    memory_mb: int = 1024
    """MiB that all processes of a program may hold."""
    concurrency: int = field(default_factory=lambda: 4 * (os.cpu_count() or 1))
    """Programs that run at the same time; others wait."""
    require_token: bool = False
    """Demand a token on loopback too. It is printed at the start, or read from AGENTGYM_TOKEN where that is set."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that are served, besides IP addresses and this machine's own name."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym sandbox ...`."""
    return run_group("sandbox", args, SUBCOMMANDS)


def _run(args: Sequence[str]) -> int:
    options = parse_options(RunOptions, args, prog="agentgym sandbox run")
    code = _read(options.file)
    language: Language = "shell" if options.file.suffix in (".sh", ".bash") else "python"
    limits = SandboxLimits(time_limit_s=options.time_limit_s, memory_mb=options.memory_mb)
    with open_sandbox(options.backend, limits=limits, packages=options.packages, image=options.image) as sandbox:
        outcome = sandbox.run(code, language=language)
    sys.stdout.write(outcome.stdout)
    sys.stdout.flush()
    sys.stderr.write(outcome.stderr)
    print(_verdict(outcome), file=sys.stderr, flush=True)
    if options.json:
        if outcome.stdout and not outcome.stdout.endswith("\n"):
            print()
        show_json(
            {
                "ended": outcome.ended.value,
                "exit_code": outcome.exit_code,
                "backend": outcome.backend,
                "seconds": round(outcome.seconds, 4),
                "stdout": outcome.stdout,
                "stderr": outcome.stderr,
            }
        )
    return _exit_code(outcome)


def _serve(args: Sequence[str]) -> int:
    options = parse_options(SandboxServeOptions, args, prog="agentgym sandbox serve")
    asyncio.run(_serve_until_signal(options, choose_token(options.host, is_required=options.require_token)))
    return 0


async def _serve_until_signal(options: SandboxServeOptions, token: str | None) -> None:
    over = end_of_serving()
    limits = SandboxLimits(time_limit_s=options.time_limit_s, memory_mb=options.memory_mb)
    with open_sandbox(options.backend, limits=limits) as sandbox:
        server = SandboxServer(
            sandbox,
            limits,
            options.host,
            options.port,
            concurrency=options.concurrency,
            guard=HttpGuard(options.host, token=token, allowed_hosts=options.allowed_hosts),
        )
        async with server:
            say(f"programs are run at {server.url}, in {sandbox.backend}")
            if token is not None:
                say(f"  token: {shown_token(token)}    (set it as {TOKEN_VARIABLE} where the training runs)")
            key = "" if token is None else f" --sandbox.api-key-env {TOKEN_VARIABLE}"
            say(f"  agentgym train --env CodeTasks-v0 --sandbox.url {server.url}{key}")
            say("Ctrl-C ends it.")
            await over.wait()
    say(f"ended after {server.num_run:,} programs")


def _read(path: Path) -> str:
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the program {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the program {str(path)!r} is not UTF-8 text: {error}") from error


def _verdict(outcome: Outcome) -> str:
    how = f"exit code {outcome.exit_code}" if outcome.ended is Ended.EXITED else "killed"
    return f"ended: {outcome.ended.value}, {how}, {outcome.seconds:.2f} s, in {outcome.backend}"


def _exit_code(outcome: Outcome) -> int:
    if outcome.ended is Ended.TIME_LIMIT:
        return TIME_LIMIT_CODE
    if outcome.ended is not Ended.EXITED:
        return KILLED_CODE
    return outcome.exit_code if outcome.exit_code >= 0 else 128 - outcome.exit_code


def _reap(args: Sequence[str]) -> int:
    options = parse_options(ReapOptions, args, prog="agentgym sandbox reap")
    with contextlib.closing(Daemon()) as daemon:
        done = asdict(reap_resources(daemon))
    for kind in ("containers", "images", "networks"):
        for name in done[kind]:
            say(f"removed: {kind.removesuffix('s')} {name}")
    for name in done["elsewhere"]:
        say(f"left: {name} belongs to a process of another machine, or of another container")
    for name in done["busy"]:
        say(f"left: image {name} is used by a container")
    if not any(done.values()):
        say("nothing was left over")
    if options.json:
        show_json({name: list(names) for name, names in done.items()})
    return 0


SUBCOMMANDS = {
    "run": Subcommand("run a program in a box", _run),
    "serve": Subcommand("run the programs that others post, by the API of SandboxFusion", _serve),
    "reap": Subcommand("remove containers and images of processes that have ended", _reap),
}
