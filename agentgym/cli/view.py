"""`agentgym view`: writes a run's report, one offline page."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tokenizers import Tokenizer

from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.cli.options import parse_options
from agentgym.cli.run_folder import model_folder_of_run, open_here
from agentgym.cli.terminal import say, show_json
from agentgym.errors import RunFolderError
from agentgym.viewer import RunData, TokenText, read_run, write_report

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Writes report.html into a run folder: curves, episodes, and every token with its source."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    tokenizer: str | None = None
    """The model folder of these tokens; by default that of the run's config.yaml."""
    max_episodes: int = 200
    """Episodes shown token by token."""
    open: bool = False
    """Show the page in the browser."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym view ...`."""
    options = parse_options(ViewOptions, args, prog="agentgym view")
    data = read_run(options.run)  # reports a fault of the folder before one of its tokenizer
    folder, lacking = open_here(model_folder_of_run, options.run, options.tokenizer)
    tokenizer = None if folder is None else ChatTokenizer.load(folder, needs_template=False)
    try:
        path = _write(options, data, None if tokenizer is None else tokenizer.backend)
    except OSError as error:
        raise RunFolderError(f"cannot write the report of {str(options.run)!r}: {error.strerror or error}") from error
    say(f"report: {path}")
    if tokenizer is None:
        say(lacking or "no tokenizer is known; --tokenizer FOLDER (of the model) names it")
        say("any token ids are shown as numbers")
    opened = options.open and webbrowser.open(path.resolve().as_uri())
    if options.open and not opened:
        say("no browser could be opened; open the file in one yourself")
    if options.json:
        show_json({"report": str(path), "opened": opened})
    return 0


def _write(options: ViewOptions, data: RunData, backend: Tokenizer | None) -> Path:
    if backend is None:
        return write_report(data, max_episodes=options.max_episodes)
    text = TokenText(backend)
    return write_report(data, decode_token=text, special_ids=text.special_ids, max_episodes=options.max_episodes)
