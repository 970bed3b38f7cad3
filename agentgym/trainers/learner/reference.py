"""The model that the policy is compared with: by its logprobs of the targets, or over the whole vocabulary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.errors import ConfigError
from agentgym.model.language_model import LanguageModel
from agentgym.model.linear import linear
from agentgym.model.model_folder import on_device
from agentgym.model.model_name import model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import load_policy
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.lora import Unadapted
from agentgym.trainers.learner.target_scores import TargetScores
from agentgym.trainers.learner.token_logprobs import scorer
from agentgym.trainers.parallel.learner_ranks import LearnerRanks
from agentgym.trainers.settings.learner import LearnerConfig

__all__ = ["FinalStates", "ReferenceModel", "check_teacher", "generalized_jsd", "load_teacher", "whole_divergence"]

# Shape suffixes: M targets, C those of a chunk, E and F the widths of student and teacher, V vocabulary.

CHUNK_LOGITS = 4_000_000
"""Logits of one model held at once on a CPU; sixteen times as many on a GPU."""


def load_teacher(name: str, student: LanguageModel) -> LanguageModel:
    """Loads the model that a student is compared with, on its device and in its type; see `check_teacher`."""
    teacher = load_policy(model_folder(name), dtype=student.embed.dtype)
    return on_device(teacher, str(student.embed.device)).requires_grad_(False)


def check_teacher(name: str | None, student: Path) -> None:
    """Raises ConfigError unless ids mean the same to a teacher, if there is one, as to the model in a folder.

    Vocabulary, merges and normalizer have to be equal, and no added token of one may be another one's there. The
    teacher needs each token of the model, with a row of its embedding; it may have further tokens, and both may have
    further rows, which no token has.
    """
    if name is None:
        return
    teacher, pupil = (ChatTokenizer.load(own, needs_template=False) for own in (model_folder(name), student))
    theirs, ours = (json.loads(own.backend.to_str()) for own in (teacher, pupil))
    for own in (theirs, ours):  # null, "", 0 and false all switch a setting of BPE off
        own["model"] = {key: value for key, value in own["model"].items() if value}
        own |= {part: _steps(own[part]) for part in ("normalizer", "pre_tokenizer")}
    different = [what for part, what in _TOKENIZER_PARTS.items() if theirs[part] != ours[part]]
    added = {(token["id"], token["content"]) for own in (theirs, ours) for token in own["added_tokens"]}
    if min(len({pair[side] for pair in added}) for side in (0, 1)) < len(added):
        different.append("added token")
    if different:
        raise ConfigError(
            f"the tokenizer of learner.kl.reference {name!r} is not that of the trained model (another"
            f" {different[0]}), so its ids are other texts: give a model with the same tokenizer"
        )
    vocabulary, num_rows = teacher.backend.get_vocab(), teacher.num_sampled
    rest = [token for token, row in pupil.backend.get_vocab().items() if token not in vocabulary or 0 < num_rows <= row]
    if rest:
        raise ConfigError(
            f"learner.kl.reference {name!r} has {num_rows} rows in its embedding, none for the trained model's token"
            f" {min(rest)!r}: give a model that has all its tokens"
        )


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer, without the setting that changes no id (`trim_offsets`)."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        (parts,) = (value for value in part.values() if isinstance(value, list))
        return [step for own in parts for step in _steps(own)]
    return [{key: value for key, value in part.items() if key != "trim_offsets"}]


_TOKENIZER_PARTS = {"model": "vocabulary or merges", "normalizer": "normalizer", "pre_tokenizer": "pre-tokenizer"}


class ReferenceModel:
    """Computes what a model of frozen weights makes of a batch's trained targets, on the ranks that have it.

    A mixture of experts chooses its own. Logprobs are at the temperature of training, over the ids that both models
    have of the `vocab_size` ids of the policy: another padding of the embedding counts for nothing, and an id that this
    model lacks, which no token has, for its last one.
    """

    def __init__(
        self,
        model: LanguageModel | Unadapted,
        config: LearnerConfig,
        temperature: float,
        ranks: LearnerRanks,
        vocab_size: int,
    ) -> None:
        self._model, self._ranks = model, ranks
        self._num_ids = min(vocab_size, len(model.embed))
        self._temperature = temperature
        self._tokens = config.pass_tokens
        self._score = scorer(config.head_kernel, model.softcap)

    def logprobs(self, batch: TrainingBatch) -> Tensor:
        """The logprobs of all trained targets, `[M]`; each rank computes its share of the batch."""
        share = self._ranks.share(batch, self._tokens)
        return self._ranks.whole(self._ranks.map(self.logprobs_of, share.parts)[: share.num_own], share.targets)

    @torch.no_grad()
    def logprobs_of(self, part: TrainingBatch) -> Tensor:
        """The logprobs of a micro-batch's trained targets, `[M]`."""
        layout = self._layout(part)

        def read(hidden_OE: Tensor, head_VE: Tensor) -> TargetScores:
            exchange = layout.exchange
            target_M = part.target_N[part.trained_M].clamp(max=self._num_ids - 1)
            scores = self._score(hidden_OE, head_VE[: self._num_ids], exchange.own(target_M), self._temperature)
            return TargetScores(exchange.gather_entries(scores.logp_N), exchange.gather_entries(scores.entropy_N))

        scores: TargetScores = self._model(self._known_ids(part), layout, read)
        return scores.logp_N

    @torch.no_grad()
    def final_states(self, part: TrainingBatch) -> FinalStates:
        """The final states at a micro-batch's trained targets, with the head."""
        hidden_ME, head_VE = self._model(self._known_ids(part), self._layout(part), lambda hidden, head: (hidden, head))
        return FinalStates(hidden_ME, head_VE[: self._num_ids], self._model.softcap)

    def _known_ids(self, part: TrainingBatch) -> Tensor:
        return part.ids_N.clamp(max=len(self._model.embed) - 1)

    def _layout(self, part: TrainingBatch) -> PackedLayout:
        return self._ranks.layout(part.seqlens, part.on_cpu.ids_N, part.on_cpu.mask_N)


def generalized_jsd(student_CV: Tensor, teacher_CV: Tensor, beta: float) -> Tensor:
    """Returns the generalized Jensen-Shannon divergence of two rows of logits, `[C]`, in nats.

    Agarwal et al. (2024), On-Policy Distillation of Language Models, arXiv:2306.13649, equation 1:
    `beta KL(teacher || m) + (1 - beta) KL(student || m)` with `m = beta teacher + (1 - beta) student`. As in TRL, 0 is
    KL(teacher || student) and 1 KL(student || teacher), their limits when divided by beta and 1 - beta.
    """
    student_CV, teacher_CV = student_CV.log_softmax(-1), teacher_CV.log_softmax(-1)
    if beta == 0.0:
        return (teacher_CV.exp() * (teacher_CV - student_CV)).sum(-1)
    if beta == 1.0:
        return (student_CV.exp() * (student_CV - teacher_CV)).sum(-1)
    mixed_CV = torch.logaddexp(student_CV + math.log1p(-beta), teacher_CV + math.log(beta))
    of_teacher_C = (teacher_CV.exp() * (teacher_CV - mixed_CV)).sum(-1)
    of_student_C = (student_CV.exp() * (student_CV - mixed_CV)).sum(-1)
    return beta * of_teacher_C + (1.0 - beta) * of_student_C


class FinalStates(NamedTuple):
    """The final states and the head that give a model's logits of some targets."""

    hidden_ME: Tensor
    head_VE: Tensor
    softcap: float | None

    def logits(self, hidden_CE: Tensor, temperature: float) -> Tensor:
        """Returns the logits of some of the states, `[C, V]` in float32."""
        logits_CV = linear(hidden_CE, self.head_VE).float()
        if self.softcap is not None:
            logits_CV = self.softcap * torch.tanh(logits_CV / self.softcap)
        return logits_CV / (temperature or 1.0)


def whole_divergence(student: FinalStates, teacher: FinalStates, beta: float, temperature: float) -> Tensor:
    """Returns `generalized_jsd` at each target, `[M]`, over the ids that the teacher's head has.

    The logits of a chunk of targets are computed again in the backward pass.
    """
    if len(student.head_VE) > len(teacher.head_VE):
        student = student._replace(head_VE=student.head_VE[: len(teacher.head_VE)])
    on_cpu = student.hidden_ME.device.type == "cpu"
    size = max(1, CHUNK_LOGITS * (1 if on_cpu else 16) // len(student.head_VE))

    def compare(hidden_CE: Tensor, teacher_CF: Tensor) -> Tensor:
        return generalized_jsd(student.logits(hidden_CE, temperature), teacher.logits(teacher_CF, temperature), beta)

    parts = zip(student.hidden_ME.split(size), teacher.hidden_ME.split(size), strict=True)
    return torch.cat([checkpoint(compare, *part, use_reentrant=False) for part in parts])
