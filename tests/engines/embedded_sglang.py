"""Run by the interpreter of SGLang: prints as JSON what its engine in this process samples over updates to its end."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
from embedded_replies import LONG, PROBE, PROMPT, long_reply, met_by_an_update, replies
from safetensors.torch import load_file

from agentgym.engines.servers.http import HttpRefusal, HttpUnreachable
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.engines.sglang.embedded import EmbeddedSglang
from agentgym.engines.sglang.engine import open_sglang
from agentgym.engines.sglang.replica import SglangReplica
from agentgym.errors import ConfigError, EngineError
from agentgym.model.published_weights import LoraWeights

WITH_ADAPTERS = (
    *("--enable-lora", "--max-lora-rank=8", "--lora-backend=torch_native"),
    "--lora-target-modules=[q_proj, v_proj, down_proj]",
)


def program() -> list[object]:
    """What of this process an engine must leave as it is."""
    root = logging.getLogger()
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)]
    method = multiprocessing.get_start_method(allow_none=True)
    return [asyncio.get_event_loop_policy(), list(root.handlers), root.level, signals, method]


def processes() -> list[str]:
    """The commands of our child processes, but for the one that Python keeps beside spawned ones."""
    lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return [line for line in lines if "resource_tracker" not in line]


def replica_of(engine: ReplicatedEngine) -> SglangReplica:
    (replica,) = engine.replicas
    assert isinstance(replica, SglangReplica)
    return replica


async def played(engine: ReplicatedEngine, model: Path, updated: Path) -> dict[str, object]:
    """Replies of both models at several temperatures, one that was aborted, one that an update met, one in pieces, one
    that a stop id ended, and whether one waited for the end of a pause."""
    rows = await replies(engine, [model, updated])
    task = await long_reply(engine)
    await engine.abort("long")
    aborted = await task
    met = await met_by_an_update(engine, model, 2)
    replica = replica_of(engine)
    replica.settings = replace(replica.settings, stream=True)
    streamed = await engine.generate(PROMPT, PROBE, session="a")
    replica.settings = replace(replica.settings, stream=False)
    greedy = replace(PROBE, temperature=0.0)
    stop = (await engine.generate(PROMPT, greedy, session="a")).ids[5]
    stopped = await engine.generate(PROMPT, replace(greedy, stop_ids=(stop,)), session="a")
    await engine.pause()
    waiting = asyncio.create_task(engine.generate(PROMPT, PROBE, session="a"))
    await asyncio.sleep(0.1)
    waited = not waiting.done()
    await engine.resume()
    waited &= len((await waiting).ids) == PROBE.max_tokens
    return {
        "prompt": PROMPT,
        "replies": rows,
        "aborted": [aborted.ids, aborted.logprobs, aborted.policy_versions, aborted.finish_reason],
        "met": [met.ids, met.logprobs, met.policy_versions, met.finish_reason],
        "streamed": [streamed.ids, streamed.logprobs, streamed.policy_versions, streamed.finish_reason],
        "stopped": [stop, stopped.ids, stopped.finish_reason],
        "waited": waited,
    }


async def refused(engine: ReplicatedEngine, model: Path) -> dict[str, str]:
    """What the engine says of requests that it cannot answer."""
    transport, messages = replica_of(engine).transport, {}
    requests: dict[str, tuple[str, dict[str, object]]] = {
        "path": ("/no_such_path", {}),
        "field": ("/pause_generation", {"no_such_field": 1}),
        "empty": ("/generate", {"input_ids": [], "sampling_params": {"max_new_tokens": 1}}),
        "update": ("/end_weight_update", {}),
    }
    for name, (path, payload) in requests.items():
        try:
            await transport.post(path, payload, timeout_s=20.0)
        except HttpRefusal as error:
            messages[name] = f"{error.status} {error}"
    try:
        body: dict[str, object] = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 700}, "rid": "late"}
        await transport.post("/generate", body, timeout_s=0.3)
    except HttpUnreachable as error:
        messages["late"] = str(error)
    try:
        await EmbeddedSglang(model, on_cpu=True, arguments={}).start()
    except ConfigError as error:
        messages["second"] = str(error)
    await engine.generate(PROMPT, PROBE, session="a")  # none of it has harmed
    return messages


async def adapted(engine: ReplicatedEngine, updated: Path, adapter: Path) -> dict[str, object]:
    """A reply of other weights that came by a folder, and one with an adapter; another one was sent before it."""
    hot = replace(PROBE, temperature=LONG)
    await engine.update_weights(load_file(updated / "model.safetensors"), 1)
    completion = await engine.generate(PROMPT, hot, session="a")
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for version, scale in ((2, -1.0), (3, 1.0)):
        scaled_tensors = {name: scale * tensor for name, tensor in tensors.items()}
        await engine.update_weights(LoraWeights(tensors=scaled_tensors, config=config), version)
        await engine.resume()  # unloads the one that later requests do not use
    reply = await engine.generate(PROMPT, hot, session="a")
    return {
        "read": [completion.ids, completion.logprobs, completion.policy_versions, completion.finish_reason],
        "adapted": [reply.ids, reply.logprobs, reply.policy_versions, reply.finish_reason],
    }


async def killed(engine: ReplicatedEngine) -> list[str]:
    """What is said when a process of the engine dies: to a reply in flight, and to what comes later."""
    task = await long_reply(engine)
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    messages = []
    for work in (task, engine.generate(PROMPT, PROBE, session="a"), engine.pause()):
        try:
            await asyncio.wait_for(work, 20.0)
        except EngineError as error:
            messages.append(str(error))
    return messages


async def main(model: Path, updated: Path, adapter: Path) -> None:
    before = program()
    engine = await open_sglang(ServerConfig(embedded=True, device="cpu"), model)
    try:
        story = await played(engine, model, updated)
        story["refused"] = await refused(engine, model)
    finally:
        await engine.close()
    story["left"] = processes()
    how = ServerConfig(embedded=True, device="cpu", server_args=WITH_ADAPTERS, serving=ServingSettings(sync="disk"))
    engine = await open_sglang(how, model)
    try:
        story |= await adapted(engine, updated, adapter)
        story["killed"] = await killed(engine)
    finally:
        await engine.close()
    story["left_after_death"] = processes()
    story["kept"] = program() == before
    print(json.dumps(story))


if __name__ == "__main__":
    asyncio.run(main(*(Path(word) for word in sys.argv[1:])))
