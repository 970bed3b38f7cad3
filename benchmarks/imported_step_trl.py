"""A training with TRL's GRPOTrainer, as a user writes it, which `imported_step.py` completes and imports.

It runs in TRL's own environment, `imported_step_trl.py SPEC.json`, and prints what its first step saw.
"""

import json

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

LOSSES: list[dict] = []
PARTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def vowels(completions, **kwargs):
    """Returns the share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in completions]


class Recorder(GRPOTrainer):
    """Notes what the loss was computed from."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        """Computes the loss, and records its inputs."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        LOSSES.append({"loss": float(loss.detach()), **{name: inputs[name].tolist() for name in PARTS}})
        return loss


def main():
    """Trains a step."""
    args = GRPOConfig(
        output_dir="OUTPUT",
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=40,
        max_steps=1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        loss_type="LOSS",
        scale_rewards="SCALE",
        epsilon_high=0.28,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    data = Dataset.from_dict({"prompt": ["You are in a room.", "There is a door to the north."]})
    trainer = Recorder(model="MODEL", reward_funcs=vowels, args=args, train_dataset=data)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    print(json.dumps({**LOSSES[0], "grad_norm": norms[0]}))


if __name__ == "__main__":
    main()
