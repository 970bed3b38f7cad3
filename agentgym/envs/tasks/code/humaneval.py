"""The 164 problems of HumanEval (Chen et al. 2021, https://arxiv.org/abs/2107.03374), as they were published."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from importlib.resources import files

from agentgym.envs.tasks.code.problem import CodeProblem
from agentgym.errors import ConfigError

__all__ = ["humaneval_problems"]

DATA_SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"


@functools.cache
def humaneval_problems() -> tuple[CodeProblem, ...]:
    """The problems in their order; `prompt` is the beginning of the program, up to the function's docstring."""
    packed = files("agentgym.envs").joinpath("data", "humaneval", "humaneval.jsonl.gz").read_bytes()
    if hashlib.sha256(packed).hexdigest() != DATA_SHA256:
        raise ConfigError("the problems of HumanEval were changed; other problems need a new version of the id")
    rows = [json.loads(line) for line in gzip.decompress(packed).splitlines() if line.strip()]
    return tuple(
        CodeProblem(
            name=row["task_id"],
            entry_point=row["entry_point"],
            prompt=f"Complete this Python program, and submit the whole of it:\n\n{row['prompt'].strip()}",
            solution=row["prompt"] + row["canonical_solution"],
            test=row["test"],
        )
        for row in rows
    )
