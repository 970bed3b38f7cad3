"""A training with TRL: a lock as an environment, whose methods are tools."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen3-0.6B"


class Lock:
    """A lock with a dial."""

    def reset(self, code=0, **kwargs) -> str | None:
        self.code, self.opened, self.turns = code, False, 0
        return "\nIt has a dial from 0 to 9."

    def turn(self, digit: int) -> str:
        """Turns the dial.

        Args:
            digit: The digit to set.

        Returns:
            What the lock does.
        """
        self.turns += 1
        self.opened = digit == self.code
        return "It opens." if self.opened else ("Higher." if digit < self.code else "Lower.")

    def get_reward(self) -> float:
        return 1.0 if self.opened else 0.1 * min(self.turns, 3)


def main():
    dataset = load_dataset("json", data_files="locks.jsonl", split="train")
    config = GRPOConfig(
        output_dir="lock-grpo",
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_completion_length=32,
        max_steps=1,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        loss_type="dapo",
        beta=0.0,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=MODEL,
        args=config,
        train_dataset=dataset,
        environment_factory=Lock,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
