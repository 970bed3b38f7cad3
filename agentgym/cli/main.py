"""The command `agentgym`: finds the command that is asked for, loads it alone, and turns errors into exit codes.

Each command is a module of this package, or of a folder in it, with `main(args) -> int`, loaded when it is called: no
command pays for another one's libraries, and `agentgym --help` loads none. Exit codes: 0 done, 1 failed or found
something wrong, 2 asked for what cannot be done, 130 interrupted, 143 ended in order by SIGTERM.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from agentgym.cli import end_at_once
from agentgym.cli.help_text import HELP_OPTIONS, Help
from agentgym.cli.signals import INTERRUPTED, sigterm_as_interrupt
from agentgym.cli.terminal import accept_any_text, fail, json_alone, terminal_width, warnings_shown
from agentgym.errors import (
    AgentGymError,
    ConfigError,
    EnvironmentFault,
    MissingSetting,
    RunFolderError,
    UnknownName,
    UserCodeFault,
    nearest,
)
from agentgym.home_folder import ensure_home

__all__ = ["COMMANDS", "command", "main", "run"]

COMMANDS = {
    "train": "train a model on an environment",
    "sft": "train a model on demonstrations, conversations or recorded episodes",
    "dpo": "train a model on pairs of a better and a worse reply",
    "import": "write the settings of a verl or TRL training as settings of ours",
    "eval": "play held-out episodes with a model or a policy, and count successes",
    "compare": "compare evaluations task by task",
    "rescore": "give recorded episodes another reward, and compare it with the old one",
    "generate": "sample replies to the prompts of a file",
    "serve": "let agents outside play episodes, over OpenAI's chat completions",
    "play": "play an environment yourself, in the terminal",
    "env": "list, check or create environments",
    "new": "write a small environment, tool, reward or other part of your own, with its test",
    "tools": "list tools; read replies and the calls in them",
    "corpus": "make documents searchable for tools; search and read them",
    "sandbox": "run an untrusted program, in a box",
    "algorithms": "list advantage estimators, losses and what else training takes by name",
    "view": "show runs in the browser: why episodes fail, every episode, every token",
    "episodes": "find and print a run's episodes, or write them as a table (parquet)",
    "models": "list the architectures that train; check a model before training",
    "verify": "recompute what a run recorded, token by token",
    "export": "write a checkpoint as a model folder",
    "reward-server": "score the episodes of trainings elsewhere, with any reward",
    "fake-server": "serve scripted replies as an SGLang server would, without a GPU",
    "plan": "predict the memory of a run's GPUs",
    "docs": "read the documentation, page by page",
    "doctor": "show versions, and what to install for what is missing",
    "completion": "write the script with which a shell completes commands and options",
}
"""Each command's one line of help; the module of the same name (`_` for `-`) in this package is the command."""
MODULES = {
    "sft": "lessons.sft",
    "dpo": "lessons.dpo",
    "import": "foreign.command",
    "rescore": "scores.rescore",
    "reward-server": "scores.reward_server",
    "episodes": "episodes.command",
    "docs": "display.docs",
}
"""The commands that are modules of a folder in this package."""
CLOSING = """
`agentgym COMMAND --help` shows a command's options. To begin with:

  agentgym env list
  agentgym play TextGame-v0
  agentgym eval --env TextGame-v0 --policy oracle"""


def run() -> NoReturn:
    """Runs the command line of this process and ends the process."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # registered first, so that it is called last
    try:
        codes.append(main())
    except KeyboardInterrupt:  # a second one, while the first was answered
        codes.append(INTERRUPTED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end takes no time, and has its exit code
    sys.exit(codes[0])


def _leave(codes: Sequence[int]) -> None:
    """Ends the process at once: Python's own end takes a second with torch, and aborts in a `torch.compile`."""
    if codes:
        sys.stdout.flush()  # if it fails, Python's own end says so, with an exit code of its own
        sys.stderr.flush()
        os._exit(codes[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; an error of ours is one line on standard error."""
    ensure_home()
    accept_any_text()
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        print(_help().to_text(terminal_width()))
        return 2
    output = json_alone() if "--json" in args else contextlib.nullcontext()
    with sigterm_as_interrupt() as termination:
        try:
            with output, warnings_shown():
                try:
                    if signal.getsignal(signal.SIGINT) is end_at_once:
                        signal.signal(signal.SIGINT, signal.default_int_handler)
                    code = command(args[0])(args[1:])
                except (Exception, KeyboardInterrupt) as error:
                    own_code = _exit_code(error, args[0])
                    if own_code is None:
                        raise
                    code = own_code
                return termination.exit_code(code)
        except BrokenPipeError:  # `agentgym env list | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def _exit_code(error: BaseException, name: str) -> int | None:
    """Prints an error of ours, or the help that was asked for, and returns the exit code; None for any other error."""
    match error:
        case Help():
            print(error.to_text(terminal_width()))
            return 0
        case MissingSetting():
            text, code = str(error).replace("missing ", "missing --", 1), 2
        case ConfigError() | UnknownName() | RunFolderError():  # the caller asks for something else
            text, code = str(error), 2
        case EnvironmentFault() | UserCodeFault():
            import_module("agentgym.cli.environment").show_traceback(error)  # the code that raised has loaded it
            text, code = str(error), 1
        case AgentGymError():
            text, code = str(error).partition("\nTraceback")[0], 1  # the traceback was logged when it happened
        case ModuleNotFoundError(name="torch"):
            text, code = f"{name} needs torch, which is not installed: `agentgym doctor` shows the command", 2
        case RuntimeError() if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
            text, code = (
                (
                    f"a GPU has no memory left ({str(error).partition('. ')[0]}). Shorter passes (micro-batch-tokens),"
                    " recomputation (activation-checkpointing), adapters (lora.rank) and fewer slots of the engine"
                    " (local.num-slots) take less; `agentgym plan` says how much"
                ),
                1,
            )
        case KeyboardInterrupt():
            text, code = "interrupted", INTERRUPTED
        case _:
            return None
    fail(text)
    return code


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Returns the function of a command; raises UnknownName if there is none, Help for help."""
    if name in (*HELP_OPTIONS, "help"):
        raise _help()
    if name in ("-V", "--version"):
        return _show_version
    names = _available()
    if name not in names:
        what = "option" if name.startswith("-") else "command"
        raise UnknownName(f"unknown {what} {name!r}{nearest(name, names) or '.'} `agentgym --help` shows all commands")
    function: Callable[[Sequence[str]], int] = import_module(_module(name)).main
    return function


def _show_version(args: Sequence[str]) -> int:
    print(f"agentgym {import_module('agentgym').__version__}")
    return 0


def _available() -> dict[str, str]:
    return {name: line for name, line in COMMANDS.items() if find_spec(_module(name)) is not None}


def _module(name: str) -> str:
    return f"agentgym.cli.{MODULES.get(name, name.replace('-', '_'))}"


def _help() -> Help:
    return Help(
        prog="agentgym",
        summary="A Gymnasium for language-model agents: play, evaluate and train on text environments with tools.",
        commands=_available(),
        closing=CLOSING,
    )
