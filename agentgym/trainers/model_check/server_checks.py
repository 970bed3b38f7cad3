"""The check of a model on a server: what `agentgym models check --engine` computes."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.server_kind import SERVERS
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.serving_settings import EngineServing
from agentgym.errors import AgentGymError
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import published_views
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import load_policy
from agentgym.model.routing import BatchRouting, experts_of_routers
from agentgym.trainers.model_check.findings import CheckResult

__all__ = ["check_on_server"]

_NATS = 1e-3
"""The largest difference of a logprob that rounding explains in float32."""
_NUM_PROMPTS, _NUM_PROMPT_IDS, _NUM_SAMPLED = 4, 40, 24


def check_on_server(folder: Path, kind: str, python: str = "") -> CheckResult:
    """Returns what sampling on a launched server finds, in float32 and on the CPU if there is no GPU.

    Replies are sampled with the weights of the folder, and again after an update to others; each logprob is compared
    with the learner's. `kind` is a name of `SERVERS`, and `python` the interpreter that has the server's library, empty
    for this one. A folder without a tokenizer is served with the embedded model's. Of a mixture of experts, the experts
    that the server records are replayed.
    """
    try:
        return CheckResult.judge(kind, *asyncio.run(_check(folder, kind, python)))
    except AgentGymError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        causes = [line for line in lines if re.search(r"[eE]rror(: |$)", line)]  # the log of a server that ended
        return CheckResult.judge(kind, False, re.sub(r"http://[\d.]+:\d+", "the server", (causes or lines)[-1])[-300:])


async def _check(folder: Path, kind: str, python: str) -> tuple[bool, str]:
    model = load_policy(folder).requires_grad_(False)
    with tempfile.TemporaryDirectory() as copy:
        serving = EngineServing(record_experts=bool(model.routers) and SERVERS[kind].records_experts)
        servers = ServerConfig(python=python, serving=serving)
        engine = await SERVERS[kind].open(servers, _with_tokenizer(folder, Path(copy)))
        try:
            replies = [await _sample(engine, model, 0)]
            first = max(_difference(model, *reply) for reply in replies[0])
            _disturb(model)
            await engine.pause()
            await engine.update_weights({name: view.detach() for name, view in published_views(model)}, 1)
            await engine.resume()
            second = max(_difference(model, *reply) for reply in await _sample(engine, model, 1))
        finally:
            await engine.close()
    measurement = f"{first:.1e} nats, {second:.1e} after an update"
    return max(first, second) < _NATS, measurement + (", experts replayed" if serving.record_experts else "")


def _with_tokenizer(folder: Path, copy: Path) -> Path:
    """Returns the folder, or a copy with a tokenizer if it has none."""
    if (folder / "tokenizer_config.json").exists():
        return folder
    for source, patterns in ((embedded_folder(), ("tokenizer*", "*.jinja")), (folder, ("*",))):
        for file in (file for pattern in patterns for file in source.glob(pattern) if file.is_file()):
            shutil.copy(file, copy)
    return copy


async def _sample(
    engine: ReplicatedEngine, model: LanguageModel, version: int
) -> Sequence[tuple[list[int], Completion]]:
    generator = torch.Generator().manual_seed(version)
    size = (_NUM_PROMPTS, _NUM_PROMPT_IDS)
    prompts = torch.randint(3, model.vocab_size, size, generator=generator).tolist()
    calls = [
        engine.generate(prompt, Sampling(max_tokens=_NUM_SAMPLED, seed=number), session=f"{version}-{number}")
        for number, prompt in enumerate(prompts)
    ]
    return list(zip(prompts, await asyncio.gather(*calls), strict=True))


@torch.no_grad()
def _difference(model: LanguageModel, prompt: list[int], reply: Completion) -> float:
    """Returns the largest difference of a reply's logprobs from the learner's, with the experts of the record."""
    ids_T = torch.tensor([*prompt, *reply.ids])
    layout = PackedLayout([len(ids_T) - 1])
    if reply.experts is not None:
        recorded_NRK = torch.from_numpy(reply.experts.experts_TRK.copy())
        layout.routing = BatchRouting(layout.seqlens, experts_of_routers(model.routers, recorded_NRK))
    logp_NV = model.logits(model.hidden_states(ids_T[:-1], layout)).log_softmax(-1)
    logp_N = logp_NV.gather(1, ids_T[1:, None])[len(prompt) - 1 :, 0]
    return float((logp_N - torch.tensor(reply.logprobs)).abs().max())


@torch.no_grad()
def _disturb(model: LanguageModel) -> None:
    """Changes every weight by a twentieth of the deviation of its tensor."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.numel() > 1:
            parameter.add_(0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator))
