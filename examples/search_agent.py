"""A search agent: it looks up two documents to answer a question about both.

agentgym play examples/search_agent.py:Library
agentgym eval --env examples/search_agent.py:Library --policy http://HOST:8000/v1
agentgym train --env examples/search_agent.py:Library --model FOLDER
"""

from __future__ import annotations

import re
from typing import Any

from agentgym.envs import Policy, TextEnv, ToolEnv
from agentgym.tools import tool
from agentgym.tools.search import Document, SearchIndex, SearchTools
from agentgym.types import Message, ToolCall

LENGTHS = (290, 118, 512, 73, 377, 201, 645, 154, 88, 433, 260, 569)
RIVERS = dict(zip("Arda Belka Corin Dove Elin Fenn Gard Hast Isel Jorn Kell Lune".split(), LENGTHS, strict=True))
CORPUS = SearchIndex.build(
    Document(f"rivers/{name.lower()}", name, f"The river {name} is {length} km long.")
    for name, length in RIVERS.items()
)  # of a folder or a file of yours: `agentgym corpus index notes/ -o notes.index`, and SearchTools("notes.index")


class Library(ToolEnv):
    """Which of two rivers is longer? The documents say it."""

    system_prompt = "Search for what you need, then call answer."
    max_turns = 6
    runs_inline = True

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode, tools=SearchTools(CORPUS, num_results=2).tools)

    def start(self, options: dict[str, Any]) -> str:
        self.rivers = [str(name) for name in self.np_random.choice(list(RIVERS), size=2, replace=False)]
        return f"Which river is longer, the {self.rivers[0]} or the {self.rivers[1]}?"

    @tool
    def answer(self, river: str) -> str:
        """Answers with the name of a river, which ends the episode."""
        is_right = river == max(self.rivers, key=RIVERS.__getitem__)
        self.end(success=is_right, reward=float(is_right))
        return "Right." if is_right else "Wrong."

    def make_oracle(self) -> Policy:
        """Searches for each river, and answers with the longer one."""
        return _Oracle()


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._rivers = re.findall(r"the (\w+)", observation)
        self._lengths: list[int] = []

    def act(self, observation: str) -> Message:
        self._lengths += [int(length) for length in re.findall(r"is (\d+) km", observation)]
        if len(self._lengths) < len(self._rivers):
            call = ToolCall("1", "search", {"query": self._rivers[len(self._lengths)]})
        else:
            longest = self._lengths.index(max(self._lengths))
            call = ToolCall("1", "answer", {"river": self._rivers[longest]})
        return Message("assistant", "", tool_calls=(call,))
