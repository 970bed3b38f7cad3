"""The replies of a fake server: random ids by seed, the prompt's own end, or a script file's lines in turn."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import DEFAULT_LOGPROB, Fault, Reply, ScriptedReply
from agentgym.errors import NOT_JSON, ConfigError, RunFolderError
from agentgym.testing.fake_server.model import FakeModel

__all__ = ["FileScript", "PlannedReply", "echo_reply", "plan_reply", "random_reply"]

SHORTEST, LONGEST = 4, 24
FAULTS = ("raise", "hang", "abort", "lengths")


class PlannedReply(ScriptedReply):
    """A reply as it will be sampled: cut at the first stop id and at `max_tokens`, one logprob per id."""


def random_reply(model: FakeModel, seed: int = 0) -> Reply:
    """Returns a script of 4 to 24 random ids that have a text, and an end token.

    They are drawn by a hash of the seed, the request's own seed and the prompt.
    """
    stops = set(model.eos_ids)
    size = min(model.vocab_size, model.tokenizer.backend.get_vocab_size())  # the rest of the matrix is padding
    ids = [index for index in range(size) if index not in stops]

    def reply(_session: str, prompt_ids: Sequence[int], sampling: Sampling) -> list[int]:
        rng = random.Random(hash((seed, sampling.seed, *prompt_ids)))  # only integers: the same everywhere
        return rng.choices(ids, k=rng.randint(SHORTEST, LONGEST))

    return reply


def echo_reply(_session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
    """Returns the last ids of the prompt, as many as were requested."""
    return prompt_ids[-sampling.max_tokens :]


class FileScript:
    """A script file: one reply per line, given in turn within each session, from the first again after the last.

    A line is a JSON list of ids, a JSON string of text, or an object with `ids` or `text` and optionally `logprobs`,
    `delay_s` and `fault` (`raise`, `hang`, `abort`, `lengths`). Raises RunFolderError for a missing file, ConfigError
    that names the line that cannot be read.
    """

    def __init__(self, path: str | Path, model: FakeModel) -> None:
        self._turns: dict[str, int] = {}
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise RunFolderError(f"the script {str(path)!r} cannot be read: {error}") from error
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        self.replies = [_read_line(line, model, f"{path}:{number}") for number, line in numbered]
        if not self.replies:
            raise ConfigError(
                f'the script {str(path)!r} is empty: one reply a line is wanted, such as [5, 9] or "text"'
            )

    def __call__(self, session: str, prompt_ids: Sequence[int], sampling: Sampling) -> ScriptedReply:
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        return self.replies[turn % len(self.replies)]


def _read_line(line: str, model: FakeModel, where: str) -> ScriptedReply:
    try:
        value: Any = json.loads(line)
        entry: dict[str, Any] = (
            value if isinstance(value, dict) else {"text": value} if isinstance(value, str) else {"ids": value}
        )
        ids = model.encode(entry["text"]) if "text" in entry else [int(index) for index in entry.get("ids", ())]
        logprobs: list[float] | None = entry.get("logprobs")
        fault: Fault | None = entry.get("fault")
        delay_s = float(entry.get("delay_s", 0.0))
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(f"{len(logprobs)} logprobs for {len(ids)} ids")
    except (TypeError, *NOT_JSON) as error:
        raise ConfigError(
            f"{where}: a list of ids, a text or an object with one of them was wanted: {error}"
        ) from error
    if fault is not None and fault not in FAULTS:
        raise ConfigError(f"{where}: fault is one of {', '.join(FAULTS)}, got {fault!r}")
    return ScriptedReply(ids, logprobs, delay_s, fault)


def plan_reply(reply: Sequence[int] | ScriptedReply, sampling: Sampling, end_ids: Sequence[int]) -> PlannedReply:
    """Returns the reply as a sampler would give it.

    It ends with the first of `end_ids` (which is added if the script ends without one), or after `max_tokens`; without
    any `end_ids` it is repeated up to `max_tokens`.
    """
    scripted = reply if isinstance(reply, ScriptedReply) else ScriptedReply(reply)
    ids, logprobs = list(scripted.ids), scripted.logprobs
    stop = next((index for index, token in enumerate(ids) if token in end_ids), None)
    if stop is not None:
        ids = ids[: stop + 1]
    elif end_ids:
        ids.append(end_ids[0])
    elif ids:
        ids *= -(-sampling.max_tokens // len(ids))
    ids = ids[: sampling.max_tokens]
    logps = [] if logprobs is None else list(logprobs)[: len(ids)]
    return PlannedReply(ids, logps + [DEFAULT_LOGPROB] * (len(ids) - len(logps)), scripted.delay_s, scripted.fault)
