"""`agentgym completion bash|zsh|fish`: writes the script with which a shell completes commands, options and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import tyro

from agentgym.cli.help_text import Help
from agentgym.cli.main import command
from agentgym.cli.options import parse_options
from agentgym.envs.catalog.plugin import BUNDLED

__all__ = ["all_help", "main"]


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Writes the script with which a shell completes the commands, options and values of agentgym.

    bash: agentgym completion bash > ~/.local/share/bash-completion/completions/agentgym

    zsh: agentgym completion zsh > FOLDER/_agentgym, a folder of $fpath

    fish: agentgym completion fish > ~/.config/fish/completions/agentgym.fish
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym completion ...`."""
    options = parse_options(CompletionOptions, args, prog="agentgym completion")
    script = files("agentgym.cli").joinpath("shells", f"completion.{options.shell}").read_text(encoding="utf-8")
    words = _words()
    for line in script.splitlines():
        for key in [key for key in words if words[key]] if "@WORDS@" in line else [""]:
            print(line.replace("@KEY@", key).replace("@WORDS@", " ".join(words.get(key, ()))))
    return 0


def all_help(words: Sequence[str] = ()) -> Iterator[Help]:
    """Yields the help of a command and of all commands in it; without words, of agentgym and all of its commands."""
    name, *rest = (*words, "--help")
    try:
        command(name)(rest)
    except Help as page:
        yield page
        for inner in page.commands:
            yield from all_help((*words, inner))


def _words() -> Mapping[str, Sequence[str]]:
    """Returns what may follow a command (`agentgym env`), its options (`agentgym eval -`) and an option's values."""
    words: dict[str, Sequence[str]] = {}
    for page in all_help():
        arguments = [option for option in page.options if not option.names]
        values = {option.setting: option.choices for option in page.options} | {"env": tuple(BUNDLED)}
        names = [name for option in page.options for name in option.names if name.startswith("--")]
        words[page.prog] = [*page.commands, *(values[arguments[0].setting] if arguments else names)]
        words[f"{page.prog} -"] = [*names, "--help"]
        words |= {f"{page.prog} {name}": values[option.setting] for option in page.options for name in option.names}
    return words
