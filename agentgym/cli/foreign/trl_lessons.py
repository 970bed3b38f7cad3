"""The tables of TRL's SFTConfig and DPOConfig with their trainers (1.16), each with the setting of `sft` and `dpo`."""

from __future__ import annotations

from typing import Any

from agentgym.cli.foreign import trl_values as values
from agentgym.cli.foreign.keys import (
    Key,
    MissingPart,
    NoCounterpart,
    SameMeaning,
    Several,
    Theirs,
    same,
    skip,
)
from agentgym.cli.foreign.trl_keys import OPTIMIZER, RUN, TRAINER

__all__ = ["DPO_KEYS", "DPO_OWN", "SFT_KEYS", "SFT_OWN"]

CODE = "code of one's own is for agentgym.trainers from Python"
MEMORY = "how much memory a step takes; the numbers are the same"
EVALUATION = "validation is measured after every pass"
LOSSES = ("sigmoid", "ipo", "hinge")
SHARED = ("model", "optimizer.", "learner.", "checkpoint.", "trackers", "tracking.")
"""The beginnings of the settings that `train`, `sft` and `dpo` have in common."""


def lesson_batch(_: Any, theirs: Theirs) -> int:
    """Returns the rows of an optimizer step."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    size = int(theirs.get(values.PROCESSES, 1))
    for name in names:
        size *= int(theirs.get(name))
    return size


def lesson_epochs(value: Any, theirs: Theirs) -> float:
    """Returns the passes over the rows."""
    if theirs.get("max_steps", -1) > 0:
        raise SameMeaning("max_steps counts")
    return float(value)


def lesson_steps(value: Any, _: Theirs) -> int:
    """Returns the optimizer steps."""
    if value < 1:
        raise SameMeaning("num_train_epochs counts")
    return int(value)


def template_file(value: Any, _: Theirs) -> str:
    """Returns the file of a chat template."""
    if not str(value).endswith(".jinja"):
        raise NoCounterpart("chat_template is a file: save that tokenizer's template")
    return str(value)


def learned_tokens(value: Any, theirs: Theirs) -> Any:
    """Says which tokens are learned: those of replies."""
    if value or theirs.get("completion_only_loss"):
        raise SameMeaning("replies are learned, with their end tokens, and nothing else")
    raise MissingPart("TRL learns whole conversations by default, and sft the replies alone")


def preference_loss_type(value: Any, theirs: Theirs) -> Several:
    """Returns the loss of pairs, and the weight of the likelihood of the better reply beside it."""
    names = [value] if isinstance(value, str) else list(value)
    weights = dict(zip(names, theirs.get("loss_weights") or [1.0] * len(names), strict=True))
    imitated = weights.pop("sft", 0.0)
    if len(weights) != 1 or not set(weights) <= set(LOSSES):
        raise NoCounterpart(f"loss is one of {', '.join(LOSSES)}, and sft beside it is sft_weight")
    ((name, weight),) = weights.items()
    if weight != 1.0:
        raise NoCounterpart(f"the weight of {name} is 1 here: scale optimizer.learning_rate and sft_weight")
    return Several({"loss": name, "sft_weight": float(imitated)})


def reference_model(value: Any, theirs: Theirs) -> Any:
    """Says which model is the reference: the one that is trained, as it begins."""
    raise (SameMeaning if value == theirs.get("model") else NoCounterpart)("the reference is the model as it begins")


def common(rows: str, rate: float) -> tuple[Key, ...]:
    """Returns the keys of both trainers; `rows` is our setting for the files."""
    return (
        Key("train_dataset", rows, "rows with messages", convert=values.trl_train_data),
        Key("dataset_name", rows, "rows with messages", convert=values.trl_dataset_name),
        Key("eval_dataset", "validation", convert=values.trl_train_data),
        same("dataset_config", f"in {rows}"),
        same("dataset_train_split", f"in {rows}"),
        skip("dataset_test_split", "validation"),
        skip("dataset_streaming", "rows are read whole"),
        Key("per_device_train_batch_size", "batch_size", default=8, convert=lesson_batch),
        same("gradient_accumulation_steps", "in batch_size", default=1),
        same("num_processes", "in batch_size"),
        Key("num_train_epochs", "epochs", default=3.0, convert=lesson_epochs),
        Key("max_steps", "steps", "wins over epochs", convert=lesson_steps),
        Key("seed", "seed", default=42),
        same("data_seed", "the run's seed"),
        same("shuffle_dataset", "every pass has an order of its own"),
        Key("learning_rate", "optimizer.learning_rate", default=rate),
        Key("optim", "optimizer.name", default="adamw_torch_fused", convert=values.trl_optimizer),
        skip("max_length", "rows are not cut: those that exceed the model's window are left out, and counted"),
        same("truncation_mode", "rows are not cut"),
        *(same(name, "rows are packed, without padding") for name in ("padding_free", "pad_to_multiple_of")),
        *(same(name, "the model's own tokenizer") for name in ("processing_class", "pad_token", "eos_token")),
        same("dataset_num_proc", "rows are read in this process"),
        *(same(name, MEMORY) for name in ("activation_offloading", "cast_lm_head_to_fp32")),
        skip("router_aux_loss_coef", "sft takes that of the model's config.json"),
        same("eval_strategy", EVALUATION, "epoch", "no"),
        *(skip(name, EVALUATION) for name in ("eval_steps", "per_device_eval_batch_size")),
        same("remove_unused_columns", "other columns are ignored"),
        *(skip(name, CODE) for name in ("data_collator", "compute_metrics", "callbacks", "optimizers")),
    )


def with_shared(own: tuple[Key, ...]) -> tuple[Key, ...]:
    """Returns a trainer's own keys, and those that it shares with GRPO's."""
    names = {key.theirs for key in own}
    shared = [key for key in (*TRAINER, *OPTIMIZER, *RUN) if key.theirs not in names]
    translated_keys = [key for key in shared if key.kind != "translated" or key.ours.startswith(SHARED)]
    return (*own, *translated_keys)


SFT_OWN = (
    *common("conversations", 2e-5),
    Key("assistant_only_loss", default=False, remark="replies alone are learned", convert=learned_tokens, kind="same"),
    same("completion_only_loss", "replies alone are learned", True, None),
    same("loss_type", "the negative log likelihood per token", "nll", "chunked_nll"),
    *(same(name, "rows are packed, always") for name in ("packing", "packing_strategy", "eval_packing")),
    skip("dataset_text_field", "rows have messages"),
    skip("dataset_kwargs", "rows have messages"),
    Key("chat_template_path", "chat_template", convert=template_file),
    *(skip(name, CODE) for name in ("formatting_func", "compute_loss_func", "optimizer_cls_and_kwargs")),
    skip("preprocess_logits_for_metrics", CODE),
)
DPO_OWN = (
    *common("pairs", 1e-6),
    Key("beta", "beta", default=0.1),
    Key("loss_type", "loss, sft_weight", "one, and sft beside it", default=["sigmoid"], convert=preference_loss_type),
    same("loss_weights", "in sft_weight"),
    Key("label_smoothing", "label_smoothing"),
    Key("ref_model", remark="the reference is the model as it begins", convert=reference_model, kind="same"),
    same("precompute_ref_*", MEMORY),
    same("f_divergence_type", "the reverse divergence", "reverse_kl"),
    same("f_alpha_divergence_coef", "the reverse divergence has none"),
    same("discopop_tau", "of the loss discopop"),
    skip("ld_alpha", "every token of a reply counts alike"),
    skip("use_weighting", "every pair counts alike"),
    skip("sync_ref_model", "the reference stays as it is"),
    *(same(name, "the reference stays as it is") for name in ("ref_model_mixup_alpha", "ref_model_sync_steps")),
)
SFT_KEYS, DPO_KEYS = with_shared(SFT_OWN), with_shared(DPO_OWN)
"""The arguments of each trainer. The first that fits a name counts, and names win over patterns."""
