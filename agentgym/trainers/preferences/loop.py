"""Learning from preferences: the loss of a pair of replies, and the steps over many pairs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.model.language_model import LanguageModel
from agentgym.settings import check_above_zero, check_at_least
from agentgym.trainers.learner.lora import Unadapted
from agentgym.trainers.learner.token_logprobs import score_targets
from agentgym.trainers.parallel.gradient_threads import MicroResult
from agentgym.trainers.parallel.world import LearnerRanks, Sharded, model_of
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig, UsualOptimizer
from agentgym.trainers.sft.demonstrations import Demonstration
from agentgym.trainers.sft.lesson_batches import LessonPart, TargetRows, lesson_world, most_tokens, share_batch
from agentgym.trainers.sft.lesson_state import LessonState
from agentgym.trainers.sft.loop import Validation

__all__ = ["Pair", "PreferenceConfig", "PreferenceLoss", "PreferenceStep", "learn_preferences", "preference_loss"]

# Shape suffixes: P pairs, R rows (the better replies of all pairs, then the worse ones).

USUAL = UsualOptimizer(("adamw", 5e-5), ("adamw", 1e-6), 10)
PreferenceLoss: TypeAlias = Literal["sigmoid", "ipo", "hinge"]


@dataclass(frozen=True)
class Pair:
    """A better and a worse continuation of the same prompt, as rows whose masks cover the replies."""

    chosen: Demonstration
    rejected: Demonstration

    @property
    def num_tokens(self) -> int:
        """The ids of both rows."""
        return len(self.chosen.ids) + len(self.rejected.ids)


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """The settings of learning from preferences."""

    loss: PreferenceLoss = "sigmoid"
    """`sigmoid` is DPO (Rafailov et al. 2023), `ipo` a squared distance to a fixed margin (Azar et al. 2023), `hinge`
    SLiC's (Zhao et al. 2023)."""
    beta: float = 0.1
    """The weight of the divergence from the first weights that the loss stands for; less moves further from them."""
    label_smoothing: float = 0.0
    """The share of pairs whose order is taken for wrong (conservative DPO), in [0, 0.5); of `sigmoid`."""
    sft_weight: float = 0.0
    """The weight of the negative log likelihood of the better reply, per token, beside the loss."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer; its rate is 5e-5 below 50 million parameters, and 1e-6 above, where none is given."""
    steps: int = 100
    """Optimizer steps."""
    pairs: int = 8
    """Pairs per step."""
    threads: int = 2
    """CPU threads that share a step's pairs; changes how they are split, so it belongs to the recipe."""
    micro_batch_tokens: int | None = None
    """The most tokens of a forward pass; a pair is never split. None is no bound on a CPU,
    and on a GPU what its memory allows, up to 16,384."""
    activation_checkpointing: bool = False
    """Recomputes each layer's inner states in the backward pass: more arithmetic, and less memory."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_at_least(1, self, "steps", "pairs", "threads")
        if self.micro_batch_tokens is not None:
            check_at_least(1, self, "micro_batch_tokens")
        check_above_zero(self, "beta")
        check_at_least(0, self, "sft_weight")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing is in [0, 0.5), got {self.label_smoothing}")
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(f"label_smoothing is of the loss sigmoid, not of {self.loss}")

    def begin(self, pupil: LanguageModel | Sharded, first: LanguageModel | Sharded | None = None) -> LessonState:
        """Returns the state of a model that has learned nothing yet.

        `first` has the weights that it is held against, where they are not its own. Adapters need no such copy.
        """
        model = model_of(pupil)
        state = LessonState(pupil, self.lora, self.with_optimizer(model).optimizer, self.steps, "preference")
        if state.adapters is None:
            if first is None:
                first = copy.deepcopy(model) if state.ranks is None else state.ranks.copy(model)
            state.first = model_of(first).requires_grad_(False)
        return state

    def with_optimizer(self, model: LanguageModel) -> PreferenceConfig:
        """Returns the settings with the optimizer and the rate for this model, where none is given."""
        return replace(self, optimizer=self.optimizer.for_size(model.num_parameters, USUAL, self.steps))


@dataclass(frozen=True, kw_only=True)
class PreferenceStep:
    """The report of a step; means are over its pairs, before its update."""

    step: int
    loss: float
    """The loss that is minimized: `preference_loss`, and `sft_weight` times `sft_loss`."""
    grad_norm: float
    accuracy: float
    """The share of pairs whose better reply has gained more than the worse one since the first weights."""
    margin: float
    """The mean difference of what they gained, in nats times beta."""
    chosen_reward: float
    """The gain of the better replies, in nats times beta."""
    rejected_reward: float
    tokens: int
    elapsed_s: float
    validation_loss: float | None = None
    """The loss of the pairs of validation after the step, where it was measured."""
    validation_accuracy: float | None = None
    """Their accuracy, likewise."""
    preference_loss: float | None = None
    """The loss of the order of the replies alone, see `preference_loss`; None in steps of earlier versions."""
    sft_loss: float | None = None
    """The negative log likelihood of the better replies, in nats per token."""


def preference_loss(chosen_P: Tensor, rejected_P: Tensor, config: PreferenceConfig) -> Tensor:
    """Returns the loss of each pair, from what the logprob of each reply gained since the first weights, in nats.

    `sigmoid`: `-log sigma(beta h)` with `h = chosen - rejected`, and with smoothing `e` `-(1 - e) log sigma(beta h) - e
    log sigma(-beta h)`. `ipo`: `(h - 1 / (2 beta))^2`, where gains are means over a reply's tokens. `hinge`: `max(0, 1
    - beta h)`. As TRL's `DPOTrainer` has them.
    """
    h_P = chosen_P - rejected_P
    if config.loss == "ipo":
        return (h_P - 1 / (2 * config.beta)).square()
    if config.loss == "hinge":
        return F.relu(1 - config.beta * h_P)
    smoothing = config.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(config.beta * h_P) - smoothing * F.logsigmoid(-config.beta * h_P)


def learn_preferences(
    pupil: LanguageModel | LessonState,
    pairs: Iterator[Pair],
    config: PreferenceConfig,
    *,
    validation: Validation[Pair] | None = None,
    on_step: Callable[[PreferenceStep], None] = lambda step: None,
) -> None:
    """Trains a model in place on `config.pairs` pairs a step; the first weights are kept as the reference.

    With the state of one that has learned already, training goes on; `pairs` begin with what comes next then.
    An exception of `on_step` ends the training between two steps. Raises TrainingHalted for a gradient that is not
    finite, with the weights of the step before. Adapters are merged into the weights at the end, whatever ends it,
    but not those of a state.
    """
    state = pupil if isinstance(pupil, LessonState) else config.begin(pupil)
    model, first = state.model, state.first
    model.set_recompute(config.activation_checkpointing)
    most = most_tokens(model, config.micro_batch_tokens, recomputes=config.activation_checkpointing)
    config = replace(config, micro_batch_tokens=most)

    def learn_batch() -> tuple[Sequence[Pair], Tensor]:
        batch = list(itertools.islice(pairs, config.pairs))
        return batch, _add_gradients(model, first, batch, world, state.optimizer.parameters, config)

    def tell(step: int, learned: tuple[Sequence[Pair], Tensor], norm: float, elapsed_s: float) -> None:
        report = _report(step, *learned, norm, elapsed_s)
        if validation is not None and validation.is_due(step, config.steps):
            measure = partial(mean_over_pairs, model, first, validation.rows, config, world)
            loss, accuracy, *_ = world.run(measure).tolist()
            report = replace(report, validation_loss=loss, validation_accuracy=accuracy)
        on_step(report)

    with lesson_world(state.ranks, model.embed.device, config.threads) as world:
        try:
            state.take_steps(config.steps, world, learn_batch, tell)
        finally:
            if state is not pupil:
                state.merge()


def _add_gradients(
    model: LanguageModel,
    reference: LanguageModel | Unadapted,
    batch: Sequence[Pair],
    world: LearnerRanks,
    parameters: Sequence[Tensor],
    config: PreferenceConfig,
) -> Tensor:
    """Adds the gradient of the mean loss over the pairs; returns the means of the sums of `pair_sums`."""

    def loss_of(part: LessonPart[Pair]) -> MicroResult[Tensor]:
        loss, sums = pair_sums(model, reference, part.rows, config, world)
        if part.is_idle:
            return MicroResult(0 * loss, 0 * sums)
        return MicroResult(loss / len(batch), sums)

    parts = share_batch(batch, _num_tokens, world, config.micro_batch_tokens, threads=True)
    return _total(world.accumulate(parts, loss_of, parameters), world) / len(batch)


def _total(sums: Sequence[Tensor], world: LearnerRanks) -> Tensor:
    """Returns the sums over the parts of all ranks."""
    return torch.stack(world.gather_scalars(torch.stack(list(sums)).sum(0))).sum(0)


@torch.no_grad()
def mean_over_pairs(
    model: LanguageModel,
    reference: LanguageModel | Unadapted,
    pairs: Sequence[Pair],
    config: PreferenceConfig,
    world: LearnerRanks,
) -> Tensor:
    """Returns the means of the sums of `pair_sums` over all pairs, `config.pairs` at a time."""

    def sums_of(part: LessonPart[Pair]) -> Tensor:
        return pair_sums(model, reference, part.rows, config, world)[1] * (not part.is_idle)

    batches = [pairs[start : start + config.pairs] for start in range(0, len(pairs), config.pairs)]
    parts = [part for batch in batches for part in share_batch(batch, _num_tokens, world, config.micro_batch_tokens)]
    sums = [sums_of(part) for part in parts] if world.size == 1 else world.map(sums_of, parts)
    return _total(sums, world) / len(pairs)


def pair_sums(
    model: LanguageModel,
    reference: LanguageModel | Unadapted,
    pairs: Sequence[Pair],
    config: PreferenceConfig,
    world: LearnerRanks,
) -> tuple[Tensor, Tensor]:
    """Returns the summed loss with its gradient, and sums without one.

    These are loss, accuracy, rewards of the better and the worse replies, and the two parts of the loss.
    """
    rows = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    with torch.no_grad():
        known_R = row_logprobs(reference, rows, world)
    logp_R = row_logprobs(model, rows, world)
    length_R = torch.tensor([sum(row.mask[1:]) for row in rows], device=logp_R.device)
    gain_R = (logp_R - known_R) / (length_R if config.loss == "ipo" else 1)
    chosen_P, rejected_P = gain_R.chunk(2)
    loss_P = preference_loss(chosen_P, rejected_P, config)
    imitation_P = -(logp_R / length_R).chunk(2)[0]
    loss = (loss_P + config.sft_weight * imitation_P).sum()
    won_P = (chosen_P > rejected_P).to(loss_P.dtype)
    rewards = [config.beta * gain_P.detach().sum() for gain_P in (chosen_P, rejected_P)]
    parts = [part_P.detach().sum() for part_P in (loss_P, imitation_P)]
    return loss, torch.stack([loss.detach(), won_P.sum(), *rewards, *parts])


def row_logprobs(model: LanguageModel | Unadapted, rows: Sequence[Demonstration], world: LearnerRanks) -> Tensor:
    """Returns the logprob of each row's masked ids, `[R]`, in nats; prompts that rows share are computed once."""
    laid = TargetRows.of(rows)
    layout, target_M = laid.layout(world), laid.target_M.to(world.device)

    def read(hidden_ME: Tensor, head_VE: Tensor) -> Tensor:
        return score_targets(hidden_ME, head_VE, target_M, softcap=model.softcap).logp_N

    logp_M: Tensor = model(laid.ids_N.to(world.device), layout, read)
    return torch.stack([part.sum() for part in logp_M.split(list(laid.num_targets))])


def _num_tokens(pair: Pair) -> int:
    return pair.num_tokens


def _report(step: int, batch: Sequence[Pair], means: Tensor, norm: float, elapsed_s: float) -> PreferenceStep:
    loss, accuracy, chosen, rejected, preference, imitation = means.tolist()
    return PreferenceStep(
        step=step,
        loss=loss,
        grad_norm=norm,
        accuracy=accuracy,
        margin=chosen - rejected,
        chosen_reward=chosen,
        rejected_reward=rejected,
        tokens=sum(pair.num_tokens for pair in batch),
        elapsed_s=elapsed_s,
        preference_loss=preference,
        sft_loss=imitation,
    )
