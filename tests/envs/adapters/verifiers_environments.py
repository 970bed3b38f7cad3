"""Environments by the API of verifiers: one reply, a game of several turns, tools, a ranking; some fail on demand."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

WORDS = ("alpha", "banana", "cherry", "delta", "eleven", "fennel", "ginger", "hazel")


def load_environment(kind: str = "letters", num_rows: int = 8, failure: str = "") -> vf.Environment:
    """The environment of a kind: letters, guess, sums or ranked."""
    return {"letters": _letters, "guess": _guess, "sums": _sums, "ranked": _ranked}[kind](num_rows, failure)


def _letters(num_rows: int, failure: str) -> vf.Environment:
    rows = [{"question": f"Write many a. ({WORDS[i % 8]} {i})", "answer": WORDS[i % 8]} for i in range(num_rows)]

    def share_of_a(completion: list[Any], **_: Any) -> float | None:
        message = completion[-1]
        text = "".join([message.content or "", *(f"{call.name}{call.arguments}" for call in message.tool_calls or ())])
        if failure == "raises":
            raise KeyError("no score")
        return None if failure == "none" else text.count("a") / max(1, len(text))

    async def said_word(completion: list[Any], answer: str) -> float:
        if failure == "async":
            raise ValueError("no judge")
        return float(answer in (completion[-1].content or ""))

    rubric = vf.Rubric(funcs=[share_of_a, said_word], weights=[1.0, 0.0])
    prompt = "You write letters."
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), system_prompt=prompt, rubric=rubric)


class _Guess(vf.MultiTurnEnv):
    async def env_response(self, messages: list[Any], state: Any, **_: Any) -> list[Any]:
        if self.failure == "turn":
            raise RuntimeError("the host is on fire")
        text = (messages[-1].content or "").strip()
        if text == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="Right.")]
            return state["final_env_response"]
        more = text.isdecimal() and int(text) < int(state["answer"])
        return [vf.UserMessage(content="Higher." if more else "Lower.")]


def _guess(num_rows: int, failure: str) -> vf.Environment:
    rows = [{"question": "Guess from 0 to 7.", "answer": str(i % 8)} for i in range(num_rows)]

    def right(completion: list[Any], answer: str) -> float:
        return float(any(message.role == "assistant" and message.content == answer for message in completion))

    rubric = vf.Rubric(funcs=[right])
    return _Guess(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=5, failure=failure)


def add(first: int, second: int) -> int:
    """Adds two numbers.

    Args:
        first: a number
        second: another
    """
    return first + second


def add_by_server(first: int, second: int) -> int:
    """Adds two numbers on a server that is down."""
    raise ConnectionError("the adder is down")


def _sums(num_rows: int, failure: str) -> vf.Environment:
    rows = [{"question": f"{3 * i} + {i}?", "answer": str(4 * i)} for i in range(num_rows)]

    def right(completion: list[Any], answer: str) -> float:
        return float(completion[-1].content == answer)

    tools = [add_by_server] if failure == "tool" else [add]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), tools=tools, max_turns=4)


def _ranked(num_rows: int, failure: str) -> vf.Environment:
    def shortest(completions: list[Any]) -> list[float]:
        sizes = [len(messages[-1].content) for messages in completions]
        return [float(size == min(sizes)) for size in sizes]

    rows = [{"question": "Be short.", "answer": ""}] * num_rows
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[shortest]))
