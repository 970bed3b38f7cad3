"""Sets a Harbor task up in a box, without Docker: what its Dockerfile does, as far as a box can do it."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from agentgym.envs.adapters.harbor_shell import NotInBox, check_script, shell_words, strip_installs
from agentgym.envs.adapters.harbor_task import HarborTask, list_executables, read_tree

__all__ = ["FOLDERS", "ROOT", "BoxSetup", "NotInBox", "read_setup"]

FOLDERS = (
    *("app", "data", "home/user", "solution", "tests", "tmp", "workspace"),
    *("logs", "logs/agent", "logs/artifacts", "logs/verifier"),
)
"""The folders of every task's box; one that its Dockerfile names is added."""
ROOT = "AGENTGYM_ROOT"
"""The variable with the folder that stands for `/`: "" where the box has a root of its own, as in any container."""
ABSOLUTE = re.compile(r"(?<![\w.$}:/])(?<!\}\")/([A-Za-z][\w.-]*)(?:/[\w.+-]+)*")
WORK = {*"app data etc home logs media mnt opt root solution srv tests tmp usr var workspace".split()}
"""The folders below the root that a path in a task may mean, in which a box has some folders or none."""
DEEP = ("home", "mnt", "opt", "srv", "var")
"""Folders of which a box gets single subfolders: Python may be installed in others."""
PROGRAMS = ("bin", "dev", "lib", "lib32", "lib64", "proc", "sbin", "usr")
"""The folders of this machine that a box has, to read."""
ACCOUNTS = ("etc/group", "etc/passwd")
SYSTEM = (*PROGRAMS, "boot", "box", "etc", "root", "run", "sys")
BASES = re.compile(
    r"(?:(?:docker\.io/)?(?:library/)?(?:ubuntu|debian|python)|ghcr\.io/laude-institute/t-bench/(?:ubuntu|python)(?:-\d+)+)"
    r"(?::(?!2\b|.*alpine|.*windows)[\w.-]+)?(?:@\S+)?"
)
"""The images that have only a Linux with glibc and Python 3."""
HARMLESS = ("LABEL", "EXPOSE", "CMD", "MAINTAINER", "STOPSIGNAL")
"""Instructions that have no effect on a task: it is not started by its CMD."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^{}$]*))?\})")
PATHS = {"PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/root"}
"""The variables that a Dockerfile may use without setting them."""
SHELL_OPTIONS = "set -e\n"


@dataclass
class BoxSetup:
    """The steps that make the machine of a task from an empty box."""

    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    """The variables of the build alone."""
    base_args: dict[str, str] = field(default_factory=dict)
    """Those of before FROM, which an ARG without a value asks for."""
    steps: list[dict[str, bytes] | str] = field(default_factory=list)
    """Files by their paths below the root, and shell commands, in order."""
    commands: list[str] = field(default_factory=list)
    """The commands of RUN."""
    executables: set[str] = field(default_factory=set)
    """The files that can be run as programs."""
    folders: set[str] = field(default_factory=lambda: set(FOLDERS))
    workdirs: set[str] = field(default_factory=set)
    """Folders that are there: a file that is copied to one goes into it."""

    def prelude(self, env: Mapping[str, str]) -> str:
        """Returns the commands before each command: the working folder, which one may have removed, and variables."""
        folder = f'"${{{ROOT}-}}"{shlex.quote(self.workdir)}'
        lines = [f"mkdir -p {folder} 2>/dev/null; cd {folder} || exit 126"]  # before PATH: by a program of the box
        lines += [f'export TMPDIR="${{{ROOT}-}}/tmp"'] if "tmp" in self.folders else []
        return "\n".join([*lines, *(f"export {name}={shlex.quote(value)}" for name, value in env.items()), ""])

    def claim(self, path: str) -> None:
        """Adds the folder of the box that an absolute path is in; raises NotInBox for one that it cannot have."""
        parts = PurePosixPath(path).parts[1:]
        is_shut = parts[:1] == ("tmp",) and "tmp" not in self.folders
        if not parts or is_shut or ".." in parts or parts[0] in SYSTEM or (parts[0] in DEEP and len(parts) < 2):
            raise NotInBox(f"its Dockerfile writes to {path}")
        self.folders.add("/".join(parts[: 2 if parts[0] in DEEP else 1]))

    def enter(self, folder: str) -> None:
        """Makes a folder the working folder."""
        self.workdir = str(PurePosixPath(self.workdir) / folder)
        self.workdirs.add(self.workdir)
        if self.workdir != "/":
            self.claim(self.workdir)
            self.steps.append(f"mkdir -p {shlex.quote(self.workdir[1:])}")

    def expand(self, text: str) -> str:
        """Returns a text with the values of its variables."""
        values = {**PATHS, **self.args, **self.env}
        expanded = VARIABLE.sub(lambda match: values.get(match[1] or match[2], "") or match[3] or "", text)
        if "${" in expanded:
            raise NotInBox(f"its Dockerfile has {text}")
        return expanded

    def has(self, path: str) -> bool:
        """Returns whether a box has an absolute path, or the folder that it is in."""
        inside = path[1:]
        if inside in ACCOUNTS:
            return True
        if inside.partition("/")[0] in PROGRAMS:
            return Path(path).exists()
        return any(f"{inside}/".startswith(f"{name}/") or name.startswith(f"{inside}/") for name in self.folders)


def read_setup(task: HarborTask, packages: Sequence[Path], backend: str) -> BoxSetup:
    """Returns how to make the machine of a task in a box; raises NotInBox, with the reason, if a box cannot be it."""
    if not (text := task.text_of("environment/Dockerfile")):
        raise NotInBox("it has an image, and no Dockerfile")
    setup, files = BoxSetup(), read_tree(task.folder / "environment")
    if ignored := next((name for name in files if "/" not in name and name.endswith(".dockerignore")), None):
        raise NotInBox(f"it has a {ignored}")
    if any(path.resolve().is_relative_to("/tmp") for path in (*packages, Path(sys.base_prefix))):
        setup.folders.remove("tmp")
    executables = list_executables(task.folder / "environment")
    for word, rest in _instructions_after_from(text, setup):
        if word == "WORKDIR":
            setup.enter(setup.expand(rest))
        elif word == "ENV":
            setup.env |= _variables(_pairs(rest), setup)
        elif word == "ARG":
            pairs = [pair if "=" in pair else f"{pair}={setup.base_args.get(pair, '')}" for pair in _pairs(rest)]
            setup.args |= _variables([pair for pair in pairs if not pair.endswith("=")], setup)
        elif word in ("COPY", "ADD"):
            _copy(setup, f"{word} {rest}", files, executables)
        elif word == "RUN":
            _run(setup, rest, packages)
        elif word not in HARMLESS:
            raise NotInBox(f"its Dockerfile has {word}")
    if workdir := task.config.get("environment", {}).get("workdir"):
        setup.enter(str(PurePosixPath("/") / workdir))
    _check_work(task, setup, packages, backend)
    return setup


def _check_work(task: HarborTask, setup: BoxSetup, packages: Sequence[Path], backend: str) -> None:
    """Raises NotInBox if the work or its verifier is in a place that the box does not have, or needs more programs."""
    if setup.workdir == "/":
        raise NotInBox("its working folder is /")
    texts = [task.instruction, *(setup.commands if backend == "landlock" else ())]
    for name in ("tests", "solution"):
        contents = {path: content for path, content in read_tree(task.folder / name).items() if b"\0" not in content}
        texts += [content.decode("utf-8", "replace") for content in contents.values()]
    for path, content in read_tree(task.folder / "tests").items():
        if path.endswith(".sh"):
            check_script(content.decode("utf-8", "replace"), packages)
    for match in (match for text in texts for match in ABSOLUTE.finditer(text) if match[1] in WORK):
        path = match[0].rstrip(".")
        if not setup.has(path):
            raise NotInBox(f"the task names {path}, which a box does not have")
        if backend == "landlock" and match[1] != "usr":
            raise NotInBox(f"landlock has no root of its own, and the task names {path}: ${ROOT} before it would do")


def _instructions_after_from(text: str, setup: BoxSetup) -> Iterator[tuple[str, str]]:
    """Yields the instructions of a Dockerfile with one stage, whose image a box can be."""
    has_image = False
    for word, rest in _instructions(text):
        if word == "FROM":
            image = re.sub(r"^--platform=linux/\S+\s+|\s+AS\s+\S+$", "", rest, flags=re.IGNORECASE)
            if has_image:
                raise NotInBox("its Dockerfile has several stages")
            if not BASES.fullmatch(setup.expand(image)):
                raise NotInBox(f"its image is {image}")
            has_image, setup.base_args, setup.args = True, setup.args, {}
        elif has_image or word == "ARG":
            yield word, rest
        else:
            break
    if not has_image:
        raise NotInBox("its Dockerfile does not begin with FROM")


def _instructions(text: str) -> list[tuple[str, str]]:
    """Returns the instructions of a Dockerfile; raises NotInBox for one with texts of several lines."""
    lines = [line for line in text.removeprefix("\ufeff").splitlines() if line.strip()]
    if lines and re.match(r"#\s*escape\s*=", lines[0], re.IGNORECASE):
        raise NotInBox("its Dockerfile has an escape character")
    joined = re.sub(r"[\\]\s*\n", " ", "\n".join(line for line in lines if not line.lstrip().startswith("#")))
    instructions = []
    for line in joined.splitlines():
        word, *rest = line.split(None, 1)
        if "<<" in line:
            raise NotInBox("its Dockerfile has texts of several lines (<<)")
        instructions.append((word.upper(), rest[0].strip() if rest else ""))
    return instructions


def _pairs(rest: str) -> list[str]:
    """Returns the NAME=VALUE of an ENV or ARG, whose older form is a name, then its value."""
    if re.search(r"\\\$|'[^']*\$", rest):
        raise NotInBox(f"its Dockerfile has a quoted $: {rest}")
    words = shell_words(rest)
    return [f"{words[0]}={' '.join(words[1:])}"] if len(words) > 1 and "=" not in words[0] else words


def _variables(pairs: Sequence[str], setup: BoxSetup) -> dict[str, str]:
    variables = {name: setup.expand(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    if wrong := [name for name in variables if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]:
        raise NotInBox(f"its Dockerfile sets {wrong[0]!r}")
    return variables


def _words_of(rest: str) -> list[str] | None:
    """Returns the words of an instruction in its JSON form; None if it has another form."""
    try:
        words = json.loads(rest)
    except (ValueError, RecursionError):
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _copy(setup: BoxSetup, line: str, files: Mapping[str, bytes], executables: set[str]) -> None:
    instruction, _, rest = line.partition(" ")
    words = [setup.expand(word) for word in _words_of(rest) or shell_words(rest)]
    options = [word for word in words if word.startswith("--")]
    *patterns, target = [word for word in words if word not in options] or [""]
    if not patterns or any(not option.startswith(("--chown=", "--chmod=")) for option in options):
        raise NotInBox(f"its Dockerfile has {line}")
    sources = [source for pattern in patterns for source in _sources(pattern, files)]
    path = PurePosixPath(setup.workdir) / target
    is_folder = target.endswith(("/", "/.")) or target == "." or len(sources) > 1 or str(path) in setup.workdirs
    copies: dict[str, bytes] = {}
    for source in sources:
        for key, content in files.items():
            if not PurePosixPath(key).is_relative_to(source):
                continue
            if instruction == "ADD" and key == source and tarfile.is_tarfile(io.BytesIO(content)):
                raise NotInBox(f"its Dockerfile unpacks {source}")
            relative = PurePosixPath(key).name if key == source else str(PurePosixPath(key).relative_to(source))
            place = path / relative if key != source or is_folder else path
            setup.claim(str(place.parent))
            copies[str(place)[1:]] = content
            if key in executables:
                setup.executables.add(str(place)[1:])
    setup.steps.append(copies)
    for option in options:
        if option.startswith("--chmod="):
            setup.steps.append(f"chmod {shlex.quote(option.partition('=')[2])} {shlex.join(copies)}")


def _sources(pattern: str, files: Mapping[str, bytes]) -> list[str]:
    """Returns the files and folders of the environment that a COPY names."""
    name = PurePosixPath(pattern.lstrip("/"))
    paths = {str(path) for key in files for path in (PurePosixPath(key), *PurePosixPath(key).parents)}
    matches = [path for path in paths if len(PurePosixPath(path).parts) == len(name.parts)]
    if re.search(r"[*?]", pattern):
        matches = [path for path in matches if PurePosixPath(path).match(str(name))]
    else:
        matches = [path for path in matches if path == str(name)]
    if "://" in pattern or not matches:
        raise NotInBox(f"its Dockerfile copies {pattern}, which is no file of its environment")
    return sorted(matches)


def _run(setup: BoxSetup, rest: str, packages: Sequence[Path]) -> None:
    def text_of(path: str) -> str | None:
        name = str(PurePosixPath(setup.workdir) / path)[1:]
        content = next((step[name] for step in reversed(setup.steps) if isinstance(step, dict) and name in step), None)
        return None if content is None else content.decode("utf-8", "replace")

    words = _words_of(rest)
    commands = strip_installs(rest if words is None else shlex.join(words), packages, text_of)
    for path in re.findall(r"(?<![\w.$}/:])/[\w.-]+(?:/[\w.-]+)?", commands):
        if PurePosixPath(path).parts[1] not in PROGRAMS:
            setup.claim(path)
    if commands:
        setup.commands.append(commands)
        setup.steps.append(f"{SHELL_OPTIONS}{setup.prelude({**setup.args, **setup.env})}{commands}")
