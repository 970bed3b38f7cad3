"""Run by the interpreter of vLLM: samples from an `AsyncLLM` before and after an update, and prints it as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from embedded_replies import PROMPT, met_by_an_update, replies

from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.vllm.engine import open_vllm


async def main(model: Path, updated: Path) -> None:
    engine = await open_vllm(ServerConfig(embedded=True, device="cpu"), model)
    try:
        rows = await replies(engine, [model, updated])
        met = await met_by_an_update(engine, model, 2)
        print(json.dumps({"prompt": PROMPT, "replies": rows, "versions": met.policy_versions}))
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
