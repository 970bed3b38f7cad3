"""The check of a model on several ranks: a step of two FSDP2 processes against the same step in one process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from agentgym.errors import AgentGymError
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_class import quiet_transformers
from agentgym.model.policy import load_policy
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.batch.credits import flat_credit
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.parallel.learner_ranks import Sharded
from agentgym.trainers.parallel.ranks import Ranks
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

__all__ = ["step_on_ranks"]

_SIZE = 2
_LIMIT_S = 300.0
_STEP = OptimizerConfig(name="sgd", learning_rate=1e3, warmup_steps=0, max_grad_norm=1e30)
"""Plain gradient descent, at a rate at which a weight's rounding hides nothing of its gradient."""


def step_on_ranks(
    folder: Path, backend: str, before: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields what a step changes in each published tensor on two ranks, and in one process: multiples of the gradient.

    `before` are the tensors of the folder's model. Those after the step are read from files, one at a time.

    The step is one of three groups of unequal rows, in several micro-batches. The ranks are processes of this machine,
    with gloo, on the CPU. Raises AgentGymError if they cannot compute the step.
    """
    with tempfile.TemporaryDirectory() as output:
        alone_file, ranks_file = Path(output) / "alone.safetensors", Path(output) / "ranks.safetensors"
        _write_step(load_policy(folder, backend=backend), alone_file)
        _run_ranks(folder, backend, ranks_file)
        with safe_open(ranks_file, "pt") as ranks, safe_open(alone_file, "pt") as alone:
            for name, tensor in before:
                first = tensor.detach()
                yield name, ranks.get_tensor(name) - first, alone.get_tensor(name) - first


def _run_ranks(folder: Path, backend: str, file: Path) -> None:
    """Has new processes compute the step; the first writes its weights."""
    get_context("forkserver").set_forkserver_preload([__name__, "torch._dynamo"])  # imported once for many checks
    arguments = (folder, backend, file)
    ranks = start_processes(_learn_as_rank, arguments, _SIZE, join=False, daemon=True, start_method="forkserver")
    deadline = time.monotonic() + _LIMIT_S
    try:
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                raise AgentGymError(f"the ranks took longer than {_LIMIT_S:.0f} s")
    except ProcessRaisedException as error:
        raise AgentGymError(str(error).strip().splitlines()[-1].removeprefix("agentgym.errors.")) from error
    except ProcessExitedException as error:
        remedy = "a script calls it under `if __name__ == '__main__':`, because each rank imports the script"
        raise AgentGymError(f"{error}; {remedy}") from error
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def _learn_as_rank(rank: int, folder: Path, backend: str, file: Path) -> None:
    torch.set_num_threads(1)
    address, timeout = f"file://{file.with_name('store')}", timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=_SIZE, timeout=timeout)
    with quiet_transformers():
        _write_step(Ranks().load(folder, backend=backend), file)
    dist.destroy_process_group()


def _write_step(model: LanguageModel | Sharded, file: Path) -> None:
    """Takes the step and writes the whole weights by their published names, which of several ranks the first has."""
    learner = Learner(model, LearnerConfig(loss="gpg", micro_batch_tokens=160), _STEP, total_steps=1)
    learner.update(_batch(learner.model.vocab_size))
    weights = {name: tensor.detach().contiguous() for name, tensor in learner.weights(trained_only=False)}
    if weights:
        save_file(weights, file)
    learner.close()


def _batch(vocab_size: int) -> TrainingBatch:
    """Three groups of three replies of unequal lengths to a shared prompt."""
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocab_size, (length,), generator=generator).tolist())

    groups, credits = [], []
    for number in range(3):
        task, prompt = Task("a check", number), TokenSpan(draw(40), Source.PROMPT)
        members = tuple(_make_episode(task, member, prompt, draw(9 + 8 * member + 3 * number)) for member in range(3))
        groups.append(Group(str(number), task, members))
        credits.append(flat_credit(groups[-1], [1.0, -0.5, -0.5]))
    return build_batch(groups, credits, aggregation="token-mean")


def _make_episode(task: Task, member: int, prompt: TokenSpan, ids: tuple[int, ...]) -> Trajectory:
    """Returns an episode of one reply; the loss ignores its logprobs."""
    reply = TokenSpan(ids, Source.POLICY, (0.0,) * len(ids), (0,) * len(ids))
    return Trajectory(
        task=task,
        group=str(task.seed),
        member=member,
        rows=(Row((prompt, reply)),),
        turns=(Turn(Message("assistant", ""), 0.0),),
        status=Status.COMPLETED,
        stop_reason=StopReason.TERMINATED,
    )
