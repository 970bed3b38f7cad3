import random

import verifiers as vf
from datasets import Dataset


class Lock(vf.StatefulToolEnv):
    def __init__(self, **kwargs) -> None:
        super().__init__(tools=[], max_turns=8, **kwargs)
        self.add_tool(self.turn, args_to_skip=["state"])

    async def setup_state(self, state: vf.State, **kwargs) -> vf.State:
        state["code"], state["is_open"] = int(state["answer"]), False
        return await super().setup_state(state, **kwargs)

    def update_tool_args(self, tool_name: str, tool_args: dict, messages, state: vf.State, **kwargs) -> dict:
        return {**tool_args, "state": state}

    async def turn(self, digit: int, state: vf.State) -> str:
        """Turns the dial to a digit.

        Args:
            digit: the digit
        """
        state["is_open"] = digit == state["code"]
        return "It opens." if digit == state["code"] else "Higher." if digit < state["code"] else "Lower."

    @vf.stop
    async def is_over(self, state: vf.State) -> bool:
        return state.get("is_open", False)


def open_reward(state: vf.State, **kwargs) -> float:
    return float(state["is_open"])


def load_environment() -> vf.Environment:
    question = [{"role": "user", "content": "It has a dial from 0 to 9."}]
    rows = [{"prompt": question, "answer": str(random.randrange(10))} for _ in range(200)]
    return Lock(dataset=Dataset.from_list(rows), system_prompt="Open the lock.", rubric=vf.Rubric([open_reward]))
