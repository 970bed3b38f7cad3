"""TRL's side of `teaching.py`, in TRL's own environment: `teaching_trl.py SPEC.json`, JSON last.

Two steps of `DPOTrainer` on given ids for each loss, and the loss of `GKDTrainer` with its gradient's norm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.experimental.gkd import GKDTrainer

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())


def load(folder: str) -> Any:
    """Returns a model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class PairsTrainer(DPOTrainer):
    """A `DPOTrainer` whose pairs are token ids already."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


def run_dpo(loss: str) -> dict[str, list[float]]:
    """Returns losses and gradient norms of two steps on all pairs."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SPEC["student"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
    settings = DPOConfig(
        output_dir=SPEC["output"],
        per_device_train_batch_size=len(SPEC["pairs"]),
        max_steps=2,
        num_train_epochs=2,
        learning_rate=SPEC["learning_rate"],
        lr_scheduler_type="constant",
        beta=SPEC["beta"],
        loss_type=[loss],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        max_length=None,
    )
    trainer = PairsTrainer(
        model=load(SPEC["student"]),
        ref_model=load(SPEC["student"]),
        args=settings,
        train_dataset=Dataset.from_list(SPEC["pairs"]),
        processing_class=tokenizer,
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "grad_norm" in line]
    return {"losses": [line["loss"] for line in logged], "grad_norms": [line["grad_norm"] for line in logged]}


def run_gkd(beta: float) -> dict[str, float]:
    """Returns the loss over the replies of the rows, and the norm of its gradient."""
    student, teacher = load(SPEC["student"]), load(SPEC["teacher"])
    longest = max(len(row["ids"]) for row in SPEC["rows"])
    ids = torch.tensor([row["ids"] + [0] * (longest - len(row["ids"])) for row in SPEC["rows"]])
    attention = torch.tensor([[1] * len(row["ids"]) + [0] * (longest - len(row["ids"])) for row in SPEC["rows"]])
    labels = torch.full_like(ids, -100)
    for number, row in enumerate(SPEC["rows"]):
        for place, learned in enumerate(row["mask"]):
            if learned:
                labels[number, place] = ids[number, place]
    own = student(input_ids=ids, attention_mask=attention).logits[:, :-1]
    with torch.no_grad():
        theirs = teacher(input_ids=ids, attention_mask=attention).logits[:, :-1]
    loss = GKDTrainer.generalized_jsd_loss(own, theirs, labels=labels[:, 1:], beta=beta)
    slopes = torch.autograd.grad(loss, [parameter for parameter in student.parameters() if parameter.requires_grad])
    return {"loss": float(loss.detach()), "grad_norm": float(torch.stack([slope.norm() for slope in slopes]).norm())}


def main() -> None:
    """Prints the numbers of all losses."""
    report = {
        "dpo": {loss: run_dpo(loss) for loss in SPEC["losses"]},
        "gkd": {str(beta): run_gkd(beta) for beta in SPEC["betas"]},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
