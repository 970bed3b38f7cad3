import json
import random
import sys

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

TURN = {"name": "turn", "description": "Turns the dial to a digit."}
TURN["parameters"] = {"type": "object", "properties": {"digit": {"type": "integer"}}, "required": ["digit"]}


def play(code: int) -> list[dict]:
    messages = [{"role": "system", "content": "Open the lock."}]
    messages.append({"role": "user", "content": "It has a dial from 0 to 9."})
    low, high, digit = 0, 9, None
    while digit != code:
        digit = (low + high) // 2
        low, high = (digit + 1, high) if digit < code else (low, digit - 1)
        call = {"type": "function", "function": {"name": "turn", "arguments": {"digit": digit}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        answer = "It opens." if digit == code else "Higher." if digit < code else "Lower."
        messages.append({"role": "tool", "name": "turn", "content": answer})
    return messages[:-1]


if __name__ == "__main__":
    model, steps = sys.argv[1], int(sys.argv[2])
    tools = json.dumps([{"type": "function", "function": TURN}])
    rows = [{"messages": play(random.randrange(10)), "tools": tools} for _ in range(1000)]
    cpu = {"use_cpu": True, "bf16": False, "report_to": "none"}
    config = SFTConfig("runs/lessons-trl", max_steps=steps, assistant_only_loss=True, **cpu)
    SFTTrainer(model, args=config, train_dataset=Dataset.from_list(rows)).train()
