"""Rows of data from Python, and an environment with tools that plays them, over several turns.

Read the rows:    open_data(DataConfig(train="examples/word_problems.py:rows"))
Play one by hand: `agentgym play examples/word_problems.py:Calculator`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentgym.envs import ToolEnv, row_messages
from agentgym.tools import tool

HERE = "examples.word_problems:Calculator"


def rows() -> Iterator[dict[str, Any]]:
    """Yields rows in verl's columns; a file of such rows would do as well."""
    for index in range(1000):
        yield row(index)


def row(index: int) -> dict[str, Any]:
    boxes, apples, eaten = index % 10 + 2, index // 10 % 10 + 2, index // 100 + 1
    question = f"There are {boxes} boxes with {apples} apples each. {eaten} apples are eaten. How many are left?"
    return {
        "prompt": [
            {"role": "system", "content": "Use the tools, then reply with the number alone."},
            {"role": "user", "content": question},
        ],
        "reward_model": {"style": "rule", "ground_truth": str(boxes * apples - eaten)},
        "extra_info": {"index": index},
        "agent_name": HERE,
    }


class Calculator(ToolEnv):
    """A question is answered with a calculator at hand."""

    max_turns = 8
    runs_inline = True

    def start(self, options: dict[str, Any]) -> Any:
        drawn = row(int(self.np_random.integers(1000)))
        self.answer = options.get("ground_truth", drawn["reward_model"]["ground_truth"])
        return row_messages(options or {"messages": drawn["prompt"]})

    @tool
    def multiply(self, first: int, second: int) -> str:
        """Multiplies two numbers."""
        return str(first * second)

    @tool
    def subtract(self, first: int, second: int) -> str:
        """Takes the second number from the first."""
        return str(first - second)

    def on_message(self, text: str) -> str:
        correct = text.strip() == self.answer
        self.end(success=correct, reward=float(correct))
        return "Right." if correct else "Wrong."
