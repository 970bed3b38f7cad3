"""`agentgym generate`: replies to the prompts of a file, without an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.cli.display.tables import progress
from agentgym.cli.options import parse_options, warn_of_idle
from agentgym.cli.terminal import fail, say, show_json
from agentgym.embedded import EMBEDDED
from agentgym.engines.openai.config import ChatEndpointConfig
from agentgym.engines.server_kind import SERVERS, check_engine_name
from agentgym.errors import RunFolderError
from agentgym.evaluation.play.eval_folder import name_write_errors
from agentgym.evaluation.play.generation import GenerationConfig
from agentgym.evaluation.play.open_model import ModelOptions
from agentgym.evaluation.play.replies_file import RepliesFile, prompt_rows
from agentgym.evaluation.play.reply_source import open_source
from agentgym.model.architectures import check_backend
from agentgym.rollout.hosting.event_loop import run_async
from agentgym.rollout.record.folder_lock import FolderLock

__all__ = ["main"]

MAIN_SETTINGS = tuple(
    "input output model num_replies max_tokens temperature top_p top_k min_p stop seed resume ids columns keep "
    "engine device dtype context_window endpoint.model endpoint.api_key_env concurrency json".split()
)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationConfig, ModelOptions):
    """Samples replies to the prompts of files and writes them as JSON lines, in the order of the prompts."""

    input: tuple[str, ...]
    """Files of prompts: .jsonl, .json or .parquet with a column `prompt`, `messages` or `question`, a text or OpenAI's
    messages; a pattern; a name of the `datasets` library; or path/to/file.py:generator."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The file of replies, whose `messages` end with the reply."""
    model: Annotated[str, tyro.conf.arg(aliases=["--policy"])] = EMBEDDED
    """The model: `embedded`, a folder, a GGUF file, an id of the Hugging Face hub, or the `http://HOST:PORT/v1` of a
    chat endpoint."""
    endpoint: ChatEndpointConfig = field(default_factory=ChatEndpointConfig)
    """The settings of the chat endpoint, if `model` is one."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The columns of a row's parts, such as prompt=problem."""
    keep: tuple[str, ...] = ()
    """Further columns that a reply's line has in `extra_info`, such as the row's id."""
    resume: bool = False
    """Go on with an output that a kill or an interrupt left."""
    ids: bool = False
    """Write token ids and logprobs, too."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym generate ...`; exit code 1 if a prompt has no reply."""
    options = parse_options(GenerateOptions, args, prog="agentgym generate", main_options=MAIN_SETTINGS)
    check_engine_name(options.engine)
    check_backend(options.model_backend, options.engine)
    warn_of_idle("server", options.server, "engine", options.engine, SERVERS)
    if options.output.exists() and not options.output.is_file():
        raise RunFolderError(f"{str(options.output)!r} is a folder or a device; --output takes a file")
    with name_write_errors(options.output.parent):
        options.output.parent.mkdir(parents=True, exist_ok=True)
    lock = FolderLock.of_file(options.output)
    lock.take()
    if options.output.exists() and not options.resume:
        raise RunFolderError(f"{str(options.output)!r} exists: go on with it by --resume, or name a new --output")
    try:
        file = run_async(_sample(options))
    except KeyboardInterrupt:
        fail(f"interrupted; the same command with --resume goes on with {options.output}")
        return 130
    with options.output.open("rb") as lines:
        num_replies = sum(1 for _ in lines)
    lock.release()
    earlier = f", {file.num_kept} of them there before" if file.num_kept else ""
    say(f"{num_replies} replies in {options.output}{earlier}")
    if file.num_failed:
        fail(f"{file.num_failed} of them have an `error` in place of a reply")
    if file.cost is not None:
        say(f"cost {file.cost:.4f}")
    if options.json:
        counts = {"replies": num_replies, "kept": file.num_kept, "failed": file.num_failed}
        cost = {} if file.cost is None else {"cost": file.cost}
        show_json({**counts, **cost, "output": str(options.output)})
    return 1 if file.num_failed else 0


async def _sample(options: GenerateOptions) -> RepliesFile:
    """Writes the replies that are missing."""
    config = GenerationConfig(**{setting.name: getattr(options, setting.name) for setting in fields(GenerationConfig)})
    async with open_source(options.model, config, options, options.endpoint) as (source, name):
        file = RepliesFile(options.output, source, name, with_ids=options.ids)
        with progress("replies", None) as count:
            await file.write(prompt_rows(options.input, options.columns, options.keep), lambda reply: count(""))
        return file
