"""Reads the shell commands of a task: what they install that this machine has, and what they load from a network."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

from agentgym.errors import ConfigError

__all__ = ["NotInBox", "check_script", "find_download", "shell_words", "strip_installs"]

TOKEN = re.compile(
    r"""(?P<word>\\.|'[^']*'|"(?:\\.|[^"\\])*")|(?P<open>['"])|(?P<comment>(?<![^\s;&|(])\#[^\n]*)"""
    r"""|(?P<operator>&&|\|\||;;?|\n)|(?P<other>.)""",
    re.DOTALL,
)
NOTHING_TO_DO = (
    re.compile(r"(?:apt-get|apt)(?: -\S+)* (?:update|clean|autoremove|autoclean)(?: -\S+)*"),
    re.compile(r"rm -rf(?: (?:/var/(?:lib/apt|cache)|/root/\.cache)[\w./*-]*)+"),
    re.compile(r"ln -sf? /usr/bin/python3(?:\.\d+)? /usr/bin/python3?"),
    re.compile(r"true"),
)
"""The commands that a box does not need."""
QUIET = re.compile(r"\s+(?:\d?>\s*/dev/null|2>&1)(?=\s|$)")
INSTALL = re.compile(r"(apt-get|apt|pip3?|python3? -m pip) (?:-\S+ )*install (.*)")
PACKAGE = re.compile(r"([A-Za-z0-9][\w.+-]*)(?:\[[\w,-]*\])?(?:\s*[=<>~!;].*)?")
VALUED = re.compile(
    r"-[cefit]|--(?:constraint|editable|extra-index-url|find-links|index-url|prefix|root|target|target-release)(?:=.*)?"
)
"""Options of installations that change what is installed, or where."""
NEEDS_MORE = re.compile(
    r"(?<![\w/.-])(?:curl|wget|git clone|npm|npx|yarn|pnpm|gem|bundle|cargo|apt|apt-get|dpkg|apk|yum|dnf|"
    r"add-apt-repository|pip3?|pipx|uv|uvx|conda|useradd|adduser|groupadd|chown|mount|sudo|su|service|systemctl|"
    r"ldconfig|mknod)(?![\w.-])"
)
"""Programs that need a network, or root."""
PREFIX = r"(?:^|[|({!`]|\b(?:if|elif|then|else|do|while|until|sudo|exec|time)\s)\s*(?:\w+=\S*\s+)*"
DOWNLOAD = re.compile(
    PREFIX + r"((?:apt|apt-get|apk|yum|dnf|conda)(?=\s+(?:-\S+\s+)*(?:add|install|update)\b)|uvx|npx"
    r"|(?:uv|npm)(?=\s+(?:add|ci|install|pip|run|sync|tool)\b)|git\s+clone(?=.*(?:://|@))"
    r"|(?:curl|wget)(?=\s.*https?://(?!localhost|127\.|0\.0\.0\.0|\[::1\]|\$)))(?![\w.-])"
)
"""A command that loads from a network."""
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


class NotInBox(ConfigError):
    """A task that a box cannot play, and a container may."""


def shell_words(text: str) -> list[str]:
    """Splits a text as a shell does; raises NotInBox for an open quotation."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise NotInBox(f"it has {text!r:.80}, which is not read: {error}") from error


def strip_installs(text: str, packages: Sequence[Path], text_of: Callable[[str], str | None]) -> str:
    """Returns shell commands with `true` for each that has nothing to do in a box; "" if that is all of them.

    `text_of` returns the text of a file of requirements. Raises NotInBox for what is not on this machine.
    """
    parts = _split_commands(text)
    for index, command in enumerate(parts[::2]):
        short = _shorten(command)
        missing = _missing_packages(short, packages, text_of)
        if missing:
            raise NotInBox(f"its Dockerfile installs {', '.join(missing)}")
        if missing is not None or any(pattern.fullmatch(short) for pattern in NOTHING_TO_DO):
            parts[2 * index] = " true "
        elif match := NEEDS_MORE.search(command):
            raise NotInBox(f"its Dockerfile runs {match[0]}")
    return "" if {part.strip() for part in parts[::2]} <= {"true", ""} else "".join(parts).strip()


def check_script(script: str, packages: Sequence[Path]) -> None:
    """Raises NotInBox if a script of a verifier installs what a box does not have."""
    for command in _commands_of(script):
        if missing := _missing_packages(_shorten(command), packages, lambda _: None):
            raise NotInBox(f"its verifier installs {', '.join(missing)}")


def find_download(script: str) -> str:
    """Returns the first program of a script that loads from a network; "" if there is none."""
    return next((match[1] for command in _commands_of(script) if (match := DOWNLOAD.search(command))), "")


def _missing_packages(command: str, packages: Sequence[Path], text_of: Callable[[str], str | None]) -> list[str] | None:
    """Returns what a command installs that a box does not have; None if it installs nothing."""
    if not (install := INSTALL.fullmatch(command)):
        return None
    names, words = [], iter(shell_words(install[2]))
    for word in words:
        if word in ("-r", "--requirement") and (text := text_of(next(words, ""))) is not None:
            names += [line for row in text.splitlines() if (line := row.partition("#")[0].strip())]
        elif word.startswith("-r") or VALUED.fullmatch(word):
            return [f"with {word}"]
        elif not word.startswith("-"):
            names.append(word)
    has = _has_package if install[1].startswith("apt") else functools.partial(_has_distribution, tuple(packages))
    return sorted({name for name in names if not (match := PACKAGE.fullmatch(name)) or not has(match[1])})


def _commands_of(script: str) -> Iterator[str]:
    for line in script.replace("\\\n", " ").splitlines():
        try:
            yield from map(str.strip, _split_commands(line)[::2])
        except NotInBox:  # a quotation over several lines
            yield line.strip()


def _split_commands(text: str) -> list[str]:
    """Returns commands, and between each two of them their operator; comments are left out."""
    parts = [""]
    for match in TOKEN.finditer(text):
        if match.lastgroup == "operator":
            parts += [match[0], ""]
        elif match.lastgroup == "open":
            raise NotInBox(f"it has {text!r:.80}, which is not read: a quotation has no end")
        elif match.lastgroup != "comment":
            parts[-1] += match[0]
    return parts


def _shorten(command: str) -> str:
    return " ".join(QUIET.sub("", f" {command}").split())


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
