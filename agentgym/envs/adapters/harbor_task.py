"""Reads a task in Harbor's form: a folder with `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`."""

from __future__ import annotations

import functools
import logging
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentgym.envs.adapters.harbor_shell import find_download
from agentgym.errors import ConfigError

__all__ = ["HarborTask", "list_executables", "read_harbor_tasks", "read_tree"]

_log = logging.getLogger(__name__)
CONFIG, INSTRUCTION, DOCKERFILE = "task.toml", "instruction.md", "environment/Dockerfile"
TEST, SOLUTION = "tests/test.sh", "solution/solve.sh"
FOLDERS = ("environment", "solution", "tests")
VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
MAX_FILES, MAX_TREE_BYTES = 4096, 64 << 20
"""The most files, and bytes, of one folder that is copied into a machine."""
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml", "singularity-compose.yaml")
CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
"""A line that marks the origin of data, which an agent is not shown."""
DEFAULT = re.compile(r"\$\{[^}:]+(?::-(.*))?\}")
"""A value that Harbor takes from a variable of its machine, and the default of that variable."""
MAX_NUMBER = 1e8
"""The largest number of seconds, cores or MiB."""
SIZES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
KEYS = {
    "": "schema_version version task metadata verifier agent environment solution source artifacts steps "
    "multi_step_reward_strategy",
    "agent": "timeout_sec user network_mode allowed_hosts",
    "verifier": "timeout_sec env user environment_mode environment collect network_mode allowed_hosts",
    "environment": "build_timeout_sec docker_image os cpus memory_mb storage_mb memory storage gpus gpu_types tpu "
    "mcp_servers env skills_dir healthcheck workdir allow_internet network_mode allowed_hosts",
    "solution": "env",
}
"""The keys of each table that Harbor 0.26 reads."""
REFUSED = {
    "steps": "a task of several steps",
    "environment.gpus": "a GPU",
    "environment.tpu": "a TPU",
    "environment.mcp_servers": "MCP servers",
    "environment.skills_dir": "skills for the agent",
    "environment.healthcheck": "a service that has to come up",
    "environment.allowed_hosts": "a network",
    "agent.user": "a user of its own: all commands are run by one ordinary user",
    "verifier.user": "a user of its own: all commands are run by one ordinary user",
    "verifier.environment": "a second machine",
    "verifier.collect": "a second machine",
}
"""What cannot be played, by the key that asks for it; a false value asks for nothing, except the user 0."""


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """One task, as its files define it."""

    folder: Path
    instruction: str
    config: Mapping[str, Any]
    """All of `task.toml`, keys that we do not know included."""
    agent_timeout_s: float
    """The seconds of all commands of the agent together; infinite if the file has none."""
    verifier_timeout_s: float
    cpus: float
    memory_mb: int
    storage_mb: int
    has_solution: bool

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def solution_s(self) -> float:
        """The seconds of its solution; an hour if the file has no limit."""
        return 3600.0 if math.isinf(self.agent_timeout_s) else self.agent_timeout_s

    def env_of(self, table: str) -> dict[str, str]:
        """Returns the variables of a table: environment, verifier or solution."""
        env = self.config.get(table, {}).get("env", {})
        return {name: match[1] if (match := DEFAULT.fullmatch(value)) else value for name, value in env.items()}

    @functools.cached_property
    def digest(self) -> str:
        """The digest, in hex, of its instruction and of the names and sizes of its files."""
        files = [(str(path.relative_to(self.folder)), path.stat().st_size) for path in _list_files(self.folder)]
        return sha256(repr((self.instruction, files)).encode()).hexdigest()[:16]

    def text_of(self, path: str) -> str:
        """Returns the text of one of its files; "" if there is none."""
        file = self.folder / path
        return file.read_text("utf-8", "replace") if file.is_file() else ""


def read_harbor_tasks(path: str) -> list[HarborTask]:
    """Reads a task's folder, or every one in a folder of them, in the order of their names.

    Raises ConfigError, with the file and the key, for what is broken and for what cannot be played. In a folder of
    tasks such ones are left out with a warning, unless all are.
    """
    folder = Path(path).expanduser().resolve()
    if (folder / CONFIG).is_file():
        return [_read_task(folder)]
    if not folder.is_dir():
        raise ConfigError(
            f"harbor/PATH is a folder with a {CONFIG}, or a folder of such folders; {path!r} is no folder"
        )
    folders = sorted(child for child in folder.iterdir() if (child / CONFIG).is_file())
    if not folders:
        raise ConfigError(f"{folder} has no {CONFIG}, and none of its folders has one")
    tasks, errors = [], []
    for child in folders:
        try:
            tasks.append(_read_task(child))
        except ConfigError as error:
            errors.append(str(error))
            _warn_once(f"left out: {error}")
    if not tasks:
        raise ConfigError(f"none of the {len(errors)} tasks in {folder} can be played; the first one: {errors[0]}")
    return tasks


def read_tree(folder: Path) -> dict[str, bytes]:
    """Returns every file below a folder, by its path there; {} if there is no folder.

    Raises ConfigError for links and special files, and for more than 4,096 files or 64 MiB.
    """
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in _list_tree(folder)}


def list_executables(folder: Path) -> set[str]:
    """Returns the files below a folder that are programs, by their paths there."""
    return {path.relative_to(folder).as_posix() for path in _list_tree(folder) if path.stat().st_mode & 0o100}


def _list_files(folder: Path) -> list[Path]:
    """Returns the files of a task, in order; others in its folder, such as a README, are no part of it."""
    files = [path for name in FOLDERS for path in _list_tree(folder / name)]
    for name in (CONFIG, INSTRUCTION):
        if (folder / name).is_symlink():
            raise ConfigError(f"{folder / name} is a link: a task consists of plain files and folders")
    return sorted([*files, folder / CONFIG, folder / INSTRUCTION])


def _list_tree(folder: Path) -> list[Path]:
    files: list[Path] = []
    size = 0
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link: a task consists of plain files and folders")
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is a link or a special file: a task consists of plain files and folders")
        if path.is_file():
            size += path.stat().st_size
            if size > MAX_TREE_BYTES or len(files) >= MAX_FILES:
                raise ConfigError(f"{folder} has more than {MAX_FILES:,} files or {MAX_TREE_BYTES >> 20} MiB")
            files.append(path)
    return files


def _read_task(folder: Path) -> HarborTask:
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link: a task consists of plain files and folders")
    try:
        return _read_parts(folder, folder / CONFIG)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from error


def _read_parts(folder: Path, file: Path) -> HarborTask:
    try:
        config = tomllib.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    _check_tables(file, config)
    _refuse(file, config)
    for path in (INSTRUCTION, TEST):
        if not (folder / path).is_file():
            raise ConfigError(f"{folder} has no {path}")
    for script in _list_files(folder):
        is_test = script.suffix == ".sh" and script.is_relative_to(folder / "tests")
        if is_test and (program := find_download(script.read_text("utf-8", "replace"))):
            raise ConfigError(f"{script}: the verifier runs {program}, which needs a network, and there is none")
    if compose := next((name for name in COMPOSE if (folder / "environment" / name).exists()), None):
        raise ConfigError(f"{folder}/environment/{compose}: several containers cannot be played")
    if not (folder / DOCKERFILE).is_file() and not config.get("environment", {}).get("docker_image"):
        raise ConfigError(f"{folder} has no {DOCKERFILE}, and {CONFIG} names no environment.docker_image")
    instruction = _without_canary((folder / INSTRUCTION).read_text("utf-8", "replace"))
    if not instruction.strip():
        raise ConfigError(f"{folder / INSTRUCTION} is empty")
    environment = config.get("environment", {})
    return HarborTask(
        folder=folder,
        instruction=instruction,
        config=config,
        agent_timeout_s=_number(file, config, "agent.timeout_sec", math.inf),
        verifier_timeout_s=_number(file, config, "verifier.timeout_sec", 600.0),
        cpus=_number(file, config, "environment.cpus", 1.0),
        memory_mb=int(_number(file, config, "environment.memory_mb", _size(file, environment, "memory", 2048.0))),
        storage_mb=int(_number(file, config, "environment.storage_mb", _size(file, environment, "storage", 10240.0))),
        has_solution=(folder / SOLUTION).is_file(),
    )


def _check_tables(file: Path, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a version, table or variable of a wrong form; warns of unknown keys once for each file."""
    version = config.get("schema_version", config.get("version", VERSIONS[-1]))
    if version not in VERSIONS:
        raise ConfigError(f"{file}: schema_version: {version!r} is not read; {', '.join(VERSIONS)} are")
    unknown = []
    for table, names in KEYS.items():
        values = config.get(table, {}) if table else config
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: {table}: a table is expected, got {values!r:.80}")
        unknown += [f"{table}.{key}".lstrip(".") for key in values if key not in names.split()]
        env = values.get("env", {})
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise ConfigError(f"{file}: {table}.env: a table of texts is expected, got {env!r:.80}")
        for name, value in env.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ConfigError(f"{file}: {table}.env: {name!r} cannot be the name of a variable")
            if (match := DEFAULT.fullmatch(value)) and match[1] is None:
                raise ConfigError(f"{file}: {table}.env.{name}: it is a variable of this machine, and none goes in")
    if unknown:
        _warn_once(f"{file}: unknown keys, which are kept and not used: {', '.join(unknown)}")


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


def _refuse(file: Path, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for what a task asks for and cannot get."""
    for key, what in REFUSED.items():
        value = _at(config, key)
        if value or (key.endswith(".user") and value is not None):
            raise ConfigError(f"{file}: {key}: the task needs {what}, which cannot be played")
    environment = config.get("environment", {})
    if str(environment.get("os", "linux")).lower() != "linux":
        raise ConfigError(f"{file}: environment.os: the task needs {environment['os']!r}, and there is Linux")
    mode = environment.get("network_mode", "public")
    for table in ("environment", "agent", "verifier"):
        own = config.get(table, {}).get("network_mode", mode)
        if own not in ("public", "no-network") or (own == "public" and mode != "public"):
            raise ConfigError(f"{file}: {table}.network_mode: the task needs a network, which cannot be played")
    if config.get("verifier", {}).get("environment_mode", "shared") != "shared":
        raise ConfigError(f"{file}: verifier.environment_mode: the task needs a second machine")
    for key in ("docker_image", "workdir"):
        if not isinstance(value := environment.get(key, ""), str) or "\n" in value:
            raise ConfigError(f"{file}: environment.{key}: a text of one line is expected, got {value!r:.80}")


def _at(config: Mapping[str, Any], key: str) -> Any:
    table, _, name = key.rpartition(".")
    return (config.get(table, {}) if table else config).get(name)


def _number(file: Path, config: Mapping[str, Any], key: str, default: float) -> float:
    value = _at(config, key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
        raise ConfigError(f"{file}: {key}: a positive number is expected, at most {MAX_NUMBER:g}, got {value!r:.80}")
    return float(value)


def _size(file: Path, environment: Mapping[str, Any], key: str, default: float) -> float:
    """Returns the MiB of a size as files of version 1.0 write it, such as 2G; Harbor ignores a number."""
    if not isinstance(value := environment.get(key), str):
        return default
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])B?\s*", value, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(f"{file}: environment.{key}: a size such as 2G is expected, got {value!r:.80}")
    size = max(1.0, float(match[1]) * SIZES[match[2].upper()])
    if environment.get(f"{key}_mb", int(size)) != int(size):
        raise ConfigError(f"{file}: environment.{key}: {value} is not the {environment[f'{key}_mb']!r} of {key}_mb")
    return size


def _without_canary(text: str) -> str:
    lines = text.split("\n")
    while lines and (not lines[0].strip() or CANARY.fullmatch(lines[0].strip())):
        lines.pop(0)
    return "\n".join(lines)
