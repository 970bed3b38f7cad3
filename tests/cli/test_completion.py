"""`agentgym completion` writes scripts with which real shells complete commands, options and values."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from agentgym.cli.completion import all_help
from agentgym.cli.main import main

SHELLS = ("bash", "zsh", "fish")
CASES = {
    "agentgym ev": ["eval"],
    "agentgym env ": ["list", "check", "serve", "export", "new"],
    "agentgym env ch": ["check"],
    "agentgym new re": ["reward", "renderer"],
    "agentgym train --optimizer.le": ["--optimizer.learning-rate"],
    "agentgym train --env TextGame-v0 --executor ": ["local", "ray"],
    "agentgym eval --env Text": ["TextGame-v0"],
    "agentgym play Guess": ["GuessNumber-v0"],
    "agentgym play --se": ["--seed"],
    "agentgym env check TextGame-v0 --j": ["--json"],
    "agentgym completion ": ["bash", "zsh", "fish"],
    "agentgym view no-such-": [],
    "agentgym view --tok": ["--tokenizer"],
    "agentgym view co": [],
    "agentgym view ru": ["runs"],
    "agentgym eval --output ru": ["runs"],
    "agentgym evl --": ["--help"],
}
"""The words that complete each line, at its end."""
BASH = """
source completion.bash
for line in "${@}"; do
  COMP_LINE="$line" COMP_WORDS=($line)
  [[ "$line" == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  _agentgym
  echo "${COMPREPLY[@]}"
done
"""
FILES = {"agentgym view ru", "agentgym eval --output ru"}
"""The lines whose words are files, to which bash itself falls back."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three scripts, and with a folder `runs`."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "runs").mkdir()
    for shell in SHELLS:
        with (folder / f"completion.{shell}").open("w", encoding="utf-8") as file, redirect_stdout(file):
            assert main(["completion", shell]) == 0
    return folder


def test_a_shell_completes_commands_options_and_values(scripts: Path) -> None:
    done = subprocess.run(["bash", "-c", BASH, "bash", *CASES], cwd=scripts, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    words = dict(zip(CASES, map(str.split, done.stdout.splitlines()), strict=True))
    assert words == {line: [] if line in FILES else candidates for line, candidates in CASES.items()}


def test_bash_itself_completes_at_its_prompt(scripts: Path) -> None:
    """A real prompt, with Tab: bash splits words at `=`, and files are its own."""
    lines = ["agentgym eval --eng\t", "agentgym train --executor=lo\t", "agentgym view ru\t", "agentgym doct\t"]
    typed = "source completion.bash\nagentgym() { printf '<%s>' \"$@\"; echo; }\n"
    typed += "".join(f"{line}\n" for line in lines) + "exit\n"
    command = ["script", "-qec", "bash --noprofile --norc -i", "/dev/null"]
    done = subprocess.run(command, cwd=scripts, input=typed, capture_output=True, text=True, check=False, timeout=60)
    for words in ("<eval><--engine>", "<train><--executor=local>", "<view><runs/>", "<doctor>"):
        assert words in done.stdout, done.stdout


def test_the_shells_that_are_installed_read_their_scripts(scripts: Path) -> None:
    for shell in filter(shutil.which, SHELLS):
        subprocess.run([shell, "-n", f"completion.{shell}"], cwd=scripts, check=True)
    for line, candidates in CASES.items() if shutil.which("fish") else ():
        source = f"source completion.fish; complete -C '{line}'"
        done = subprocess.run(["fish", "-c", source], cwd=scripts, capture_output=True, text=True, check=True)
        assert {word.rstrip("/") for word in done.stdout.split()} == {*candidates}, line


def test_the_scripts_have_every_command_and_option(scripts: Path) -> None:
    texts = [(scripts / f"completion.{shell}").read_text(encoding="utf-8") for shell in SHELLS]
    for page in all_help():
        names = [name for option in page.options for name in option.names if name.startswith("--")]
        words = " ".join([*names, "--help"])
        assert all(f'"{page.prog} -"' in text and f'echo "{words}"' in text for text in texts), page.prog
