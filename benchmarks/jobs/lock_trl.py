import random
import sys

from trl import GRPOConfig, GRPOTrainer


class Lock:
    def reset(self, **kwargs: object) -> str:
        self.code, self.is_open = random.randrange(10), False
        return "Open the lock. It has a dial from 0 to 9."

    def turn(self, digit: int) -> str:
        """Turns the dial to a digit.

        Args:
            digit: the digit
        """
        self.is_open = self.is_open or digit == self.code
        return "It opens." if digit == self.code else "Higher." if digit < self.code else "Lower."

    def get_reward(self) -> float:
        return float(self.is_open)


if __name__ == "__main__":
    model, steps = sys.argv[1], int(sys.argv[2])
    lengths = {"max_tool_calling_iterations": 8, "max_completion_length": 512}
    config = GRPOConfig("runs/lock-trl", max_steps=steps, **lengths, use_cpu=True, bf16=False, report_to="none")
    GRPOTrainer(model, args=config, environment_factory=Lock).train()
