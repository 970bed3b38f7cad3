"""What engines are tested with: the trainer's own numbers, and real servers of the embedded model on CPU.

Servers are for tests marked `engine`, and run in the environments of `make engines`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agentgym
from agentgym.embedded import embedded_folder
from agentgym.engines.local.sampling import penalize
from agentgym.engines.protocol import Sampling
from agentgym.engines.servers.http import SERVER_SECRET, HttpClient, secret_headers
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig, ServerLaunch
from agentgym.engines.servers.server_process import ServerCommand, ServerProcess, free_port
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.engines.sglang.engine import launch_sglang, open_sglang
from agentgym.engines.sglang.weight_sync import SglangSync
from agentgym.engines.vllm.engine import launch_vllm, open_vllm
from agentgym.model.decoder import Decoder
from agentgym.model.model_folder import load_decoder, published_views
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.published_weights import LoraWeights

ENVIRONMENTS = Path(__file__).parent / "environments"
READY_S = 300.0
SGLANG_FLAGS = """
    --device cpu --attention-backend torch_native --dtype float32 --sampling-backend pytorch --disable-overlap-schedule
    --cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled --skip-server-warmup --sleep-on-idle
    --mem-fraction-static 0.3 --max-total-tokens 65536 --log-level warning
""".split()
VLLM_FLAGS = """
    --enforce-eager --dtype float32 --gpu-memory-utilization 0.2 --logprobs-mode processed_logprobs
    --uvicorn-log-level warning
""".split()

RANK, ALPHA = 4, 8
"""Of adapters."""

StartServer = Callable[..., ServerProcess]
"""`start(*flags)`: a server of its own with more flags, ended when the test is."""
LendServer = Callable[[], AbstractContextManager[ServerProcess]]
"""`with lend() as server`: a server that all tests share, as it was after its start."""


class Reference:
    """A model as the trainer has it, against which an engine's replies are held."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def tensors(self) -> dict[str, torch.Tensor]:
        """What an update sends."""
        return {name: view.detach() for name, view in published_views(self.decoder)}

    def merge_adapter(self, modules: Sequence[str], seed: int) -> LoraWeights:
        """Changes the model by a random adapter of those modules, and returns it."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, object] = {}
        for name, view in published_views(self.decoder):
            if name.split(".")[-2] not in modules:
                continue
            down = 0.05 * torch.randn(RANK, view.shape[1], generator=generator)
            up = 0.05 * torch.randn(view.shape[0], RANK, generator=generator)
            stem = "base_model.model." + name.removesuffix(".weight")
            tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
            with torch.no_grad():
                view += (up @ down) * (ALPHA / RANK)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(modules), "bias": "none"}
        return LoraWeights(tensors=tensors, config=config)

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], reply: Sequence[int]) -> torch.Tensor:
        """Those that each id of the reply is sampled from, `[T, V]`."""
        ids = torch.tensor([*prompt, *reply], dtype=torch.int64)
        return self.decoder.logits(self.decoder.hidden_states(ids, PackedLayout([len(ids)])))[len(prompt) - 1 : -1]

    def penalized(self, prompt: Sequence[int], reply: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """The same with the penalties of what came before each id, `[T, V]`."""
        logits_TV = self.logits(prompt, reply).clone()
        for place, logits_V in enumerate(logits_TV):
            penalize(logits_V, np.array([*prompt, *reply[:place]]), len(prompt), sampling)
        return logits_TV

    def logprobs(self, prompt: Sequence[int], reply: Sequence[int], temperature: float = 1.0) -> list[float]:
        """The logprob of each id of the reply; at temperature 0, as at 1."""
        logp = torch.log_softmax(self.logits(prompt, reply) / (temperature or 1.0), -1)
        chosen: list[float] = logp.gather(1, torch.tensor(reply, dtype=torch.int64)[:, None])[:, 0].tolist()
        return chosen

    def gaps(
        self, prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float], temperature: float = 1.0
    ) -> list[float]:
        """How far each of an engine's logprobs is from the trainer's."""
        return [abs(a - b) for a, b in zip(logprobs, self.logprobs(prompt, reply, temperature), strict=True)]


@pytest.fixture(scope="session")
def reference() -> Callable[..., Reference]:
    """`reference(seed, scale=0.1)`: the embedded model with every tensor disturbed by that share of its deviation; 0 is
    the model as it ships."""

    def made(seed: int, *, scale: float = 0.1) -> Reference:
        model = load_decoder(embedded_folder())
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(parameter.std(unbiased=False) * noise, alpha=scale if seed else 0.0)
        return Reference(model)

    return made


@pytest.fixture
def leave_out(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`leave_out(name)`: from version 1 on, updates of SGLang engines lack that tensor."""
    load = SglangSync.load

    def patch(name: str) -> None:
        async def forgetful(self: SglangSync, tensors: Any, version: int, **options: Any) -> Any:
            tensors_left = {key: tensor for key, tensor in tensors.items() if key != name or not version}
            return await load(self, tensors_left, version, **options)

        monkeypatch.setattr(SglangSync, "load", forgetful)

    return patch


def engine_python(name: str) -> str:
    """The interpreter of an engine's environment; a test that asks for one that was not built fails."""
    script = ENVIRONMENTS / "build.sh"
    result = subprocess.run([script, "--path", name], capture_output=True, text=True, timeout=30, check=True)
    path = result.stdout.strip()
    if not os.access(path, os.X_OK) or not (Path(path).parent.parent / ".complete").exists():
        pytest.fail(f"there is no environment of {name} at {path}: `make engines` builds it", pytrace=False)
    return path


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that runs SGLang 0.5.23 on CPU."""
    return engine_python("sglang")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that runs vLLM 0.32.0 on CPU."""
    return engine_python("vllm")


class Servers:
    """Servers that were started here; `close` ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[ServerProcess] = []

    def start(self, name: str, words: list[str]) -> ServerProcess:
        """Starts a server of the embedded model and waits until it answers."""
        port = free_port()
        command = ServerCommand(
            name=name,
            words=[*words, "--host", "127.0.0.1", "--port", str(port)],
            port=port,
            log=self._folder / f"{name}-{port}.log",
            ready_s=READY_S,
        )
        server = ServerProcess(command)
        asyncio.run(server.start())
        self._running.append(server)
        return server

    def sglang(self, python: str, *flags: str) -> ServerProcess:
        """One of SGLang."""
        model = ["--model-path", str(embedded_folder()), *SGLANG_FLAGS]
        return self.start("sglang", [python, "-m", "sglang.launch_server", *model, *flags])

    def vllm(self, python: str, *flags: str) -> ServerProcess:
        """One of vLLM."""
        model = ["--model", str(embedded_folder()), *VLLM_FLAGS]
        return self.start("vllm", [python, "-m", "vllm.entrypoints.openai.api_server", *model, *flags])

    def close(self) -> None:
        """Ends them all."""
        for server in self._running:
            asyncio.run(server.close())


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Servers that live as long as one test."""
    servers = Servers(tmp_path)
    yield servers
    servers.close()


@pytest.fixture
def start_sglang(servers: Servers, sglang_python: str) -> StartServer:
    """`start_sglang(*flags)`: an SGLang server of the test's own, which requires no secret."""
    return lambda *flags: servers.sglang(sglang_python, *flags)


@pytest.fixture
def start_vllm(servers: Servers, vllm_python: str) -> StartServer:
    """`start_vllm(*flags)`: a vLLM server of the test's own, which requires no secret."""
    return lambda *flags: servers.vllm(vllm_python, *flags)


@contextmanager
def lend(
    server: ServerProcess,
    connect: Callable[[], Coroutine[Any, Any, ReplicatedEngine]],
    weights: dict[str, torch.Tensor],
) -> Iterator[ServerProcess]:
    """Lends a running server as it was after its start: with these weights, which are called `default`, and nothing in
    flight. Its secret is in our environment meanwhile, where engines on running servers look for it."""

    async def reset() -> None:
        engine = await connect()
        try:
            await engine.pause()
            await engine.update_weights(weights, 0)
            await engine.resume()
        finally:
            await engine.close()
        client = HttpClient(server.url, headers=secret_headers(server.command.secret))
        try:
            await client.post("/update_weight_version", {"new_version": "default"})
        finally:
            await client.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SERVER_SECRET, server.command.secret)
        asyncio.run(reset())
        yield server


@pytest.fixture(scope="session")
def lend_sglang(
    sglang_python: str, reference: Callable[..., Reference], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LendServer]:
    """`with lend_sglang() as server`: what `sglang_server` gives to a test, for a fixture of a wider scope."""
    words, folder = ("--tool-call-parser", "qwen25"), tmp_path_factory.mktemp("sglang")
    config = ServerLaunch(python=sglang_python, device="cpu", server_args=words, log_folder=str(folder))
    (server,) = asyncio.run(launch_sglang(config, embedded_folder()))
    running = ServerConfig(urls=(server.url,), serving=ServingSettings(pause="abort"))
    yield partial(lend, server, partial(open_sglang, running, embedded_folder()), reference(0).tensors())
    asyncio.run(server.close())


@pytest.fixture(scope="session")
def lend_vllm(
    vllm_python: str, reference: Callable[..., Reference], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LendServer]:
    """`with lend_vllm() as server`: what `vllm_server` gives to a test, for a fixture of a wider scope."""
    words, folder = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes"), tmp_path_factory.mktemp("vllm")
    config = ServerLaunch(python=vllm_python, device="cpu", server_args=words, log_folder=str(folder))
    (server,) = asyncio.run(launch_vllm(config, embedded_folder()))
    running = ServerConfig(urls=(server.url,), serving=ServingSettings(pause="abort"))
    yield partial(lend, server, partial(open_vllm, running, None), reference(0).tensors())
    asyncio.run(server.close())


@pytest.fixture
def sglang_server(lend_sglang: LendServer) -> Iterator[ServerProcess]:
    """The SGLang server that all tests share, launched as the engine launches it: each test gets it with the embedded
    model as it ships, and may change its weights."""
    with lend_sglang() as server:
        yield server


@pytest.fixture
def vllm_server(lend_vllm: LendServer) -> Iterator[ServerProcess]:
    """The vLLM server that all tests share, launched as the engine launches it: each test gets it with the embedded
    model as it ships, and may change its weights."""
    with lend_vllm() as server:
        yield server


@pytest.fixture(scope="session")
def told_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`told_by(python, script, *words)`: the JSON that a script beside this file prints, run by that interpreter.

    Of our own environment it sees agentgym alone: it takes what that imports from the engine's.
    """
    path = tmp_path_factory.mktemp("path")
    (path / "agentgym").symlink_to(Path(agentgym.__file__).parent)

    def run(python: str, script: str, *words: Path) -> dict[str, Any]:
        command = [python, Path(__file__).with_name(script), *words]
        environment = {**os.environ, "PYTHONPATH": str(path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        story: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        return story

    return run
