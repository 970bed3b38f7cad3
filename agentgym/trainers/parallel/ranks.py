"""A learner of several processes: FSDP2 shards the weights, and each rank learns from its share of every batch.

The processes are started elsewhere. Each of them opens the process group, shards, and has a Learner of its own:

    dist.init_process_group("gloo")
    ranks = Ranks(config.learner)
    learner = Learner(ranks.load(folder), config.learner, config.optimizer, total_steps=steps)
    stats = learner.update(batch)  # the same batch on all ranks, the same numbers from all of them
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from agentgym.errors import AgentGymError, ConfigError, InvalidTrajectory
from agentgym.loading import is_code_path
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import decoder_config, fill_decoder
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import is_fast, load_policy
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.parallel.balance import divide_batch
from agentgym.trainers.parallel.block_exchange import PassExchange
from agentgym.trainers.parallel.expert_split import split_experts
from agentgym.trainers.parallel.gradient_threads import MicroResult
from agentgym.trainers.parallel.learner_ranks import IndexRange, Sharded, Share
from agentgym.trainers.parallel.mesh import RankMesh, check_mesh
from agentgym.trainers.parallel.sharded_tensor import like
from agentgym.trainers.parallel.split_layout import SplitLayout
from agentgym.trainers.parallel.tensor_split import mark_rows, second_cut, split_weights
from agentgym.trainers.settings.learner import LearnerConfig

__all__ = ["Ranks", "open_group"]

COLLECTIVE_S = 600.0
"""The seconds that a rank waits for the others."""
LOADING_S = 7200.0
"""The seconds that a rank waits for the first one to load a model."""

T = TypeVar("T")
S = TypeVar("S")


def open_group(*, on_gpu: bool, **place: Any) -> None:
    """Opens the default process group, by the variables of torchrun or by a `place` as torch takes it.

    On GPUs it has gloo too, for what is kept in CPU memory.
    """
    limit = timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=limit, **place)


class Ranks:
    """The processes of the default group as the ranks of a learner (see `LearnerRanks`).

    `device` is `cpu` (gloo) or `cuda` (nccl, one GPU per process, set with `torch.cuda.set_device` before). Raises
    ConfigError if no group is open, or if the settings ask for something that the device does not have.
    """

    def __init__(self, config: LearnerConfig | None = None, device: str = "cpu") -> None:
        config = config or LearnerConfig()
        if not dist.is_initialized():
            raise ConfigError(
                "ranks without a process group: call torch.distributed.init_process_group in each process first, or"
                " give the learner a model that is not sharded"
            )
        if config.fsdp.cpu_offload and device == "cpu":
            raise ConfigError("fsdp.cpu_offload keeps in CPU memory what a GPU computes with: leave it out on a CPU")
        self.config = config
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(device) if device == "cpu" else torch.device(device, torch.cuda.current_device())
        if device != "cpu":
            torch.backends.cuda.enable_cudnn_sdp(False)  # as `on_device` does
        self._mesh = RankMesh(config.mesh, device)
        self.portion = self._mesh.data_rank
        self._modules: list[FSDPModule] = []
        self._empty: LanguageModel | None = None
        """The model that was sharded last, without its weights: whole modules, which copies are made of."""

    def shard(self, model: LanguageModel) -> Sharded:
        """Shards the model's weights; from now on only its `forward` has them whole.

        Raises ConfigError for a model that cannot be split by this mesh.
        """
        check_mesh(self._mesh.config, model, self.size)
        self._empty = model.like()
        self.spread(model)
        return Sharded(model, self)

    def load(
        self,
        folder: str | os.PathLike[str],
        dtype: torch.dtype = torch.float32,
        *,
        backend: str = "auto",
        prepare: Callable[[LanguageModel], LanguageModel] | None = None,
    ) -> Sharded:
        """Loads and shards the model of a folder; raises as `load_policy` and `shard` do, on all ranks.

        A rank takes its part of one parameter of the fast decoder after the other, so no rank need hold a whole model.
        Of another model, or one that is prepared before it is sharded (with adapters, for example), the first rank has
        the whole in CPU memory and sends the others one parameter after the other. A class of the user's own may not
        be sent: each rank loads its whole model.
        """
        if prepare is None and is_fast(folder, backend):
            decoder = self._empty_model(decoder_config(folder), dtype)
            fill_decoder(decoder, folder, lambda parameter, stored: parameter.copy_(like(stored, parameter)))
            return Sharded(decoder, self)
        prepare = prepare or (lambda model: model)
        if is_code_path(backend):
            return self.shard(prepare(load_policy(folder, dtype=dtype, backend=backend)))
        whole, model = self._from_first(lambda: load_policy(folder, dtype=dtype, backend=backend))
        model, whole = prepare(model), None if whole is None else prepare(whole)
        self._fill_from_first(model, whole)
        return Sharded(model, self)

    def _from_first(self, make: Callable[[], LanguageModel]) -> tuple[LanguageModel | None, LanguageModel]:
        """Returns the model that the first rank makes, None on others, and the same model without its weights.

        Raises the first rank's error on all of them.
        """
        patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=LOADING_S))
        whole: LanguageModel | None = None
        message: list[Any] = [None]
        if self.rank == 0:
            try:
                whole = make()
                message = [whole.like()]
            except AgentGymError as error:
                message = [error]
            except Exception as error:  # noqa: BLE001  whatever it is, the others wait for it
                message = [ConfigError(f"the first rank cannot load the model: {error!r}")]
                message[0].__cause__ = error
        dist.broadcast_object_list(message, group=patient)
        dist.destroy_process_group(patient)
        if isinstance(message[0], AgentGymError):
            raise message[0]
        return whole, message[0]

    @torch.no_grad()
    def _fill_from_first(self, model: LanguageModel, whole: LanguageModel | None) -> None:
        """Shards a model without weights, and takes those of the whole one that the first rank has."""
        buffers = [buffer.clone() for buffer in model.buffers()]
        self.shard(model)
        self._give_memory(model)
        for own, saved_buffer in zip(model.buffers(), buffers, strict=True):
            own.copy_(saved_buffer)
        parameters = list(model.parameters())
        sources = [None] * len(parameters) if whole is None else list(whole.parameters())
        for parameter, source in zip(parameters, sources, strict=True):
            weight = torch.empty(parameter.shape, dtype=parameter.dtype) if source is None else source.detach()
            on_device = weight.to(self.device).contiguous()
            dist.broadcast(on_device, 0)
            parameter.copy_(like(on_device, parameter))

    def _empty_model(self, config: DecoderConfig, dtype: torch.dtype) -> Decoder:
        """A sharded model whose weights are not loaded yet."""
        with torch.device("meta"):
            model = Decoder(config).to(dtype)
        self.shard(model)
        self._give_memory(model)
        return model

    def _give_memory(self, model: LanguageModel) -> None:
        """Allocates a sharded model that has none; tied parameters, which `to_empty` unties, are tied again."""
        slots = [(part, *entry) for part in model.modules() for entry in part.named_parameters(recurse=False)]
        model.to_empty(device="cpu" if self.config.fsdp.cpu_offload else self.device)
        allocated: dict[int, nn.Parameter] = {}
        for part, name, before in slots:
            setattr(part, name, allocated.setdefault(id(before), getattr(part, name)))
        if isinstance(model, Decoder):  # one that was made without memory has no tables yet
            with self.device:
                model.make_rope()
        mark_rows(model, self._mesh.config.tensor)

    def spread(self, module: nn.Module) -> None:
        """Shards each block of a language model, and the parameters outside of them, as units to gather at once."""
        num_parts, experts = self._mesh.config.tensor, self._mesh.experts
        if num_parts > 1:
            split_weights(module, self._mesh.weights["tensor"])
        if experts is not None:
            for stacks in split_experts(module, experts["expert"]):
                self._fully_shard(stacks, experts["shards"], casts=False)
        parts = module.blocks if isinstance(module, LanguageModel) else ()
        for part in (*parts, module):
            self._fully_shard(part, self._mesh.shards)
        mark_rows(module, num_parts)

    def _fully_shard(self, module: nn.Module, mesh: DeviceMesh, *, casts: bool = True) -> None:
        config = self.config.fsdp
        dtype = None if self.config.dtype == "auto" else getattr(torch, self.config.dtype)
        sharded = fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=partial(second_cut, mesh.size()),
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=casts),
            offload_policy=CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
        )
        # The shares add up to the step's gradient, so it is a sum over ranks, not a mean.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        self._modules.append(sharded)

    def share(self, batch: TrainingBatch, max_tokens: int) -> Share:
        """Consecutive rows, about as costly as those of every other rank.

        If another rank has more micro-batches, idle ones follow.
        """
        assert self._empty is not None
        if not batch.num_rows:
            return Share((), 0, IndexRange(0, 0, 0), IndexRange(0, 0, 0))
        rows = divide_batch(batch, self._empty, self._mesh.num_data)[self.portion]
        own = [part.to(self.device) for part in batch.select(rows).split(max_tokens)]
        # An idle part has a trained target, so that every parameter is in its graph: gradients are summed in groups.
        idle = [batch.one_target().to(self.device)] * (self._most_micro_batches(len(own), batch) - len(own))
        first_N = torch.arange(batch.num_tokens) < sum(batch.seqlens[: rows.start])
        start = int((batch.mask_N.cpu() & first_N).sum())
        targets = IndexRange(start, start + sum(part.num_trained_tokens for part in own), batch.num_trained_tokens)
        return Share((*own, *idle), len(own), targets, IndexRange(rows.start, rows.stop, batch.num_rows))

    def _most_micro_batches(self, number: int, batch: TrainingBatch) -> int:
        """The largest number of micro-batches on any rank; raises InvalidTrajectory if the ranks' batches differ."""
        mark = crc32(batch.ids_N.cpu().numpy().tobytes())
        extremes = torch.tensor([number, mark, -mark], device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        longest, highest, lowest = extremes.tolist()
        if highest != -lowest:
            raise InvalidTrajectory(
                "the ranks were given different batches: give all of them the same one, and each takes its own share"
            )
        return int(longest)

    def layout(self, seqlens: Sequence[int], ids_N: Tensor, mask_N: Tensor) -> PackedLayout:
        """The layout of all tokens, or this rank's portion of them."""
        if self._mesh.config.block == 1:
            layout = PackedLayout(seqlens, self.device, ids_N=ids_N, mask_N=mask_N)
            layout.exchange = PassExchange(self.device)
            return layout
        return SplitLayout(self._mesh, seqlens, ids_N.to(self.device), mask_N.to(self.device))

    def accumulate(
        self,
        parts: Sequence[T],
        compute: Callable[[T], MicroResult[S]],
        parameters: Sequence[Tensor],
        sizes: Sequence[int] = (),
    ) -> list[S]:
        """Computes micro-batches one by one, in this thread; ranks exchange gradients after the last, or after each."""
        each = self.config.fsdp.gradients == "sharded"
        trained = [module for module in self._modules if _is_trained(module)]
        reports = []
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            for module in trained:
                module.set_requires_gradient_sync(each or left == 0, recurse=False)
                module.set_reshard_after_backward(left == 0 or self.config.fsdp.reshard_after_forward, recurse=False)
            result = compute(part)
            result.loss.backward()
            reports.append(result.report)
        self._reshard()
        return reports

    def map(self, work: Callable[[T], S], parts: Sequence[T]) -> list[S]:
        """Runs `work` on one part after the other, in this thread."""
        results = [work(part) for part in parts]
        self._reshard()
        return results

    def whole(self, values: Sequence[Tensor], index_range: IndexRange) -> Tensor:
        """The numbers of all shares: each share's are added to zeros, which changes no bit of them."""
        all_M = torch.zeros(index_range.total, device=self.device)
        if index_range.start < index_range.stop:
            all_M[index_range.here] = torch.cat(list(values)).detach()
        dist.all_reduce(all_M, group=self._mesh.data)
        return all_M

    def gather_scalars(self, scalars_K: Tensor) -> list[Tensor]:
        """The numbers of every share."""
        shares = [torch.empty_like(scalars_K) for _ in range(self._mesh.num_data)]
        dist.all_gather(shares, scalars_K, group=self._mesh.data)
        return shares

    def run(self, work: Callable[[], S]) -> S:
        """Runs `work` in this thread."""
        return work()

    @torch.no_grad()
    def copy(self, model: LanguageModel) -> LanguageModel:
        """Copies a model shard by shard, without communication."""
        assert self._empty is not None
        other = copy.deepcopy(self._empty)
        self.spread(other)
        self._give_memory(other)
        for own, sources in ((other.parameters(), model.parameters()), (other.buffers(), model.buffers())):
            for mine, theirs in zip(own, sources, strict=True):
                mine.copy_(theirs)
        return other

    def close(self) -> None:
        """Drops the references to the models. The process group is left to its opener."""
        self._modules.clear()

    def _reshard(self) -> None:
        """Frees the gathered weights, as they are about to change."""
        for module in self._modules:
            module.reshard()


def _is_trained(module: FSDPModule) -> bool:
    """True if a parameter of the module is trained.

    FSDP2 cannot postpone the exchange of gradients of a block that no pass uses, such as one of a frozen vision tower.
    """
    assert isinstance(module, nn.Module)
    return any(parameter.requires_grad for parameter in module.parameters())
