"""`agentgym env export`: writes a package of OpenEnv or verifiers that serves an environment, or tasks for Harbor."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from agentgym.cli.environment import load_env
from agentgym.cli.options import env_as_argument, parse_options
from agentgym.cli.scaffold import fill_scaffold, write_files
from agentgym.cli.sharing.harbor_folders import harbor_texts
from agentgym.cli.terminal import say, show_json
from agentgym.envs.adapters.namespaces import namespace_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.catalog.identity import EnvIdentity, identify_env
from agentgym.envs.catalog.packages import DISTRIBUTION
from agentgym.envs.catalog.resolve import stem_of
from agentgym.errors import ConfigError
from agentgym.types import JSON

__all__ = ["main"]

TEMPLATES: Mapping[str, Mapping[str, str]] = {
    "openenv": {
        "openenv.yaml": "openenv.yaml",
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        "__init__.py": "__init__.py",
        "client.py": "client.py",
        "models.py": "models.py",
        "server/__init__.py": "server.py",
        "server/app.py": "app.py",
        "server/Dockerfile": "Dockerfile",
    },
    "verifiers": {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        "{module}/__init__.py": "__init__.py",
    },
}
"""The templates of each library, by the path of the file that is written."""
CODE = {"openenv": "server", "verifiers": "{module}"}
"""The folder that an environment's own file is copied into."""
COMMANDS = {
    "openenv": (
        "pip install {folder}",
        "cd {folder} && uvicorn server.app:app --port 8000",
        "agentgym play openenv/http://127.0.0.1:8000",
    ),
    "verifiers": (
        "pip install {folder}",
        "vf-eval {name} -m MODEL --client.base-url http://HOST:8000/v1 -n 20 -r 3 --no-push",
        "agentgym eval --env verifiers/{name} --policy http://HOST:8000/v1",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ExportEnvOptions:
    """Writes a package that serves an environment in another library, or its tasks as folders."""

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """The id of a bundled or installed environment, or path/to/file.py:Class, whose file is copied."""
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The folder to write; it must be new or empty."""
    to: Literal["openenv", "verifiers", "harbor"]
    """openenv: a FastAPI application with Dockerfile and client. verifiers: a taskset and its program, for 0.4.
    harbor: a folder for each task, of an environment whose tasks are files to work on."""
    tasks: int = 8
    """The number of tasks for Harbor: those of the seeds from `--seed` on."""
    seed: int = 0
    """The seed of the first task for Harbor."""
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Keywords of the environment's class that the package passes, such as level=2."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym env export`."""
    options = parse_options(ExportEnvOptions, env_as_argument(args), prog="agentgym env export")
    if namespace_of(options.env) is not None:
        raise ConfigError(f"{options.env!r} is an environment of another library: only agentgym's own are exported")
    if options.tasks < 1 or options.seed < 0:
        raise ConfigError(f"tasks is at least 1 and seed at least 0, got {options.tasks} and {options.seed}")
    env = load_env(options.env, options.env_kwargs)
    env.close()
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise ConfigError(f"{str(options.output)!r} exists already: name a new folder")
    if options.to == "harbor":
        return _write_tasks(options, env)
    module, _, thing = options.env.rpartition(":")
    file = Path(module) if module.endswith(".py") else None
    identity = identify_env(options.env)
    if file is None and identity.package is None:
        raise ConfigError(
            f"{options.env!r} is in no installed package: name its file (path/to/file.py:{thing}), which is copied, or"
            " install it (`agentgym new env NAME --package` writes a package)"
        )
    values = _values(options, identity, file) | _reward_range(env)
    texts = {
        options.output / path.format(**values): fill_scaffold(options.to, name, values)
        for path, name in TEMPLATES[options.to].items()
    }
    if file is not None:
        copy = options.output / CODE[options.to].format(**values) / file.name
        if copy in texts:
            raise ConfigError(f"the package itself has a file {file.name!r}: give yours another name")
        texts[copy] = file.read_text(encoding="utf-8")
    write_files(texts, options.output)
    folder = shlex.quote(str(options.output) if options.output.is_absolute() else f"./{options.output}")
    commands = [command.format(folder=folder, name=values["folder"]) for command in COMMANDS[options.to]]
    say(f"wrote {options.output}: {values['title']} for {options.to}, {len(texts)} files")
    if values["note"]:
        say(values["note"].strip())
    for number, command in enumerate(commands):
        say(f"{'' if number else 'next:':<7}{command}")
    if options.json:
        show_json({"name": values["folder"], "files": [str(path) for path in texts], "commands": [*commands]})
    return 0


def _write_tasks(options: ExportEnvOptions, env: TextEnv) -> int:
    seeds = range(options.seed, options.seed + options.tasks)
    with contextlib.closing(env):
        texts = harbor_texts(env, options.env, options.env_kwargs, seeds)
    write_files({options.output / path: text for path, text in texts.items()}, options.output)
    folder = f"harbor/{options.output}"
    commands = [f"agentgym env check {shlex.quote(folder)}", f"agentgym play {shlex.quote(folder)}"]
    say(f"wrote {options.output}: {options.tasks} tasks, {len(texts)} files")
    for number, command in enumerate(commands):
        say(f"{'' if number else 'next:':<7}{command}")
    if options.json:
        show_json({"name": str(options.output), "files": [str(path) for path in texts], "commands": [*commands]})
    return 0


def _reward_range(env: TextEnv) -> dict[str, str]:
    low, high = (0.0, 1.0) if env.card is None else env.card.reward_range
    return {"low": str(float(low)), "high": str(float(high))}


def _values(options: ExportEnvOptions, identity: EnvIdentity, file: Path | None) -> dict[str, str]:
    """Returns what the templates are filled with."""
    thing = options.env.rpartition(":")[2]
    stem = re.sub(r"\W+", "_", re.sub(r"-v\d+$", "", stem_of(options.env)))
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", stem).lower() + "_env"
    values = {
        "env": options.env,
        "title": stem,
        "module": module,
        "folder": module.replace("_", "-"),
        "name": "".join(word.capitalize() for word in module.removesuffix("_env").split("_")),  # as OpenEnv infers it
        "place": f'"{options.env}"',
        "imports": "",
        "kwargs": repr(dict(options.env_kwargs)),
        "requires": f'"{DISTRIBUTION}>=0.1"',
        "note": "",
    }
    if file is not None:
        values |= {
            "env": f"{file.name}:{thing}",
            "place": f"f\"{{Path(__file__).with_name('{file.name}')}}:{thing}\"",
            "imports": "from pathlib import Path\n\n",
            "note": f"It has a copy of {file.name}; what that file imports besides agentgym has to be added.",
        }
    elif identity.package != DISTRIBUTION:
        values["requires"] = f'"{identity.package}=={identity.package_version}"'
        values["note"] = f"It needs {identity.package} {identity.package_version}, which pip has to find."
    values["note"] = values["note"] and f"\n\n{values['note']}"
    return values
