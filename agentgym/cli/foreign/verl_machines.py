"""The conversions of verl's engines, devices and ranks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from agentgym.cli.foreign.keys import Converter, MissingPart, NoCounterpart, SameMeaning, Several, Theirs
from agentgym.cli.foreign.verl_values import ROLLOUT
from agentgym.engines.server_kind import SERVERS, LaunchOption

__all__ = [
    *("verl_device", "verl_engine", "verl_engine_arg", "verl_expert_parallel", "verl_has_gpu", "verl_machines"),
    *("verl_parallel", "verl_ranks_only", "verl_sleep", "verl_split_gpus", "verl_tensor_parallel"),
]

ENGINE_ARGS: Mapping[str, LaunchOption] = {
    "gpu_memory_utilization": "memory_share",
    "tensor_model_parallel_size": "tensor_parallel",
    "max_num_seqs": "num_requests",
    "max_num_batched_tokens": "prefill_tokens",
    "enforce_eager": "eager",
}
"""Keys of the rollout that are options of the servers' own command lines."""


def verl_engine_arg(key: str) -> Converter:
    """Returns a conversion to an option of the server's own command line."""

    def convert(value: Any, theirs: Theirs) -> Several:
        if not _on_servers(theirs):
            raise SameMeaning("of no effect on the engine local")
        option = SERVERS[theirs.get(ROLLOUT + "name")].options[ENGINE_ARGS[key]]
        if value is False:
            raise SameMeaning(f"the server's default, without {option}")
        if key == "tensor_model_parallel_size":
            value = verl_split_gpus(theirs)[2]
            if value == 1:
                raise SameMeaning("one GPU for each server")
        return Several({"server.server_args": [option] if value is True else [option, str(value)]})

    return convert


def _on_servers(theirs: Theirs) -> bool:
    return str(theirs.get(ROLLOUT + "name")) in SERVERS


def verl_sleep(value: Any, theirs: Theirs) -> Several:
    """Returns whether a server frees the learner's GPU while that learns."""
    if not _on_servers(theirs):
        raise SameMeaning("the engine local has the learner's weights")
    if _num_gpus(theirs) > 1 or theirs.get("trainer.device") == "cpu":
        raise SameMeaning("servers share no GPU with a rank, unless ray.layout is colocated")
    return Several({"server.serving.sleep": bool(value)})


def verl_has_gpu() -> bool:
    """Returns True if this machine has an NVIDIA GPU."""
    return shutil.which("nvidia-smi") is not None


def verl_device(value: Any, theirs: Theirs) -> Any:
    """Returns the device of a run in one process; on a cluster, GPUs are reserved instead."""
    if value == "cpu":
        return "cpu"
    if _num_gpus(theirs) > 1:
        raise SameMeaning("ray.gpus_per_learner: 1")
    if not verl_has_gpu():
        raise MissingPart("this machine has no GPU, and learner.device stays cpu: set it to cuda where there is one")
    return value


def _num_gpus(theirs: Theirs) -> int:
    counts = theirs.get("trainer.n_gpus_per_node", 1), theirs.get("trainer.nnodes", 1)
    return int(counts[0]) * int(counts[1])


def verl_split_gpus(theirs: Theirs) -> tuple[int, int, int]:
    """Returns learner ranks, engines, and the GPUs of an engine: servers get half, since they share none with ranks."""
    total = _num_gpus(theirs)
    per_engine = min(int(theirs.get(ROLLOUT + "tensor_model_parallel_size", 1)), max(1, total // 2))
    engines = max(1, total // 2 // per_engine)
    return total - engines * per_engine, engines, per_engine


def verl_machines(value: Any, theirs: Theirs) -> Several:
    """Returns the processes of a run on several GPUs."""
    total = _num_gpus(theirs)
    if total < 2:
        raise SameMeaning("executor: local, one process")
    if theirs.get("trainer.device") == "cpu":
        raise NoCounterpart("the processes of a cluster are GPUs in verl: set executor ray, ray.learners, ray.engines")
    if not _on_servers(theirs):
        layout = {"ray.layout": "colocated", "ray.learners": total, "ray.engines": total, "ray.gpus_per_engine": 1.0}
    else:
        learners, engines, per_engine = verl_split_gpus(theirs)
        layout = {"ray.learners": learners, "ray.engines": engines, "ray.gpus_per_engine": float(per_engine)}
    return Several({"executor": "ray", "ray.gpus_per_learner": 1.0, **layout})


def verl_ranks_only(value: Any, theirs: Theirs) -> Any:
    """Returns a value that counts on several ranks."""
    if _num_gpus(theirs) < 2 or not value:
        raise SameMeaning("of no effect on one rank")
    return value


def verl_parallel(value: Any, theirs: Theirs) -> Any:
    """Returns a number of ranks that share a forward pass."""
    learners = verl_split_gpus(theirs)[0] if _on_servers(theirs) else _num_gpus(theirs)
    if value > 1 and learners % value:
        raise NoCounterpart(f"the {learners} learner ranks are no multiple of {value}: set learner.mesh")
    return verl_ranks_only(value if value > 1 else 0, theirs)


def verl_tensor_parallel(value: Any, theirs: Theirs) -> Any:
    """Returns the ranks that split the weights of a layer, which adapters do not."""
    if any(theirs.get(f"actor_rollout_ref.model.{name}") for name in ("lora_rank", "lora.rank")):
        raise NoCounterpart("adapters are not split by learner.mesh.tensor")
    return verl_parallel(value, theirs)


def verl_expert_parallel(value: Any, theirs: Theirs) -> Any:
    """Returns the ranks that divide the experts of a mixture, whose passes ranks do not share."""
    shared = ("megatron.tensor_model_parallel_size", "ulysses_sequence_parallel_size")
    if value > 1 and any(theirs.get(f"actor_rollout_ref.actor.{name}", 1) > 1 for name in shared):
        raise NoCounterpart("ranks that divide experts share no passes: set learner.mesh.expert alone")
    return verl_parallel(value, theirs)


def verl_engine(value: Any, _: Theirs) -> str:
    """Returns the engine that samples."""
    if value in ("hf", "naive"):
        return "local"
    if str(value) not in SERVERS:
        raise NoCounterpart("engine is local, sglang or vllm, or your own as file.py:name")
    return str(value)
