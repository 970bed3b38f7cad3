"""Checks of what a model computes before any training, against transformers itself."""

from __future__ import annotations

import asyncio
import copy
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentgym.engines.local.batch_invariance import batch_invariance_findings
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.step import StepRunner
from agentgym.engines.local.transformers_step import TransformersStep
from agentgym.engines.protocol import Completion, Sampling
from agentgym.errors import AgentGymError
from agentgym.loading import is_code_path
from agentgym.model.architectures import dequantization, quantization
from agentgym.model.decoder import Decoder
from agentgym.model.decoder_config import folder_config
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_class import FOLDER_ALONE, class_of_model, quiet_transformers
from agentgym.model.model_folder import published_views, save_model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import load_policy
from agentgym.model.routing import BatchRouting
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.learner.lora import Adapters
from agentgym.trainers.model_check.findings import CheckResult
from agentgym.trainers.model_check.rank_check import step_on_ranks
from agentgym.trainers.model_check.small_models import save_small_model, shrink
from agentgym.trainers.parallel.gradient_threads import LARGE_MODEL
from agentgym.trainers.parallel.learner_ranks import is_large
from agentgym.trainers.settings.lora import LoraConfig

__all__ = ["CHECKS", "check_model", "memory_of_checks"]

# Shape suffixes: N packed tokens, T tokens of a sequence, V vocabulary.

CHECKS = ("loads", "logprobs", "prefix", "gradients", "samples", "same bits", "adapters", "ranks", "export", "replay")
"""The names of the checks, in order."""
MEMORY_FACTOR, MEMORY_FACTOR_OF_LARGE = 14.0, 6.5
"""The most memory that the checks take, in all their processes, as a multiple of the weights in float32: in the check
of ranks, and of a large model, whose ranks compute a small one, in the check of gradients."""
_NATS = 1e-3
"""The largest difference of a logprob that rounding explains in float32."""
_GRADIENT = 1e-3
"""The largest difference of a gradient that rounding explains, relative to the largest number of its tensor."""
_MAX_MOVED = 10.0
"""The nats by which adapters may move a logprob in their check: of one that moves by 60, float32 gets 0.1 wrong."""
_RANKS = 1e-5
"""The same between ranks and one process, which compute alike."""


@dataclass(eq=False)
class _Subject:
    """A model, the same one by transformers alone, and three sequences that share a prefix."""

    folder: Path
    ours: LanguageModel
    theirs: Any
    backend: str = "auto"

    @cached_property
    def rows(self) -> list[Tensor]:
        """The token ids of the sequences."""
        size = self.ours.vocab_size
        generator = torch.Generator().manual_seed(1)
        shared_T = torch.randint(3, size, (40,), generator=generator)
        return [torch.cat([shared_T, torch.randint(3, size, (own,), generator=generator)]) for own in (17, 9, 30)]

    def layout(self) -> PackedLayout:
        """Returns the layout of the sequences in one pass."""
        return PackedLayout([len(row) for row in self.rows], ids_N=torch.cat(self.rows))

    def own_NV(self) -> Tensor:
        """Returns the packed logprobs of our model."""
        return self.ours.logits(self.ours.hidden_states(torch.cat(self.rows), self.layout())).log_softmax(-1)

    def their_logprobs(self, ids_T: Tensor) -> Tensor:
        """Returns the logprobs `[T, V]` of transformers."""
        logits_TV: Tensor = self.theirs(input_ids=ids_T[None], use_cache=False).logits[0]
        return logits_TV.log_softmax(-1)


def memory_of_checks(num_parameters: int) -> float:
    """Returns the bytes that the checks of a model take at most."""
    factor = MEMORY_FACTOR if num_parameters < LARGE_MODEL else MEMORY_FACTOR_OF_LARGE
    return factor * torch.float32.itemsize * num_parameters


def check_model(folder: Path, backend: str = "auto") -> Iterator[CheckResult]:
    """Yields what each check finds of the model in a folder, in float32 on the CPU; nothing after one that cannot load.

    Both models and the gradients of both are in memory, see `memory_of_checks`.
    """
    with _quiet():
        try:
            ours, theirs = load_policy(folder, backend=backend), _load_theirs(folder, backend)
        except Exception as error:  # noqa: BLE001  # the boundary: transformers fails at a folder in many ways
            yield CheckResult.judge("loads", False, _reason(error))
            return
        way = "fast decoder" if isinstance(ours, Decoder) else "transformers"
        yield CheckResult.judge("loads", True, way)
        subject = _Subject(folder, ours, theirs, backend)
        checks = {name: check for name, check in _CHECKS.items() if ours.routers or name != "replay"}
        for name, check in checks.items():
            try:
                passed, measurement = check(subject)
            except Exception as error:  # noqa: BLE001  # the boundary: the code of any architecture may fail
                passed, measurement = False, _reason(error)
            yield CheckResult.judge(name, passed, measurement)


def _reason(error: Exception) -> str:
    if isinstance(error, AgentGymError):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _load_theirs(folder: Path, backend: str) -> Any:
    settings = {"dtype": torch.float32, "attn_implementation": "eager", **FOLDER_ALONE}
    settings |= dequantization(folder_config(folder))
    theirs = class_of_model(folder, backend if is_code_path(backend) else None)[1].from_pretrained(folder, **settings)
    if hasattr(theirs, "_weight_conversions") and quantization(folder_config(folder)):
        del theirs._weight_conversions
    return theirs.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the advice of transformers and of our engine."""
    engine_log = logging.getLogger("agentgym.engines.local.engine")
    level = engine_log.level
    engine_log.setLevel(logging.ERROR)  # a check of its own says what the engine would warn of
    try:
        with quiet_transformers():
            yield
    finally:
        engine_log.setLevel(level)


@torch.no_grad()
def _check_logprobs(subject: _Subject) -> tuple[bool, str]:
    reference_NV = torch.cat([subject.their_logprobs(row) for row in subject.rows])
    return _judge(float((subject.own_NV() - reference_NV).abs().max()), _NATS, "nats")


def _judge(difference: float, bound: float, unit: str) -> tuple[bool, str]:
    return difference <= bound, f"{difference:.1e} {unit}"


def _check_prefix(subject: _Subject) -> tuple[bool, str]:
    if not subject.ours.packs:
        return True, "rows of their own: it keeps a state"
    saved = sum(map(len, subject.rows)) - subject.layout().num_tokens
    return saved > 0, f"{saved} of {sum(map(len, subject.rows))} tokens not computed again"


def _check_gradients(subject: _Subject) -> tuple[bool, str]:
    target_N1 = torch.cat(subject.rows).roll(-1)[:, None]
    ours, theirs = subject.ours, subject.theirs
    for model in (ours, theirs):
        model.zero_grad()
        model.requires_grad_()
    subject.own_NV().gather(1, target_N1).mean().backward()
    torch.cat([subject.their_logprobs(row) for row in subject.rows]).gather(1, target_N1).mean().backward()
    with torch.no_grad(), _gradients_as_weights(ours), _gradients_as_weights(theirs):
        truth = _published_tensors(theirs)
        result = _judge_tensors(((name, own, truth[name]) for name, own in published_views(ours)), _GRADIENT)
    ours.zero_grad()
    theirs.zero_grad()
    return result


def _judge_tensors(tensors: Iterable[tuple[str, Tensor, Tensor]], bound: float) -> tuple[bool, str]:
    """Judges the largest difference relative to the largest number of its tensor, and names the tensor if it fails.

    `tensors` are names, tensors and what these are to be.
    """
    worst, where = 0.0, ""
    for name, own, truth in tensors:
        size = float(truth.abs().max())
        difference = float((own - truth).abs().max()) / (size or 1.0)
        if not difference <= worst:  # also for what is not a number
            worst, where = difference, name
            if difference != difference:
                break
    passed, text = _judge(worst, bound, "of the largest")
    return passed, text if passed else f"{text} in {where}"


@contextmanager
def _gradients_as_weights(model: torch.nn.Module) -> Iterator[None]:
    """Puts each parameter's gradient in its place, inside the context."""
    originals = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, _ in originals:
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    try:
        yield
    finally:
        for parameter, weights in originals:
            parameter.data = weights


def _published_tensors(theirs: Any) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    own = {name: tensor.detach() for name, tensor in theirs.state_dict(keep_vars=True).items()}
    return dict(revert_weight_conversion(theirs, own))


def _check_samples(subject: _Subject) -> tuple[bool, str]:
    differences = []
    for prompt, reply in asyncio.run(_two_turns(subject.ours, _prompts(subject))):
        ids_T = torch.tensor([*prompt, *reply.ids])
        with torch.no_grad():
            logprobs_TV = subject.their_logprobs(ids_T)
        reference_T = logprobs_TV[len(prompt) - 1 : -1].gather(1, ids_T[len(prompt) :, None])[:, 0]
        differences.append((torch.tensor(reply.logprobs) - reference_T).abs().max())
    return _judge(float(torch.stack(differences).max()), _NATS, "nats")


def _prompts(subject: _Subject) -> list[list[int]]:
    first, second, third = subject.rows
    max_tokens = max(1, min(128, subject.ours.context_window) - 36)  # two replies follow
    return [list(map(int, ids_T[:max_tokens])) for ids_T in (first, second[:20], third[:45], first)]


async def _two_turns(model: LanguageModel, prompts: Sequence[list[int]]) -> list[tuple[list[int], Completion]]:
    records, window = bool(model.num_chosen()), min(128, model.context_window)
    config = LocalEngineConfig(num_slots=len(prompts), window=window, max_step_tokens=32, record_experts=records)
    engine = LocalEngine(model, config)

    async def reply(number: int, prompt: list[int]) -> Completion:
        return await engine.generate(prompt, Sampling(max_tokens=12, seed=number, stop_ids=()), session=str(number))

    try:
        first = await asyncio.gather(*(reply(number, prompt) for number, prompt in enumerate(prompts)))
        longer = [[*prompt, *own.ids, 5, 6, 7] for prompt, own in zip(prompts, first, strict=True)]
        second = await asyncio.gather(*(reply(number, prompt) for number, prompt in enumerate(longer)))
    finally:
        await engine.close()
    return list(zip([*prompts, *longer], [*first, *second], strict=True))


def _check_bits(subject: _Subject) -> tuple[bool, str]:
    cache = SlotCache(subject.ours, 6, 192)
    if isinstance(subject.ours, TransformersModel):
        findings = batch_invariance_findings(TransformersStep(subject.ours, cache))
    else:
        assert isinstance(subject.ours, Decoder)
        findings = batch_invariance_findings(StepRunner(subject.ours, cache))
    return not findings, "; ".join(findings) or "whatever is in flight"


def _check_adapters(subject: _Subject) -> tuple[bool, str]:
    """Compares the merged weights in transformers with the adapters of our model."""
    config = LoraConfig(rank=4)
    adapters = Adapters.of(copy.deepcopy(subject.ours), None, config)
    adapted = adapters.model
    generator = torch.Generator().manual_seed(2)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    own = _Subject(subject.folder, adapted, None)
    with torch.no_grad():
        plain_NV = subject.own_NV()
        while (moved := float((own.own_NV() - plain_NV).abs().max())) > _MAX_MOVED:
            for parameter in trained:
                parameter.mul_(0.7)
    own.own_NV().mean().backward()
    if idle := sum(parameter.grad is None for parameter in trained):
        return False, f"{idle} of {len(trained)} matrices get no gradient"
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        adapted_NV = own.own_NV()
        save_model_folder(adapters.merge(), folder)
        subject.theirs = None  # before there is another one
        subject.theirs = _load_theirs(Path(folder), subject.backend)
        reference_NV = torch.cat([subject.their_logprobs(row) for row in subject.rows])
    passed, gap = _judge(float((adapted_NV - reference_NV).abs().max()), _NATS, f"nats, {len(trained) // 2} layers")
    return (passed and moved > 10 * _NATS, gap if moved > 10 * _NATS else f"adapters move logprobs by {moved:.1e} nats")


def _check_ranks(subject: _Subject) -> tuple[bool, str]:
    """Compares a step of two ranks with that of one process; of a large model, with a small one of its shape.

    Three processes with the whole weights and gradients would take fourteen times the memory of the weights.
    """
    subject.theirs = None  # what follows loads its own
    backend = subject.backend
    if not is_large(subject.ours):
        return _judge_tensors(step_on_ranks(subject.folder, backend, published_views(subject.ours)), _RANKS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_small_model(shrink(folder_config(subject.folder)), folder, backend if is_code_path(backend) else None)
        before = published_views(load_policy(folder, backend=backend))
        passed, text = _judge_tensors(step_on_ranks(folder, backend, before), _RANKS)
    return passed, f"{text}, of a small model"


@torch.no_grad()
def _check_export(subject: _Subject) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        save_model_folder(subject.ours, folder)
        subject.theirs = _load_theirs(Path(folder), subject.backend)
        again_NV = torch.cat([subject.their_logprobs(row) for row in subject.rows])
    return _judge(float((subject.own_NV() - again_NV).abs().max()), _NATS, "nats")


@torch.no_grad()
def _check_replay(subject: _Subject) -> tuple[bool, str]:
    """Compares recorded experts with the learner's choice, and has the learner follow others."""
    model = subject.ours
    if not model.num_chosen():
        return False, "its routers do not choose by topk"
    num_experts = min(router_X.shape[0] for router_X in _routing_of(model, subject.rows[0]).loads_RX())
    num_choices = num_other = 0
    for prompt, reply in asyncio.run(_two_turns(model, _prompts(subject))):
        assert reply.experts is not None
        ids_T, recorded_TRK = (
            torch.tensor([*prompt, *reply.ids])[:-1],
            torch.from_numpy(reply.experts.experts_TRK.copy()),
        )
        own_TRK = _routing_of(model, ids_T).chosen_NRK()
        num_other += int((own_TRK.sort(-1)[0] != recorded_TRK.sort(-1)[0]).any(-1).sum())
        num_choices += own_TRK[..., 0].numel()
        others_TRK = (recorded_TRK + 1) % num_experts
        if not torch.equal(_routing_of(model, ids_T, others_TRK).chosen_NRK(), others_TRK.long()):
            return False, "the learner does not follow the experts of a record"
    return num_other <= num_choices / 100, f"{num_other} of {num_choices} choices differ"


def _routing_of(model: LanguageModel, ids_T: Tensor, experts_TRK: Tensor | None = None) -> BatchRouting:
    """Returns the routing of a pass over one sequence."""
    layout = PackedLayout([len(ids_T)])
    layout.routing = BatchRouting(layout.seqlens, experts_TRK)
    model.hidden_states(ids_T, layout)
    return layout.routing


_CHECKS: dict[str, Callable[[_Subject], tuple[bool, str]]] = {
    "logprobs": _check_logprobs,
    "prefix": _check_prefix,
    "gradients": _check_gradients,
    "samples": _check_samples,
    "same bits": _check_bits,
    "adapters": _check_adapters,
    "ranks": _check_ranks,
    "export": _check_export,
    "replay": _check_replay,
}
