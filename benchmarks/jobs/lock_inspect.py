import random

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, tool
from inspect_ai.util import store


@tool
def turn() -> Tool:
    async def execute(digit: int) -> str:
        """Turns the dial to a digit.

        Args:
            digit: the digit
        """
        code = store().get("code")
        store().set("is_open", store().get("is_open", False) or digit == code)
        return "It opens." if digit == code else "Higher." if digit < code else "Lower."

    return execute


@scorer(metrics=[accuracy()])
def opening() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value="C" if state.store.get("is_open") else "I")

    return score


@solver
def choose_code() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.store.set("code", state.metadata["code"])
        return state

    return solve


@task
def lock() -> Task:
    question = "Open the lock. It has a dial from 0 to 9."
    samples = [Sample(question, metadata={"code": random.randrange(10)}) for _ in range(200)]
    agent = react(tools=[turn()])
    return Task(dataset=samples, setup=choose_code(), solver=agent, scorer=opening(), message_limit=6)
