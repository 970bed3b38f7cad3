"""A file of replies: one line for each, in the order of the prompts, written as they come and resumed after a kill."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from agentgym.data.config import DataConfig
from agentgym.data.rows import read_tasks
from agentgym.data.sources import open_sources
from agentgym.errors import ConfigError, RunFolderError
from agentgym.evaluation.play.generation import Reply, ReplySource
from agentgym.openai_wire import message_to_openai
from agentgym.rollout.record.chain import LineFile
from agentgym.rollout.record.json_pieces import encode_json
from agentgym.types import JSON

__all__ = ["PromptRow", "RepliesFile", "prompt_rows"]

OFF: Mapping[str, object] = {"stop": (), "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Settings that digests leave out if they are off, so that files from before there were such settings are resumed."""
ROW_FIELDS = ("ground_truth", "data_source", "extra_info")
"""The options of a row's task that are copied to the lines of its replies."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt of a data file, with the `ROW_FIELDS` that its row has as `parts`."""

    where: str
    """The file and the line, for error messages."""
    messages: list[JSON]
    parts: Mapping[str, JSON]


def prompt_rows(files: tuple[str, ...], columns: Mapping[str, str], keep: tuple[str, ...] = ()) -> Iterator[PromptRow]:
    """Yields the prompts of data files, named as in `data.train`; raises ConfigError for a row without one.

    The columns named by `keep` go into the `extra_info` of the parts.
    """
    config = DataConfig(columns=columns, keep=keep)
    for table in open_sources(files):
        for row in read_tasks(table, config, None):
            messages = row.task.options.get("messages")
            if not isinstance(messages, list):
                raise ConfigError(f"{row.where} is a task without messages: give a row with a prompt")
            parts = {name: row.task.options[name] for name in ROW_FIELDS if name in row.task.options}
            yield PromptRow(row.where, messages, parts)


@contextmanager
def remove_if_empty(path: Path) -> Iterator[None]:
    """Removes the file on exit if it is empty."""
    try:
        yield
    finally:
        if path.exists() and not path.stat().st_size:
            path.unlink()


class RepliesFile:
    """Writes the replies of a model to prompts as JSON lines, after those that the file has already.

    A line has `messages` (prompt and reply, as OpenAI writes them), `finish_reason`, the numbers of tokens, the `parts`
    of the prompt's row, and a `digest` of prompt, settings and the model's `name`. `with_ids` adds token ids and
    logprobs.
    """

    def __init__(self, path: Path, model: ReplySource, name: str, *, with_ids: bool = False) -> None:
        self.path = path
        self.model = model
        self.with_ids = with_ids
        self.num_kept = 0
        """The number of replies that the file had before."""
        self.num_failed = 0
        """The number of replies with an error in the whole file."""
        self.cost: float | None = None
        """The price of the replies that were written, as an endpoint's prices have it; None without prices."""
        settings = {key: value for key, value in asdict(model.config).items() if key != "concurrency"}
        for name, off in OFF.items():
            if settings[name] == off:
                del settings[name]
        self._settings = encode_json({"model": name, **settings})

    async def write(self, rows: Iterator[PromptRow], on_reply: Callable[[Reply], None]) -> None:
        """Writes the replies to prompts that have none yet, in the order of the prompts, and calls `on_reply` for each.

        Raises ConfigError for a line of another prompt or of other settings, and for a row that is not a prompt;
        RunFolderError for a line that `agentgym generate` did not write.
        """
        num_replies = self.model.config.num_replies
        with remove_if_empty(self.path), LineFile(self.path) as file:
            num_prompts = self._check_lines(file, rows)
            rows_in_flight: deque[PromptRow] = deque()

            def prompts() -> Iterator[list[JSON]]:
                for row in rows:
                    rows_in_flight.append(row)
                    yield row.messages

            number = 0
            async with aclosing(self.model.replies(prompts(), num_prompts)) as replies:  # type: ignore[arg-type]
                async for reply in replies:
                    file.write((encode_json(self._line(rows_in_flight[0], reply)) + "\n").encode())
                    self.num_failed += bool(reply.error)
                    if reply.cost is not None:
                        self.cost = (self.cost or 0.0) + reply.cost
                    number += 1
                    if number % num_replies == 0:
                        rows_in_flight.popleft()
                    on_reply(reply)

    def _check_lines(self, file: LineFile, rows: Iterator[PromptRow]) -> int:
        """Compares the file's lines with the first rows; returns the number of prompts with all `num_replies` replies.

        Cuts off the lines of a prompt that lacks replies: all of its replies are sampled again.
        """
        num_replies = self.model.config.num_replies
        num_rows = size = failed = 0
        with self.path.open("rb") as lines:
            while (
                len(group := [line for line in (lines.readline() for _ in range(num_replies)) if line]) == num_replies
            ):
                row = next(rows, None)
                for line in group:
                    failed += self._has_error(line, num_rows, row)
                num_rows, size = num_rows + 1, size + sum(map(len, group))
        file.cut(size)
        self.num_kept, self.num_failed = num_rows * num_replies, failed
        return num_rows

    def _has_error(self, line: bytes, index: int, row: PromptRow | None) -> bool:
        """Returns True if a line has an error in place of a reply; raises if the line is not one of this row."""
        where = f"{str(self.path)!r} cannot be resumed: the reply to prompt {index + 1}"
        try:
            stored = json.loads(line)
            digest, error = stored["digest"], stored.get("error", "")
        except (ValueError, TypeError, KeyError, RecursionError) as cause:
            raise RunFolderError(
                f"{where} was not written by this command ({cause!r}); name a new file with --output"
            ) from cause
        if row is None:
            raise ConfigError(f"{where} has no prompt now: the input has {index} prompts; name a new --output")
        if digest != self._digest(row):
            raise ConfigError(
                f"{where} belongs to another prompt, model or setting than {row.where}; repeat its settings, or"
                " name a new file with --output"
            )
        return bool(error)

    def _digest(self, row: PromptRow) -> str:
        return blake2b(f"{encode_json(row.messages)}{self._settings}".encode(), digest_size=8).hexdigest()

    def _line(self, row: PromptRow, reply: Reply) -> dict[str, JSON]:
        if reply.error:
            return {"messages": row.messages, "error": reply.error, **row.parts, "digest": self._digest(row)}
        if self.with_ids and not reply.ids:
            raise ConfigError("the endpoint gives no token ids: leave ids out (--ids)")
        prompt_tokens, num_tokens = reply.num_tokens or (len(reply.prompt_ids), len(reply.ids))
        ids: dict[str, JSON] = {}
        if self.with_ids:
            ids = {"prompt_ids": [*reply.prompt_ids], "ids": [*reply.ids], "logprobs": [*reply.logprobs]}
        return {
            "messages": [*row.messages, message_to_openai(reply.message)],
            "finish_reason": reply.finish_reason,
            **({"stop": reply.stop} if reply.stop else {}),
            "prompt_tokens": prompt_tokens,
            "tokens": num_tokens,
            **row.parts,
            **ids,
            "digest": self._digest(row),
        }
