"""Our addition to vLLM's worker, in vLLM's own process: loads weights that are sent, and reports which ones it has.

Given to vLLM as `--worker-extension-cls`, as a file of its own: it imports nothing of agentgym, so vLLM's environment
need not have it. Nothing else imports it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["WeightWorker"]


def _leave_weights_unpacked() -> None:
    """Keeps vLLM on CPU from packing each matrix into an opaque copy of its own and forgetting the original.

    No update reaches such a copy: a tied output head continues with the old one, silently. Here every layer computes
    from its parameter.
    """
    functional = importlib.import_module("torch.nn.functional")
    layers: Any = importlib.import_module("vllm.model_executor.layers.utils")

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    layers.dispatch_cpu_unquantized_gemm = dispatch


if "vllm" in sys.modules:  # which is where vLLM loads this file: before the model
    _leave_weights_unpacked()


class WeightWorker:
    """Mixed into vLLM's worker; each method answers `/collective_rpc` or `AsyncLLM.collective_rpc`.

    For dense decoders in an unquantized dtype: those compute from their parameters and from nothing derived from them.
    """

    model_runner: Any
    vllm_config: Any
    _agentgym_group: Any

    def agentgym_layout(self) -> dict[str, Any]:
        """Returns what our engine asks for first.

        `{"vocab_size", "ranks", "seeds", "device", "logprobs", "weights": [[published name, shape, dtype], ...]}`.
        Shapes are this rank's share, `logprobs` is vLLM's mode. `seeds` is true if requests may have them: on CPU a
        seeded request whose prompt is read in several steps ends vLLM 0.32 ("CPU Generator does not use offset").
        """
        model = self.model_runner.get_model()
        weights = [[name, list(part.shape), _dtype(part)] for name, part in _published_parameters(model)]
        ranks = int(self.vllm_config.parallel_config.world_size)
        vocab_size = int(self.vllm_config.model_config.get_vocab_size())
        device = str(next(model.parameters()).device.type)
        seeds = not (device == "cpu" and self.vllm_config.scheduler_config.enable_chunked_prefill)
        mode = str(self.vllm_config.model_config.logprobs_mode)
        layout = {"vocab_size": vocab_size, "ranks": ranks, "seeds": seeds, "device": device}
        return {**layout, "logprobs": mode, "weights": weights}

    def agentgym_load(self, payload: str) -> int:
        """Copies tensors into the parameters that they belong to; returns how many parameters were written.

        `payload` is base64 of a safetensors file under published names.
        """
        safetensors = importlib.import_module("safetensors.torch")
        return self._agentgym_write(safetensors.load(base64.b64decode(payload)).items())

    def agentgym_load_handles(self, handles: str) -> int:
        """Does the same as `agentgym_load`, from memory of the same GPU.

        `handles` is JSON of [[published name, handle], ...], as `memory_handle` in `engines/weights/buckets.py` makes
        them.
        """
        return self._agentgym_write((name, _open_handle(handle)) for name, handle in json.loads(handles))

    def agentgym_load_folder(self, folder: str) -> int:
        """Does the same as `agentgym_load`, from the safetensors files of a model folder that this process can read."""
        loader = importlib.import_module("vllm.model_executor.model_loader.weight_utils")
        pathlib = importlib.import_module("pathlib")
        files = sorted(str(path) for path in pathlib.Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"no *.safetensors in {folder!r}")
        return self._agentgym_write(loader.safetensors_weights_iterator(files, use_tqdm_on_load=False))

    def agentgym_digests(self) -> dict[str, str]:
        """Returns the first 16 hex digits of the SHA-256 of each parameter's bytes, under vLLM's own names.

        An embedding counts without the rows that pad it. Several ranks append their number to the name.
        """
        return {name: _digest(tensor) for name, tensor in self._agentgym_parameters()}

    def agentgym_sums(self) -> dict[str, str]:
        """Returns a number of each parameter's content, which is computed where it is.

        It is that of `fused_sums` in `engines/weights/buckets.py`. Names are those of `agentgym_digests`.
        """
        torch = importlib.import_module("torch")
        parameters = list(self._agentgym_parameters())
        sums = torch.stack([_sum(tensor) for _, tensor in parameters]).tolist() if parameters else []
        return {name: str(number) for (name, _), number in zip(parameters, sums, strict=True)}

    def _agentgym_parameters(self) -> Iterator[tuple[str, Any]]:
        rank = int(getattr(self, "rank", 0))
        mark = f" (rank {rank})" if rank else ""
        for name, _, tensor in _parameters(self.model_runner.get_model()):
            yield name + mark, tensor

    def agentgym_join(self, invitation: str) -> int:
        """Joins the process group in which the trainer is rank 0; returns this worker's rank in it.

        `invitation` is JSON of `{"address", "port", "num_ranks", "name", "backend", "timeout_s"}`.
        """
        fields = json.loads(invitation)
        rank = 1 + int(getattr(self, "rank", 0))
        self._agentgym_group = _join_group(fields, rank)
        return rank

    def agentgym_receive(self, manifest: str) -> int:
        """Does the same as `agentgym_load`, with tensors that the trainer broadcasts.

        `manifest` is JSON of [[published name, shape, dtype], ...] in the order in which they come.
        """
        torch = importlib.import_module("torch")
        collective = importlib.import_module("torch.distributed")
        device = next(self.model_runner.get_model().parameters()).device

        def receive_tensors() -> Iterator[tuple[str, Any]]:
            for name, shape, dtype in json.loads(manifest):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                collective.broadcast(tensor, src=0, group=self._agentgym_group)
                yield name, tensor

        return self._agentgym_write(receive_tensors())

    def agentgym_leave(self) -> int:
        """Leaves that group."""
        importlib.import_module("torch.distributed").destroy_process_group(self._agentgym_group)
        return 0

    def _agentgym_write(self, weights: Iterable[tuple[str, Any]]) -> int:
        config = importlib.import_module("vllm.config")
        torch = importlib.import_module("torch")
        with torch.no_grad(), config.set_current_vllm_config(self.vllm_config):
            return len(self.model_runner.get_model().load_weights(weights) or ())


def _join_group(fields: dict[str, Any], rank: int) -> Any:
    # The public constructor makes the process's only default group, which vLLM needs for itself.
    collective = importlib.import_module("torch.distributed")
    internals = importlib.import_module("torch.distributed.distributed_c10d")
    timeout = importlib.import_module("datetime").timedelta(seconds=fields["timeout_s"])
    num_ranks, name = int(fields["num_ranks"]), fields["name"]
    store = collective.TCPStore(fields["address"], fields["port"], num_ranks, False, timeout, wait_for_workers=False)
    group, _ = internals._new_process_group_helper(
        num_ranks,
        rank,
        [],
        internals.Backend(fields["backend"]),
        internals.PrefixStore(name, store),
        group_name=internals.GroupName(name),
        timeout=timeout,
    )
    internals._world.pg_group_ranks[group] = {rank: rank for rank in range(num_ranks)}
    return group


def _open_handle(handle: dict[str, Any]) -> Any:
    """Returns the tensor whose GPU memory another process shares."""
    torch = importlib.import_module("torch")
    reductions = importlib.import_module("torch.multiprocessing.reductions")
    memory, counter, event = (base64.b64decode(handle[name]) for name in ("memory", "counter", "event"))
    return reductions.rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size(handle["shape"]),
        tuple(handle["stride"]),
        int(handle["offset"]),
        torch.UntypedStorage,
        getattr(torch, handle["dtype"]),
        torch.cuda.current_device(),
        memory,
        int(handle["storage_bytes"]),
        int(handle["storage_offset"]),
        False,
        counter,
        int(handle["counter_offset"]),
        event,
        bool(handle["event_sync"]),
    )


def _parameters(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (vLLM's name, module, tensor) of every parameter once; a tied head is its embedding."""
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        tensor = parameter.data
        if tensor.numel() == 0:
            raise RuntimeError(f"{name} was packed and forgotten: this extension was loaded after the model")
        added = getattr(module, "num_embeddings_padded", None)
        if added is not None and getattr(module, "tp_size", 1) == 1:
            tensor = tensor[: module.org_vocab_size]
        yield name, module, tensor


def _published_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields each parameter under the name (or names) that a published checkpoint has for it."""
    packed = getattr(model, "packed_modules_mapping", None) or {}
    for name, module, tensor in _parameters(model):
        path, _, leaf = name.rpartition(".")
        parent, _, kind = path.rpartition(".")
        if len(packed.get(kind, ())) < 2:  # some checkpoints hold a packed tensor as such
            yield name, tensor
            continue
        for part, share in zip(packed[kind], tensor.split(list(module.output_partition_sizes)), strict=True):
            yield f"{parent}.{part}.{leaf}", share


def _digest(tensor: Any) -> str:
    torch = importlib.import_module("torch")
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).hexdigest()[:16]


def _sum(tensor: Any) -> Any:
    """Returns the sum of the elements as integers, each times an odd number of its place, modulo 2^64."""
    torch = importlib.import_module("torch")
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, some in enumerate(words.split(1 << 24)):
        start = number << 24
        index = torch.arange(start, start + len(some), device=some.device) * 0x1E3779B97F4A7C15
        total += ((index ^ (index >> 29)) | 1).mul_(some).sum()
    return total


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
