"""Sets a Harbor task up in a box, without Docker: what its Dockerfile does, as far as a box can do it."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path, PurePosixPath

from agentgym.envs.adapters.harbor_task import HarborTask, read_tree
from agentgym.errors import ConfigError

__all__ = ["FOLDERS", "ROOT", "BoxSetup", "NotInBox", "read_setup"]

FOLDERS = ("app", "data", "home/user", "logs", "solution", "tests", "workspace")
"""The folders of every task's box; one that its Dockerfile names is added."""
ROOT = "AGENTGYM_ROOT"
"""The variable with the folder that stands for `/`: "" where the box has a root of its own, as in any container."""
ABSOLUTE = re.compile(r"(?<![\w.$}])/(?:app|data|home|logs|opt|root|solution|srv|tests|tmp|var|workspace)\b(?![-.\w])")
DEEP = ("home", "mnt", "opt", "srv", "var")
"""Folders of which a box gets single subfolders: Python may be installed in others."""
SYSTEM = "bin boot dev etc lib lib32 lib64 proc root run sbin sys usr box".split()
BASES = re.compile(r"(?:ubuntu|debian|python)\b[-\w.]*(?::[-\w.]+)?(?:@\S+)?")
"""The last part of the names of images that have only the system and Python."""
PLAIN = (
    re.compile(r"(?:apt-get|apt) (?:-\S+ )*(?:update|clean|autoremove|autoclean)\b.*"),
    re.compile(r"rm -rf (?:/var/(?:lib/apt|cache)\S*\s*)+"),
    re.compile(r"ln -sf? /usr/bin/python3(?:\.\d+)? /usr/bin/python3?"),
    re.compile(r"true"),
)
"""Commands that have nothing to do in a box."""
INSTALL = re.compile(r"(?:apt-get|apt|pip3?|python3? -m pip) (?:-\S+ )*install (.*)")
NEEDS_MORE = re.compile(
    r"(?<![\w/.-])(?:curl|wget|git clone|npm|gem|cargo|apt|apt-get|add-apt-repository|pip3?|conda|"
    r"useradd|adduser|groupadd|chown|mount|sudo|su|service|systemctl|ldconfig|mknod)(?![\w.-])"
)
"""Programs that need a network, or root."""
BASIC_PACKAGES = {
    "python3",
    "python3-pip",
    "python3-minimal",
    "python-is-python3",
    "ca-certificates",
    "coreutils",
    "bash",
    "tar",
}
PROGRAMS = {"build-essential": "make", "nodejs": "node", "python3-pytest": "pytest", "gawk": "awk"}
PATHS = {"PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/root"}
"""The variables that a Dockerfile may use without setting them."""
SHELL_OPTIONS = "set -e\n"


class NotInBox(ConfigError):
    """A task that a box cannot play, and a container may."""


@dataclass
class BoxSetup:
    """The steps that make the machine of a task from an empty box."""

    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    steps: list[dict[str, bytes] | str] = field(default_factory=list)
    """Files by their paths below the root, and shell commands, in order."""
    folders: set[str] = field(default_factory=lambda: set(FOLDERS))

    def prelude(self) -> str:
        """Returns the commands before each command: the variables, and the working folder."""
        lines = [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        return "\n".join([*lines, f'cd "${{{ROOT}-}}"{shlex.quote(self.workdir)} || exit 126', ""])

    def claim(self, path: str) -> None:
        """Adds the folder of the box that an absolute path is in; raises NotInBox for one that it cannot have."""
        parts = PurePosixPath(path).parts[1:]
        if parts[:1] == ("tmp",) and ".." not in parts:  # it is there
            return
        if not parts or ".." in parts or parts[0] in SYSTEM or (parts[0] in DEEP and len(parts) < 2):
            raise NotInBox(f"its Dockerfile writes to {path}")
        self.folders.add("/".join(parts[: 2 if parts[0] in DEEP else 1]))


def read_setup(task: HarborTask, packages: Sequence[Path], backend: str) -> BoxSetup:
    """Returns how to make the machine of a task in a box; raises NotInBox, with the reason, if a box cannot be it."""
    if not (text := task.text_of("environment/Dockerfile")):
        raise NotInBox("it has an image, and no Dockerfile")
    setup, files = BoxSetup(), read_tree(task.folder / "environment")
    for number, (word, rest) in enumerate(_instructions(text)):
        if (word == "FROM") != (number == 0):
            raise NotInBox("its Dockerfile has several stages" if number else "its Dockerfile does not begin with FROM")
        if word == "FROM":
            if not BASES.fullmatch(rest.rpartition("/")[2]):
                raise NotInBox(f"its image is {rest}")
        elif word == "WORKDIR":
            setup.workdir = str(PurePosixPath(setup.workdir) / _expand(rest, setup.env))
            if setup.workdir != "/":
                setup.claim(setup.workdir)
            setup.steps.append(f"mkdir -p {shlex.quote(_inside(setup.workdir))}")
        elif word in ("ENV", "ARG"):
            setup.env |= _variables(rest, setup.env)
        elif word in ("COPY", "ADD"):
            _copy(setup, rest, files)
        elif word == "RUN":
            _run(setup, rest, packages)
        elif word not in ("LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "SHELL", "STOPSIGNAL"):
            raise NotInBox(f"its Dockerfile has {word}")
    if workdir := task.config.get("environment", {}).get("workdir"):
        setup.workdir = str(PurePosixPath("/") / workdir)
        setup.claim(setup.workdir)
    if backend == "landlock" and (path := _absolute_path(task, setup)):
        raise NotInBox(f"landlock has no root of its own, and the task names {path}: ${ROOT} before it would do")
    return setup


def _absolute_path(task: HarborTask, setup: BoxSetup) -> str:
    texts = [
        task.instruction,
        *(step for step in setup.steps if isinstance(step, str) and not step.startswith("mkdir")),
    ]
    for name in ("tests", "solution"):
        texts += [content.decode("utf-8", "replace") for content in read_tree(task.folder / name).values()]
    return next((match[0] for text in texts if (match := ABSOLUTE.search(text))), "")


def _instructions(text: str) -> list[tuple[str, str]]:
    """Returns the instructions of a Dockerfile; raises NotInBox for one with texts of several lines."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"[\\]\s*\n", " ", "\n".join(lines))
    instructions = []
    for line in joined.splitlines():
        word, _, rest = line.strip().partition(" ")
        if "<<" in rest:
            raise NotInBox("its Dockerfile has texts of several lines (<<)")
        instructions.append((word.upper(), rest.strip()))
    return instructions


def _variables(rest: str, env: Mapping[str, str]) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:  # the older form: one name, then its value
        words = [f"{words[0]}={' '.join(words[1:])}"]
    pairs = [word.partition("=") for word in words]
    return {name: _expand(value, env) for name, _, value in pairs if name.isidentifier()}


def _expand(text: str, env: Mapping[str, str]) -> str:
    return re.sub(
        r"\$(?:(\w+)|\{(\w+)\})", lambda match: env.get(match[1] or match[2], PATHS.get(match[1] or match[2], "")), text
    )


def _copy(setup: BoxSetup, rest: str, files: Mapping[str, bytes]) -> None:
    words = shlex.split(_expand(rest, setup.env)) if not rest.startswith("[") else re.findall(r'"([^"]*)"', rest)
    options = [word for word in words if word.startswith("--")]
    *sources, target = [word for word in words if word not in options] or [""]
    if not sources or any(not option.startswith(("--chown=", "--chmod=")) for option in options):
        raise NotInBox(f"its Dockerfile has COPY {rest}")
    path = PurePosixPath(setup.workdir) / target
    copies: dict[str, bytes] = {}
    for source in sources:
        name = str(PurePosixPath(source.lstrip("/")))
        below = {
            key: content for key, content in files.items() if name == "." or PurePosixPath(key).is_relative_to(name)
        }
        if "://" in source or "*" in source or not below:
            raise NotInBox(f"its Dockerfile copies {source}, which is no file of its environment")
        for key, content in below.items():
            is_one = key == name
            goes_in = not is_one or target.endswith("/") or len(sources) > 1 or target in (".", "./")
            relative = PurePosixPath(key).name if is_one else str(PurePosixPath(key).relative_to(name))
            place = path / relative if goes_in else path
            setup.claim(str(place.parent))
            copies[_inside(str(place))] = content
    setup.steps.append(copies)
    for option in options:
        if option.startswith("--chmod="):
            names = shlex.join(copies)
            setup.steps.append(f"chmod {shlex.quote(option.partition('=')[2])} {names}")


def _run(setup: BoxSetup, rest: str, packages: Sequence[Path]) -> None:
    if rest.startswith("["):
        rest = shlex.join(re.findall(r'"([^"]*)"', rest))
    commands = []
    for command in (part.strip() for part in rest.split("&&")):
        if any(pattern.fullmatch(command) for pattern in PLAIN):
            continue
        if match := INSTALL.fullmatch(command):
            names = {re.split(r"[=<>~!\[;]", word)[0] for word in shlex.split(match[1]) if not word.startswith("-")}
            has = _has_package if command.startswith("apt") else functools.partial(_has_distribution, tuple(packages))
            if missing := sorted(name for name in names if not has(name)):
                raise NotInBox(f"its Dockerfile installs {', '.join(missing)}")
            continue
        if match := NEEDS_MORE.search(command):
            raise NotInBox(f"its Dockerfile runs {match[0]}")
        for path in re.findall(r"(?<![\w.$}])/[\w.-]+(?:/[\w.-]+)?", command):
            if PurePosixPath(path).parts[1] not in SYSTEM:
                setup.claim(path)
        commands.append(command)
    if commands:
        setup.steps.append(f"{SHELL_OPTIONS}{setup.prelude()}{' && '.join(commands)}")


def _inside(path: str) -> str:
    """Returns an absolute path as the box's working folder has it: /tmp is that folder itself."""
    parts = PurePosixPath(path).parts[1:]
    return "/".join(parts[1:] if parts[:1] == ("tmp",) else parts) or "."


def _has_package(name: str) -> bool:
    """Returns whether a package of the system, or its program, is on this machine, whose system the box has."""
    lists = (Path("/var/lib/dpkg/info") / f"{name}.list", *Path("/var/lib/dpkg/info").glob(f"{name}:*.list"))
    return name in BASIC_PACKAGES or any(file.is_file() for file in lists) or _has_program(PROGRAMS.get(name, name))


def _has_program(name: str) -> bool:
    return shutil.which(name, path=f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin") is not None


@functools.cache
def _has_distribution(packages: tuple[Path, ...], name: str) -> bool:
    """Returns whether the box's Python, which is this one's base, has a distribution; its version is not compared."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    schemes = [scheme for scheme in sysconfig.get_scheme_names() if "user" not in scheme and "venv" not in scheme]
    folders = {sysconfig.get_path("purelib", scheme, base) for scheme in schemes if scheme.startswith(("posix", "deb"))}
    paths = [*folders, f"{sys.base_prefix}/lib/python3/dist-packages", *map(str, packages)]
    names = {re.sub(r"[-_.]+", "-", dist.name).lower() for dist in distributions(path=paths) if dist.name}
    return re.sub(r"[-_.]+", "-", name).lower() in names
