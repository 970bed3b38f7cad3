"""The ranks of a learner, as a program: for each line `SIZE FOLDER` of its input, `rank_process.py` starts SIZE ranks.

Each rank learns the cases of `FOLDER/cases.pt` and writes its results to `FOLDER/rank-RANK.pt`. When all have ended,
the program prints their exit codes, a line of JSON. Ranks are forks of the program, so PyTorch is imported once.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import multiprocessing
import sys
import time
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimizer would import it in each rank
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import agentgym.trainers.parallel.ranks
from agentgym.errors import AgentGymError
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import published_views
from agentgym.model.policy import load_policy
from agentgym.trainers.checkpoints.sharded_state import StateShard, finish_state, open_state, plans_of_ranks
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.lora import adapt
from agentgym.trainers.parallel.learner_ranks import Sharded
from agentgym.trainers.parallel.ranks import Ranks
from agentgym.trainers.parallel.sharded_tensor import shard, whole

LIMIT_S = 280


class Calls(TorchDispatchMode):
    """Counts what a process sends and receives, by the operator, and the sizes of gathered tensors in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.gathered: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name] += 1
            if "allgather_base" in func._schema.name:
                self.gathered.add(args[0].nbytes)
        return func(*args, **(kwargs or {}))


class Kept:
    """Counts the bytes that a model keeps for its backward pass, each memory once; of a step in one micro-batch."""

    def __init__(self, model: LanguageModel) -> None:
        self.memory: dict[int, int] = {}
        self._forward = model.forward
        model.forward = self._counted  # type: ignore[method-assign]

    def _counted(self, *arguments: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self._seen, lambda tensor: tensor):
            return self._forward(*arguments)

    def _seen(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.memory[storage.data_ptr()] = storage.nbytes()
        return tensor


def learn(case: dict[str, Any], ranks: Ranks | None) -> dict[str, Any]:
    """Two updates of `case["model"]`, and what is seen of them; one where a `state` to go on from is given.

    The model is that of a folder if a path is given.
    """
    folder = case["model"] if isinstance(case["model"], Path) else case.get("folder")

    def prepare(model: LanguageModel) -> LanguageModel:
        if case.get("experts"):
            model.hf.set_experts_implementation(case["experts"])
        if case.get("weights"):
            with torch.no_grad():
                for name, view in published_views(model):
                    view.copy_(case["weights"][name])
        lora = case["config"].lora
        return adapt(model, lora) if ranks and lora.rank and not case.get("bare") else model

    sharded: LanguageModel | Sharded
    if ranks and folder is not None:
        sharded = ranks.load(folder, prepare=None if case.get("folder") else prepare)
    else:
        model = prepare(copy.deepcopy(case["model"]) if folder is None else load_policy(folder))
        sharded = model if ranks is None else ranks.shard(model)
    learned = sharded.model if case.get("alone") and isinstance(sharded, Sharded) else sharded
    reference = copy.deepcopy(case.get("reference"))
    learner = Learner(learned, case["config"], case["optimizer"], total_steps=4, reference=reference)
    gradients: list[Tensor] = []
    step = learner.optimizer.step

    def seen() -> float:
        if not gradients:
            gradients.extend(
                whole(parameter.grad, of=parameter).clone()
                for parameter in learner.optimizer.parameters
                if parameter.grad is not None
            )
        return step()

    learner.optimizer.step = seen  # type: ignore[method-assign]
    batch, outcome = case["batch"], {}
    if case.get("differs") and dist.get_rank() == 1:
        batch = batch.select([0, 1])
    if isinstance(case.get("state"), Path):
        learner.load_state_dict(open_state(case["state"]))
    elif case.get("state"):
        learner.load_state_dict(copy.deepcopy(case["state"]))  # it is taken over, and the case is learned again
    else:
        activations = Kept(learner.model)
        first = learner.update(batch)
        outcome = {"first": first, "kept": sum(activations.memory.values()), "critic": learner.update_critic(batch)}
        outcome |= {
            "state": copy.deepcopy(learner.state_dict()),
            "between": {name: tensor.clone() for name, tensor in learner.weights()},
        }
    if ranks and case.get("saved"):
        save_shards(learner, case["saved"])
    calls = Calls()
    with calls if case.get("counted") else nullcontext():  # it makes a step a third slower
        outcome["last"] = learner.update(batch)
    outcome |= {"gathered": calls.gathered, "held": expert_bytes(learner.model)}
    outcome |= {"calls": dict(calls.counts), "logprobs": learner.logprobs(batch), "gradients": gradients}
    outcome |= {"proxies": learner.gradient_proxies(batch), "weights": dict(learner.weights())}
    if case["config"].kl.place == "reward" and case["config"].kl.coefficient:
        outcome["penalties"] = learner.penalties(batch)
    if learner.critic is not None:
        outcome["values"], outcome["ends"] = learner.critic.read(batch)
    learner.close()
    return outcome


def expert_bytes(model: LanguageModel) -> int:
    """Returns the bytes of the experts that a process has."""
    stacks = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    return sum(stack.to_local().nbytes if isinstance(stack, DTensor) else stack.nbytes for stack in stacks)


def save_shards(learner: Learner, folder: Path) -> None:
    """Writes a state as the ranks of a cluster do: each its own shards."""
    rank = dist.get_rank()
    copied = StateShard(learner.state_dict(shard), rank, plans_of_ranks, CopyMemory())
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, copied.write(folder))
    if rank == 0:
        finish_state(folder, copied.structure, copied.metadata, results)
    dist.barrier()


def no_whole_model(*_: object, **__: object) -> LanguageModel:
    raise AssertionError("only the first rank loads a whole model")


def run_rank(folder: Path, rank: int, size: int) -> None:
    """Learns all cases, one after the other."""
    faulthandler.enable()  # a rank has died of a segmentation fault in a long run of all tests
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    outcomes: dict[str, object] = {}
    if rank:
        agentgym.trainers.parallel.ranks.load_policy = no_whole_model  # type: ignore[assignment]
    for name, case in torch.load(folder / "cases.pt", weights_only=False).items():
        try:
            outcomes[name] = learn(case, Ranks(case["config"]))
        except AgentGymError as error:
            outcomes[name] = error
    torch.save(outcomes, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


def run_ranks(folder: Path, size: int) -> list[int | None]:
    """Returns the exit codes of all ranks; one that takes longer than `LIMIT_S` is killed."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(folder, rank, size)) for rank in range(size)]
    deadline = time.monotonic() + LIMIT_S
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def main() -> None:
    """Answers each line of the input."""
    for line in sys.stdin:
        size, folder = line.rstrip("\n").split(" ", 1)
        print(json.dumps(run_ranks(Path(folder), int(size))), flush=True)


if __name__ == "__main__":
    main()
