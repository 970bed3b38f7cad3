"""Each server gets a GPU, the learner's last, and handles of memory go only to one on the same GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentgym.embedded import embedded_folder
from agentgym.engines.servers import gpus
from agentgym.engines.servers.gpus import gpus_of_server, has_gpu_of_its_own, opens_handles, visible_gpus
from agentgym.engines.servers.server_config import ServerLaunch
from agentgym.engines.sglang.engine import open_sglang
from agentgym.engines.vllm.engine import open_vllm
from agentgym.engines.weights.buckets import sendable
from agentgym.errors import EngineError

HERE, ELSEWHERE = "http://127.0.0.1:30000", "http://10.0.0.7:30000"


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.count_gpus.cache_clear()
    yield
    gpus.count_gpus.cache_clear()


@pytest.fixture
def have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """`have(2)`: a machine whose `nvidia-smi -L` lists two GPUs."""

    def make(number: int) -> None:
        lines = "".join(f"GPU {index}: NVIDIA H200 (UUID: GPU-{index})\n" for index in range(number))
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ $1 = -L ] && printf '%s' '{lines}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        gpus.count_gpus.cache_clear()

    yield make


def test_the_visible_gpus_are_those_of_the_variable_or_of_the_machine(have, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    have(3)
    assert visible_gpus() == ["0", "1", "2"]
    for value, expected in (("2", ["2"]), ("1, 0", ["1", "0"]), ("GPU-a,MIG-b", ["GPU-a", "MIG-b"]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus() == expected


def test_a_machine_without_gpus_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert visible_gpus() == gpus_of_server(0, 2, "cuda") == []


def test_servers_take_the_gpus_after_the_learners_and_its_own_last(have) -> None:  # type: ignore[no-untyped-def]
    have(4)
    assert gpus_of_server(0, 1) == ["0", "1", "2", "3"]
    assert gpus_of_server(0, 1, "cuda") == gpus_of_server(0, 1, "cuda:0") == ["1", "2", "3", "0"]
    assert gpus_of_server(0, 1, "cuda:2") == ["3", "0", "1", "2"]
    assert [gpus_of_server(number, 4, "cuda:1") for number in range(4)] == [["2"], ["3"], ["0"], ["1"]]
    assert [gpus_of_server(number, 5, "cpu") for number in range(5)] == [["0"], ["1"], ["2"], ["3"], ["0"]]
    assert [has_gpu_of_its_own(replicas, "cuda:1") for replicas in (1, 3, 4)] == [True, True, False]
    have(1)
    assert gpus_of_server(0, 1, "cuda") == ["0"]
    assert not has_gpu_of_its_own(1, "cuda")


@pytest.mark.parametrize(("engine", "replicas", "seen"), [("sglang", 1, "1,0"), ("vllm", 1, "1,0"), ("sglang", 2, "1")])
def test_a_launched_server_sees_its_gpus(have, engine: str, replicas: int, seen: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    have(2)
    (tmp_path / "python").write_text("#!/bin/sh\necho sees $CUDA_VISIBLE_DEVICES\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    python, logs = str(tmp_path / "python"), str(tmp_path / "logs")
    with pytest.raises(EngineError, match=rf"sees {seen}$"):
        if engine == "sglang":
            sglang = ServerLaunch(python=python, log_folder=logs, replicas=replicas)
            asyncio.run(open_sglang(sglang, embedded_folder(), learner="cuda"))
        else:
            asyncio.run(open_vllm(ServerLaunch(python=python, log_folder=logs), embedded_folder(), learner="cuda"))


def test_handles_go_to_a_server_on_the_same_gpu_alone(have) -> None:  # type: ignore[no-untyped-def]
    have(2)
    assert opens_handles(["0", "1"], HERE, 1, 0)
    assert opens_handles(["1"], HERE, 1, 1)
    assert not opens_handles(["1", "0"], HERE, 1, 0)
    assert not opens_handles(["0", "1"], HERE, 2, 0), "each rank has a GPU"
    assert not opens_handles([], HERE, 1, 0), "it computes on the CPU"
    assert not opens_handles(None, HERE, 1, 0), "on which of two is unknown"
    have(1)
    assert opens_handles(None, HERE, 1, 0)
    assert not opens_handles(None, ELSEWHERE, 1, 0)


def test_tensors_that_the_receiver_cannot_open_are_copied_to_the_cpu() -> None:
    class OnGpu(torch.Tensor):
        """Stands for a tensor of a GPU, which has an index."""

        @property
        def is_cuda(self) -> bool:
            return True

        @property
        def device(self) -> torch.device:
            return torch.device("cuda:1")

        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            return self.as_subclass(torch.Tensor).clone()

    indices: list[int] = []
    tensors = {"a": torch.ones(2), "b": torch.ones(3).as_subclass(OnGpu)}
    assert sendable(tensors, lambda index: not indices.append(index)) is tensors
    copies = sendable(tensors, lambda index: False)
    assert indices == [1]
    assert {name: type(tensor) for name, tensor in copies.items()} == {"a": torch.Tensor, "b": torch.Tensor}
