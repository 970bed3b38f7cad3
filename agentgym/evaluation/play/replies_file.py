"""A file of replies: one line for each, in the order of the prompts, written as they come and resumed after a kill."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from agentgym.data.config import DataConfig
from agentgym.data.rows import read_tasks
from agentgym.data.sources import open_sources
from agentgym.errors import ConfigError, RunFolderError
from agentgym.evaluation.play.generation import Reply, ReplyGenerator
from agentgym.openai_wire import message_to_openai
from agentgym.rollout.record.chain import LineFile
from agentgym.rollout.record.json_pieces import encode_json
from agentgym.types import JSON

__all__ = ["PromptRow", "RepliesFile", "prompt_rows"]

OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
PASSED = ("ground_truth", "data_source", "extra_info")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt of a data file, with the further parts of its row."""

    where: str
    messages: list[JSON]
    parts: Mapping[str, JSON]


def prompt_rows(files: tuple[str, ...], columns: Mapping[str, str], keep: tuple[str, ...] = ()) -> Iterator[PromptRow]:
    """Yields the prompts of data files, named as in `data.train`; raises ConfigError for a row without one.

    The columns to `keep` are in the `extra_info` of the parts.
    """
    config = DataConfig(columns=columns, keep=keep)
    for table in open_sources(files):
        for row in read_tasks(table, config, None):
            messages = row.task.options.get("messages")
            if not isinstance(messages, list):
                raise ConfigError(f"{row.where} is a task without messages: a prompt was wanted")
            parts = {name: row.task.options[name] for name in PASSED if name in row.task.options}
            yield PromptRow(row.where, messages, parts)


@contextmanager
def remove_if_empty(path: Path) -> Iterator[None]:
    """Removes the file at the end if nothing was written to it."""
    try:
        yield
    finally:
        if path.exists() and not path.stat().st_size:
            path.unlink()


class RepliesFile:
    """Writes the replies of a model to prompts as JSON lines; those that are there already are kept.

    A line has `messages` (prompt and reply, as OpenAI writes them), `finish_reason`, numbers of tokens, the further
    parts of the prompt's row, and a `digest` of prompt and settings. `with_ids` adds token ids and logprobs.
    """

    def __init__(self, path: Path, model: ReplyGenerator, name: str, *, with_ids: bool = False) -> None:
        self.path = path
        self.model = model
        self.with_ids = with_ids
        self.num_kept = 0
        """The replies that were there already."""
        self.num_failed = 0
        """The replies with an error, of all in the file."""
        settings = {key: value for key, value in asdict(model.config).items() if key != "concurrency"}
        for name, off in {"stop": (), **OFF}.items():
            if settings[name] == off:
                del settings[name]  # the digests of files that were written before there were any
        self._settings = encode_json({"model": name, **settings})

    async def write(self, rows: Iterator[PromptRow], on_reply: Callable[[Reply], None]) -> None:
        """Writes the replies to the prompts that have none yet, in their order, each when those before it are written.

        Raises ConfigError if a line that is kept is of another prompt or of other settings, or a row is no prompt.
        """
        num_replies = self.model.config.num_replies
        with remove_if_empty(self.path), LineFile(self.path) as file:
            num_prompts = self._keep(file, rows)
            rows_in_flight: deque[PromptRow] = deque()

            def prompts() -> Iterator[list[JSON]]:
                for row in rows:
                    rows_in_flight.append(row)
                    yield row.messages

            number = 0
            async for reply in self.model.replies(prompts(), num_prompts):  # type: ignore[arg-type]
                file.write((encode_json(self._line(rows_in_flight[0], reply)) + "\n").encode())
                self.num_failed += bool(reply.error)
                number += 1
                if number % num_replies == 0:
                    rows_in_flight.popleft()
                on_reply(reply)

    def _keep(self, file: LineFile, rows: Iterator[PromptRow]) -> int:
        """Checks the lines that are there against the first rows; returns the number of prompts with all replies."""
        num_replies = self.model.config.num_replies
        num_rows = size = failed = 0
        with self.path.open("rb") as lines:
            while (
                len(group := [line for line in (lines.readline() for _ in range(num_replies)) if line]) == num_replies
            ):
                row = next(rows, None)
                for line in group:
                    failed += self._check(line, num_rows, row)
                num_rows, size = num_rows + 1, size + sum(map(len, group))
        file.cut(size)
        self.num_kept, self.num_failed = num_rows * num_replies, failed
        return num_rows

    def _check(self, line: bytes, index: int, row: PromptRow | None) -> bool:
        """Returns whether a line that is kept has an error; raises if it is not that of a row."""
        where = f"{str(self.path)!r} cannot be resumed: the reply to prompt {index + 1}"
        try:
            stored = json.loads(line)
            digest, error = stored["digest"], stored.get("error", "")
        except (ValueError, TypeError, KeyError, RecursionError) as cause:
            raise RunFolderError(
                f"{where} is not of this command ({cause!r}); name a new file with --output"
            ) from cause
        if row is None:
            raise ConfigError(f"{where} has no prompt any more: the input has {index} prompts; name a new --output")
        if digest != self._digest(row):
            raise ConfigError(
                f"{where} is that of another prompt, model or setting than {row.where} has now; repeat its settings, or"
                " name a new file with --output"
            )
        return bool(error)

    def _digest(self, row: PromptRow) -> str:
        return blake2b(f"{encode_json(row.messages)}{self._settings}".encode(), digest_size=8).hexdigest()

    def _line(self, row: PromptRow, reply: Reply) -> dict[str, JSON]:
        if reply.error:
            return {"messages": row.messages, "error": reply.error, **row.parts, "digest": self._digest(row)}
        ids: dict[str, JSON] = {}
        if self.with_ids:
            ids = {"prompt_ids": [*reply.prompt_ids], "ids": [*reply.ids], "logprobs": [*reply.logprobs]}
        return {
            "messages": [*row.messages, message_to_openai(reply.message)],
            "finish_reason": reply.finish_reason,
            **({"stop": reply.stop} if reply.stop else {}),
            "prompt_tokens": len(reply.prompt_ids),
            "tokens": len(reply.ids),
            **row.parts,
            **ids,
            "digest": self._digest(row),
        }
