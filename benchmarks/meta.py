"""Counts what a learner's forward and backward passes do on a GPU, without one: on torch's meta device.

Every operator of the real code is counted: launches of kernels, views, bytes read and written, operations of matrix
products and attention, and the most bytes that live at once. The seconds are predicted for an H200: of each kernel the
longest of its bytes at 4 TB/s, its operations at up to 700 TFLOP/s (attention at 330), and 2 microseconds; of the
processor 6 microseconds a launch and 1.5 a view. The longer of both sums is the prediction. The optimizer is not
counted.

Attention is that of a GPU, one flash call a layer, and so are the fast decoder's norms, rotations and gates, one kernel
each. The fast decoder and the model of transformers are both counted.

    python benchmarks/meta.py [--shapes 0.6B 8B] [--rows 8x2048 1x16384 1x32768]

What was measured on an H200 (`gpu/h200/learning.jsonl`) is printed beside, and what `agentgym plan` predicts of the
memory of the forward pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from shapes import PUBLISHED, shape_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from agentgym.model import decoder, pass_attention
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.pass_attention import HOOK, register_hook
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.learner.token_logprobs import score_targets
from agentgym.trainers.planning.config import EpisodeSpec, PlanConfig
from agentgym.trainers.planning.find_shape import shape_of as planned_shape
from agentgym.trainers.planning.memory import learner_memory
from agentgym.trainers.settings.learner import LearnerConfig

BYTES_S, FLOPS_S, ATTENTION_FLOPS_S, LEAST_S = 4.0e12, 700e12, 330e12, 2e-6
HALF_SIDE = 640
"""The shortest side of a product that is computed at half of FLOPS_S: with it 0.6 B takes what was measured."""
LAUNCH_S, VIEW_S = 6e-6, 1.5e-6
FEW_ROWS = 1024
"""A product of fewer rows is no further from FLOPS_S: it takes as long as reading its weights."""
MEASURED = {("0.6B", "8x2048"): 0.240, ("0.6B", "1x16384"): 0.522}
"""Seconds of a step on an H200, the optimizer included."""


@dataclass
class Counts:
    """What the operators of a pass did."""

    launches: int = 0
    views: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    gpu_s: float = 0.0
    peak_bytes: float = 0.0

    @property
    def cpu_s(self) -> float:
        """Predicted seconds of the processor."""
        return self.launches * LAUNCH_S + self.views * VIEW_S

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the pass."""
        return max(self.gpu_s, self.cpu_s)


@dataclass
class Counter(TorchDispatchMode):
    """Counts the operators inside the context; `pairs` are the queries times keys of one head that attention sees."""

    pairs: int
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        storages = {x.untyped_storage()._cdata for x in inputs}
        writes = func._schema.is_mutable
        if not writes and all(x.untyped_storage()._cdata in storages for x in outputs):
            self.counts.views += 1
            return result
        moved = float(sum(_size(x) for x in (*inputs, *outputs)))
        self.add(moved, *self._flops(func, inputs, outputs))
        self._follow(outputs)
        return result

    def add(self, moved: float, flops: float = 0.0, rate: float = FLOPS_S) -> None:
        """Counts a kernel by the bytes that it reads and writes, and its operations at so many a second."""
        self.counts.launches += 1
        self.counts.bytes += moved
        self.counts.flops += flops
        self.counts.gpu_s += max(moved / BYTES_S, flops / rate, LEAST_S)

    def go_on(self, before: Counter) -> None:
        """Begins with the memory that another counter saw last."""
        self._alive, self._most_bytes = before._alive, before._most_bytes

    def _flops(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> tuple[float, float]:
        name = func.name()
        if "flash_attention" in name or "scaled_dot_product" in name:
            is_back = "backward" in name
            if "flash_attention" in name:
                query = inputs[1] if is_back else inputs[0]
                products = 4.0 * query.shape[-2] * query.shape[-1] * self.pairs
            else:
                query, key = (inputs[1], inputs[2]) if is_back else (inputs[0], inputs[1])
                products = 4.0 * query.shape[:-1].numel() * key.shape[-2] * query.shape[-1]
            return (2.5 if is_back else 1.0) * products, ATTENTION_FLOPS_S
        if name in ("aten::linear", "aten::mm", "aten::addmm", "aten::bmm", "aten::addmm_"):
            inner = (inputs[0] if name == "aten::linear" else inputs[-2]).shape[-1]
            rows, columns = outputs[0].shape[-2:]
            side = min(max(rows, FEW_ROWS), columns, inner)
            return 2.0 * outputs[0].numel() * inner, FLOPS_S * side / (side + HALF_SIDE)
        return 0.0, FLOPS_S

    def _follow(self, outputs: list[Tensor]) -> None:
        """Adds new memory; what has ended is looked for as soon as the sum is 2% above the most so far."""
        for output in outputs:
            storage = output.untyped_storage()
            if storage._cdata not in self._alive:
                self._most_bytes += storage.nbytes()
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self._most_bytes > 1.02 * self.counts.peak_bytes:
            self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
            self._most_bytes = float(sum(size for _, size in self._alive.values()))
            self.counts.peak_bytes = max(self.counts.peak_bytes, self._most_bytes)


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


class _Norm(torch.autograd.Function):
    """What torch's fused norm keeps, reads and writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return torch.empty_like(grads[0]), torch.empty_like(ctx.saved_tensors[1]), None


class _Rotation(torch.autograd.Function):
    """The same of `gpu_rows.rotate`."""

    @staticmethod
    def forward(ctx: Any, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
        ctx.save_for_backward(cos_ND, sin_ND)
        return torch.empty_like(x_NHD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.empty_like(grads[0]), None, None


class _Gate(torch.autograd.Function):
    """The same of `gpu_rows.gate`."""

    @staticmethod
    def forward(ctx: Any, flat_NF: Tensor) -> Tensor:
        ctx.save_for_backward(flat_NF)
        return torch.empty_like(flat_NF[:, : flat_NF.shape[1] // 2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Makes the meta device compute by the kernels of a GPU."""
    with ExitStack() as stack:
        for module in (decoder, pass_attention):
            stack.enter_context(patch.object(module, "is_flash_attention", lambda *_: True))
        for name, kernel in {"rms_norm": _Norm, "apply_rope": _Rotation, "_gate": _Gate}.items():
            stack.enter_context(patch.object(decoder, name, kernel.apply))
        yield


def model_of(shape: str, backend: str) -> LanguageModel:
    """Returns a model without memory, in bfloat16."""
    with torch.device("meta"):
        if backend == "fast":
            decoder = Decoder(shape_of(shape)).to(torch.bfloat16)
            decoder.make_rope()
            return decoder
        register_hook()
        if shape in PUBLISHED:
            family, settings = PUBLISHED[shape]
            hf_config = AutoConfig.for_model(family, **settings)
        else:
            hf_config = AutoConfig.for_model(**shape_of(shape).to_hf())
        hf = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16, attn_implementation=HOOK)
        return TransformersModel(hf, hf_config.to_dict())


def count_step(model: LanguageModel, lengths: list[int], *, recomputes: bool = False) -> dict[str, Counts]:
    """Returns the counts of both passes over one micro-batch, a third of whose tokens are trained."""
    size = sum(lengths)
    model.set_recompute(recomputes)
    mask_N = torch.arange(size) % 3 == 0
    layout = PackedLayout(lengths, "meta", mask_N=mask_N)
    ids_N = torch.zeros(size, dtype=torch.int64, device="meta")
    target_M = torch.zeros(int(mask_N.sum()), dtype=torch.int64, device="meta")
    counts = {name: Counter(sum(n * (n + 1) // 2 for n in lengths)) for name in ("forward", "backward")}
    parameters = list(model.parameters())
    with kernels_of_a_gpu():
        with counts["forward"]:
            logp_M = score_targets(model.hidden_states(ids_N, layout), model.head_weight, target_M).logp_N
            loss = logp_M.sum()
        counts["backward"].go_on(counts["forward"])
        with counts["backward"]:
            torch.autograd.grad(loss, parameters)
    return {name: counter.counts for name, counter in counts.items()}


def planned_gib(name: str, backend: str, number: int, length: int) -> float:
    """Returns what `agentgym plan` predicts of the forward pass of so many rows, without gradients."""
    shape = planned_shape(name)
    if backend == "transformers" and not shape.refusal:
        shape = replace(shape, refusal="it is to be computed by transformers")
    episode = EpisodeSpec(prompt_tokens=1, reply_tokens=length - 1, tool_tokens=0, turns=1)
    learner = LearnerConfig(micro_batch_tokens=number * length)
    memory = learner_memory(shape, PlanConfig(model=name, tasks=number, group_size=1, episode=episode, learner=learner))
    return (memory.kept + memory.logits) / 2**30


def show(title: str, counts: dict[str, Counts], planned: float, note: str = "") -> None:
    """Prints a line of the table."""
    total_s = sum(part.predicted_s for part in counts.values())
    launches = "+".join(f"{part.launches:,}" for part in counts.values())
    moved = sum(part.bytes for part in counts.values()) / 1e12
    flops = sum(part.flops for part in counts.values()) / 1e12
    peak = max(part.peak_bytes for part in counts.values()) / 2**30
    forward = counts["forward"].peak_bytes / 2**30
    memory = f"{peak:5.0f} {forward:8.0f} {planned:8.0f}"
    print(f"{title:34} {launches:>13} {moved:6.2f} {flops:7.0f} {memory} {total_s:7.2f} {note}", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "8B", "32B", "qwen3-30b-a3b"])
    parser.add_argument("--rows", nargs="+", default=["8x2048", "1x16384", "1x32768"])
    options = parser.parse_args()
    gib = f"{'GiB':>5} {'forward':>8} {'planned':>8}"
    print(f"{'':34} {'launches':>13} {'TB':>6} {'TFLOP':>7} {gib} {'s':>7} measured s")
    for shape in options.shapes:
        for rows in options.rows:
            number, length = map(int, rows.split("x"))
            for backend in ("transformers",) if shape in PUBLISHED else ("fast", "transformers"):
                counts = count_step(model_of(shape, backend), [length] * number)
                measured = MEASURED.get((shape, rows), "") if backend == "fast" else ""
                planned = planned_gib(shape, backend, number, length)
                show(f"{shape} {rows} {backend}", counts, planned, str(measured))


if __name__ == "__main__":
    main()
