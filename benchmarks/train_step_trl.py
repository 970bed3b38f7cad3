"""TRL's side of `train_step.py` and `models.py`, in TRL's own environment: `train_step_trl.py SPEC.json`, JSON last.

A real GRPOTrainer computes its own loss on rows that are given, padded as it pads them: prompts to the left, replies
to the right. Its importance ratio is 1 and its loss is a mean over tokens, so the gradient is that of the other sides.
With the objective `sft`, a real SFTTrainer computes its loss on the replies of the same rows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported

import torch
from datasets import Dataset
from memory import Memory
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
IS_SFT = SPEC.get("objective") == "sft"
Trainer = GRPOTrainer | SFTTrainer


def no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Returns zeros: a trainer requires a reward, but nothing is sampled here."""
    return [0.0] * len(completions)


def make_trainer() -> Trainer:
    """Makes a trainer over the saved model, whose weights are float32; with `bf16`, its products are in bfloat16.

    In the backward pass it computes each layer again, TRL's default, if the specification has `checkpointing`.
    """
    backend = Tokenizer(models.WordLevel({"t0": 0, "<end>": 1}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="t0")
    settings = {
        "output_dir": SPEC["output"],
        "per_device_train_batch_size": len(SPEC["rows"]),
        "use_cpu": True,
        "bf16": SPEC["bf16"],
        "gradient_checkpointing": SPEC["checkpointing"],
        "report_to": "none",
        "save_strategy": "no",
        "model_init_kwargs": {"dtype": "float32"},
    }
    trainer: Trainer
    if IS_SFT:
        data = Dataset.from_dict({"input_ids": SPEC["rows"]})
        trainer = SFTTrainer(SPEC["model"], SFTConfig(**settings), train_dataset=data, processing_class=tokenizer)
    else:
        config = GRPOConfig(num_generations=len(SPEC["rows"]), beta=0.0, loss_type="dapo", **settings)
        data = Dataset.from_dict({"prompt": ["t0"]})
        trainer = GRPOTrainer(SPEC["model"], no_reward, config, train_dataset=data, processing_class=tokenizer)
    # What its `train` does before the first step.
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    if SPEC["checkpointing"]:
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    return trainer


def make_inputs() -> dict[str, torch.Tensor]:
    """Returns the rows as `_compute_loss` takes them, with an advantage for each token."""
    rows, prompt = SPEC["rows"], SPEC["prompt"]
    longest = max(len(row) for row in rows) - prompt
    size = (len(rows), longest)
    completion_ids = torch.zeros(size, dtype=torch.long)
    completion_mask, advantages = torch.zeros(size, dtype=torch.long), torch.zeros(size)
    for number, (row, gains) in enumerate(zip(rows, SPEC["advantages"], strict=True)):
        reply = slice(len(row) - prompt)
        completion_ids[number, reply] = torch.tensor(row[prompt:])
        completion_mask[number, reply] = 1
        advantages[number, reply] = torch.tensor(gains)
    prompt_ids = torch.tensor([row[:prompt] for row in rows])
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages,
        "num_items_in_batch": completion_mask.sum().float(),
    }


def whole_rows(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids and masks of prompts with their replies."""
    ids, mask = (torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], 1) for kind in ("ids", "mask"))
    return ids, mask


def step(trainer: Trainer, inputs: dict[str, torch.Tensor]) -> None:
    """Computes the loss and its gradient."""
    if IS_SFT:
        ids, mask = whole_rows(inputs)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : SPEC["prompt"]] = -100
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    trainer.accelerator.backward(trainer.compute_loss(trainer.model, inputs))


def write_gradients(trainer: Trainer, inputs: dict[str, torch.Tensor]) -> None:
    """Writes logprobs and gradients to the file of the specification."""
    ids, mask = whole_rows(inputs)
    longest = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        if IS_SFT:
            logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -longest - 1 : -1]
            logp = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
        else:
            logp = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest)[0]
    step(trainer, inputs)
    tensors = {
        name: parameter.grad.contiguous()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    save_file({**tensors, "logprobs": logp[inputs["completion_mask"].bool()].contiguous()}, SPEC["save"])


def time_steps(trainer: Trainer, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the same measurements as `time_side` of the other sides."""
    parameters = list(trainer.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    memory = Memory()
    seconds, cpu = [], []
    for _ in range(SPEC["repeats"] + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        step(trainer, inputs)
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
    return {"seconds": median(seconds[1:]), "cpu_seconds": median(cpu[1:]), "memory_mb": memory.grown_mb}


def main() -> None:
    """Compares or measures, by the specification."""
    torch.set_num_threads(1)
    trainer, inputs = make_trainer(), make_inputs()
    result: dict[str, float] = {}
    if SPEC["save"]:
        write_gradients(trainer, inputs)
    else:
        result = time_steps(trainer, inputs)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
