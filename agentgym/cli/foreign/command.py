"""`agentgym import`: writes another library's training settings as ours, and lists what became of each."""

from __future__ import annotations

import os
import secrets
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from agentgym.cli.foreign.keys import Line, Outcome, Translation, translate
from agentgym.cli.foreign.trl_file import TrlTrainer, read_trl
from agentgym.cli.foreign.trl_keys import TRL_ALWAYS, TRL_KEYS
from agentgym.cli.foreign.trl_lessons import DPO_KEYS, SFT_KEYS
from agentgym.cli.foreign.verl_file import read_verl
from agentgym.cli.foreign.verl_keys import VERL_ALWAYS, VERL_KEYS
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_from_mapping, flatten_settings
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.lessons.config import DpoConfig, SftConfig

__all__ = ["main"]

TITLES: dict[Outcome, str] = {
    "translated": "translated",
    "by default": "their defaults, written out because ours differ",
    "same": "the same by our default, or part of another setting",
    "lost": "no counterpart",
    "unknown": "unknown, and left out",
}
"""The outcomes in the order in which they are printed."""
SOURCES = {"sft": "conversations", "dpo": "pairs"}
"""The settings for the files of rows, by the command."""
MAX_ALIKE = 3
"""The keys of one pattern that are printed one by one."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Writes the settings of a training with verl or TRL as YAML for the --config of `agentgym train`, `sft` or `dpo`,
    and lists what became of each: translated, the same by our default, or without counterpart. A script is read, and
    never run."""

    library: tyro.conf.Positional[Literal["verl", "trl"]]
    """The library that the settings are written for."""
    file: tyro.conf.Positional[Path]
    """verl: a configuration (.yaml), or a script (.sh) that starts verl.trainer.main_ppo. trl: arguments of GRPOConfig,
    SFTConfig or DPOConfig (.yaml, .json), or a script (.py) that makes one of them and its trainer."""
    overrides: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[KEY=VALUE ...]")] = ()
    """Settings of theirs that win over those of the file, such as data.train_batch_size=64."""
    trainer: TrlTrainer | None = None
    """TRL's trainer: `grpo` is `agentgym train`, `sft` and `dpo` are the commands of those names. None is that of the
    script, and grpo for arguments."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("run.yaml")
    """The file to write; one that exists is refused."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym import ...`."""
    options = parse_options(ImportOptions, args, prog="agentgym import")
    if not options.file.is_file():
        raise ConfigError(f"no file {str(options.file)!r}")
    if options.output.exists():
        raise ConfigError(f"{str(options.output)!r} exists: name another file with --output, or remove it")
    if options.trainer is not None and options.library != "trl":
        raise ConfigError("--trainer is one of TRL's: leave it out")
    command, translation = _translate(options)
    settings = translation.as_nested()
    if command == "train":
        _check(settings)
    else:
        config_from_mapping(_lesson(command), settings | _some_rows(command, settings))
    source = f"# Written by `agentgym import {options.library} {shlex.quote(str(options.file))}`.\n"
    _write_new(options.output, source + yaml.safe_dump(settings, sort_keys=False))
    for outcome in TITLES:
        _show_lines(TITLES[outcome], [line for line in translation.lines if line.outcome == outcome])
    _show_summary(options, command, translation)
    if options.json:
        show_json(_as_json(options, translation))
    return 0


def _write_new(path: Path, text: str) -> None:
    """Writes a file that no other process has made meanwhile; raises ConfigError, and leaves nothing, if it cannot."""
    part = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.link(part, path)  # refused if it exists
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}; name another file with --output") from error
    finally:
        part.unlink(missing_ok=True)


def _translate(options: ImportOptions) -> tuple[str, Translation]:
    """Returns the command that the settings are for, and their translation."""
    if options.library == "verl":
        return "train", translate(read_verl(options.file, options.overrides), VERL_KEYS, VERL_ALWAYS)
    trainer, foreign_settings = read_trl(options.file, options.overrides, options.trainer)
    if trainer == "grpo":
        return "train", translate(foreign_settings, TRL_KEYS, TRL_ALWAYS)
    keys = SFT_KEYS if trainer == "sft" else DPO_KEYS
    defaults = asdict(config_from_mapping(_lesson(trainer), _some_rows(trainer, {})))
    return trainer, translate(foreign_settings, keys, defaults=flatten_settings(defaults))


def _lesson(command: str) -> type[SftConfig | DpoConfig]:
    """Returns the settings of a command."""
    return SftConfig if command == "sft" else DpoConfig


def _some_rows(command: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings that name rows where there are none, which may be named later."""
    return {} if settings.get(SOURCES[command]) else {SOURCES[command]: ["rows.jsonl"]}


def _check(settings: dict[str, Any]) -> None:
    """Raises ConfigError for settings that no run could have; tasks may be named later."""
    data = settings.get("data", {})
    has_tasks = "env" in settings or "train" in data or "eval" in data
    config_from_mapping(TrainConfig, settings if has_tasks else {**settings, "env": "?"})


def _show_lines(title: str, lines: Sequence[Line]) -> None:
    """Prints lines; more than three keys of one pattern and reason are one line."""
    if not lines:
        return
    say(f"{title} ({len(lines)}):")
    counted = Counter((line.pattern, line.ours) for line in lines if line.pattern)
    many = {group for group, count in counted.items() if count > MAX_ALIKE}
    groups_so_far = set()
    for line in lines:
        group = (line.pattern, line.ours)
        theirs = f"{line.theirs}={_short(line.value)} -> " if line.theirs else ""
        if group in many:
            theirs = f"{line.pattern} ({counted[group]} keys) -> "
        if group not in groups_so_far:
            say(f"  {theirs}{line.ours}")
        groups_so_far |= {group} & many


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _show_summary(options: ImportOptions, command: str, translation: Translation) -> None:
    counted = ", ".join(
        f"{len(translation.of(outcome))} {outcome}" for outcome in ("translated", "same", "lost", "unknown")
    )
    say(f"{options.output}: {counted}; docs/{options.library}.md has the whole table")
    if command == "train" and not {"env", "data.train"} & translation.settings.keys():
        say("  no tasks are named in it: add env, or train below data")
    if command != "train" and not {*SOURCES.values()} & translation.settings.keys():
        say(f"  no rows are named in it: add {SOURCES[command]}")
    say(f"try next: agentgym {command} --config {options.output}{' --dry-run' if command == 'train' else ''}")


def _as_json(options: ImportOptions, translation: Translation) -> dict[str, Any]:
    report: dict[str, Any] = {"output": str(options.output), "settings": translation.settings}
    for outcome in TITLES:
        report[outcome.replace(" ", "_")] = [
            {"theirs": line.theirs, "value": line.value, "ours": line.ours} for line in translation.of(outcome)
        ]
    return report
