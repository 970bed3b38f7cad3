"""Weights by broadcast: a real group of two processes, joined as our worker extension of vLLM does."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from agentgym.engines.weights.broadcast import WeightBroadcast

WORKER = """
import json, sys
import torch
from agentgym.engines.vllm.worker_extension import _join_group

group = _join_group(json.loads(sys.argv[1]), 1)
for shape in ((3, 2), (5,)):
    tensor = torch.empty(shape)
    torch.distributed.broadcast(tensor, src=0, group=group)
    print(json.dumps(tensor.tolist()), flush=True)
"""


@pytest.mark.long
def test_an_invited_worker_receives_the_tensors_of_rank_0_in_order() -> None:
    tensors = [torch.arange(6.0).view(3, 2), torch.ones(5)]

    async def send() -> str:
        group = WeightBroadcast(2, "gloo")
        command = [sys.executable, "-c", WORKER, json.dumps(asdict(group.invitation))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            try:
                await group.join()
                await group.share(tensors)
                output, _ = await asyncio.to_thread(worker.communicate, timeout=60)
                return output
            finally:
                worker.kill()
                group.close()

    assert [json.loads(line) for line in asyncio.run(send()).splitlines()] == [tensor.tolist() for tensor in tensors]
