"""TRL's side of `grpo_step.py` and `gpu_step.py`, in TRL's own environment: `grpo_step_trl.py SPEC.json`, JSON last.

The weights are float32, the optimizer is the fused one, and there is no reference model. The specification has whether
it computes in bfloat16, and whether the backward pass computes layers again (TRL's defaults: both). It may also have
`compile` (the model by torch.compile) and `static_cache` (that of generation).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
ON_CPU = SPEC["device"] == "cpu"


def now() -> float:
    """Returns seconds: of the CPU's work, or of the clock, once a GPU is done."""
    if SPEC["clock"] == "cpu":
        return time.process_time()
    if not ON_CPU:
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock(TrainerCallback):
    """The seconds of whole steps."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins when the optimizer's last step is over, before the next batch is prepared."""
        self.started = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends after the optimizer's step."""
        self.steps.append(now() - self.started)


class TimedTrainer(GRPOTrainer):
    """Notes what generation took, and the first step's trajectories, loss and gradient norm."""

    generation: list[float]
    seen: list[dict[str, Any]]

    def _generate(self, prompts: Any) -> Any:
        started = now()
        result = super()._generate(prompts)
        self.generation.append(now() - started)
        return result

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss, and records its inputs."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        step: dict[str, Any] = {"loss": float(loss.detach()), "tokens": int(inputs["completion_mask"].sum())}
        if not self.seen:
            for name in ("prompt_ids", "completion_ids", "advantages"):
                step[name] = inputs[name].tolist()
        self.seen.append(step)
        return loss


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Returns the number of even ids."""
    return [float(sum(1 - index % 2 for index in ids)) for ids in completion_ids]


def tokenizer_of_numbers() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with the word `tN` for the id N."""
    words = {f"t{index}": index for index in range(SPEC["vocab_size"])} | {"<end>": SPEC["vocab_size"]}
    backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # The end token is outside of the model's vocabulary: every reply has its full length.
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="t0")


def main() -> None:
    """Trains for the steps of the specification."""
    torch.set_num_threads(1)
    tokenizer = tokenizer_of_numbers()
    prompts = [" ".join(f"t{index}" for index in ids) for ids in SPEC["prompts"]]
    num_replies = len(prompts) * SPEC["group_size"]
    config = GRPOConfig(
        output_dir=SPEC["output"],
        per_device_train_batch_size=num_replies,
        num_generations=SPEC["group_size"],
        max_completion_length=SPEC["reply_tokens"],
        max_steps=SPEC["steps"],
        learning_rate=SPEC["learning_rate"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.98,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        use_cpu=ON_CPU,
        bf16=SPEC["bf16"],
        gradient_checkpointing=SPEC["checkpointing"],
        torch_compile=SPEC.get("compile", False),
        cache_implementation="static" if SPEC.get("static_cache") else None,
        seed=0,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"},
    )
    data = Dataset.from_dict({"prompt": prompts})
    clock = Clock()
    trainer = TimedTrainer(
        SPEC["model"], reward, config, train_dataset=data, processing_class=tokenizer, callbacks=[clock]
    )
    trainer.eos_token_ids = trainer.generation_config.eos_token_id = [tokenizer.eos_token_id]  # not the model's as well
    trainer.generation, trainer.seen = [], []
    trainer.train()
    update = [whole - generation for whole, generation in zip(clock.steps, trainer.generation, strict=True)]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    first = trainer.seen[0]
    print(
        json.dumps(
            {
                "generation_s": trainer.generation,
                "update_s": update,
                "tokens": [step["tokens"] for step in trainer.seen],
                "losses": [step["loss"] for step in trainer.seen],
                "grad_norms": norms,
                "gpu_mb": None if ON_CPU else torch.cuda.max_memory_allocated() / 2**20,
                "first": {name: first[name] for name in ("prompt_ids", "completion_ids", "advantages", "loss")},
            }
        )
    )


if __name__ == "__main__":
    main()
