"""Runs commands on two ranks as torchrun does, from forks that share the imports.

Each line of the input is a JSON list: the words of a command. What both ranks print is followed by their exit codes and
an empty line.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys

import torch
import torch._dynamo

from agentgym.cli.lessons import dpo, sft
from agentgym.cli.main import main
from agentgym.engines.servers.server_process import free_port

LIMIT_S = 200


def run_rank(rank: int, port: int, words: list[str]) -> None:
    """Runs the command in this process."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    sys.exit(main(words))


def run(words: list[str]) -> list[int | None]:
    """Returns the exit codes of the two ranks."""
    fork = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [fork.Process(target=run_rank, args=(rank, port, words)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


if __name__ == "__main__":
    assert dpo and sft  # imported before the forks
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), end="\n\n", flush=True)
