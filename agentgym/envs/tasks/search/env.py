"""SearchQA-v0: questions that are answered by searching a made-up encyclopedia and reading from page to page."""

from __future__ import annotations

from typing import Any

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.envs.tasks.prompt import says
from agentgym.envs.tasks.search.world import draw_search_question, make_search_world
from agentgym.errors import ConfigError
from agentgym.tools import tool
from agentgym.tools.search import SearchIndex, SearchTools
from agentgym.types import Message

__all__ = ["SearchQA"]

LEVELS = {1: (1, 32), 2: (2, 48), 3: (3, 96), 4: (4, 160)}
"""Maps a level to the steps of a question, and the approximate number of pages."""
NUM_RESULTS = 3
ENDS = " \t\n.\"'`"
"""The characters that may surround an answer."""


class SearchQA(ToolEnv):
    """A question over a small encyclopedia of a world that is drawn from the seed, so that nobody knows it by heart.

    `level` (1 to 4) sets how many pages lead to the answer, and how many others there are, of namesakes among them. The
    first answer ends the episode: reward 1 for the name that is asked for, up to letter case, width and space.
    """

    card = EnvCard(
        task="Answer a question of several steps by searching a made-up encyclopedia and reading its pages.",
        tools=("search", "fetch", "answer"),
        reward="1 when the first answer is the name that is asked for, else 0.",
        difficulty=Difficulty(
            values={
                1: "one step, about 30 pages",
                2: "two steps, about 50 pages",
                3: "three steps, about 100 pages",
                4: "four steps, about 160 pages",
            }
        ),
        oracle="fetches the pages on the way, one by one, and answers the name that it read",
        cheat="answers names on the way, several names, addresses and claims, and fetches what is not recorded",
        baseline={"random": 0.0},
        licence="Apache-2.0",
    )
    system_prompt = (
        "Answer the question from the encyclopedia. Find pages with the tool search, read them with fetch, and call "
        "answer once, with the name alone."
    )
    runs_inline = True

    def __init__(self, render_mode: str | None = None, *, level: int = 2) -> None:
        if level not in LEVELS:
            raise ConfigError(f"SearchQA has the levels {', '.join(map(str, LEVELS))}; got level {level!r}")
        super().__init__(render_mode)
        self.level = level
        self.num_hops, self.num_pages = LEVELS[level]
        self.max_turns = 4 * self.num_hops + 4

    def start(self, options: dict[str, Any]) -> str:
        """Draws the world and the question, and indexes the pages."""
        self.world = make_search_world(self.np_random, self.num_pages)
        self.question = draw_search_question(self.np_random, self.world, self.num_hops)
        self._library = SearchTools(SearchIndex.build(self.world.pages), num_results=NUM_RESULTS)
        self._is_shown = False
        return self.question.text

    @tool
    def search(self, query: str) -> str:
        """Searches the encyclopedia. Gives titles, addresses and a passage of the best pages.

        Args:
            query: The words to look for.
        """
        return self._note_shown(self._library.search(query))

    @tool
    def fetch(self, url: str) -> str:
        """Reads a page of the encyclopedia.

        Args:
            url: Its address, as search gives it.
        """
        return self._note_shown(self._library.fetch(url))

    @tool
    def answer(self, name: str) -> str:
        """Answers the question, which ends the episode.

        Args:
            name: The name that is asked for, and nothing else.
        """
        right = says(self.question.answer, name.strip(ENDS))
        self.end(success=right, reward=float(right))
        return "That is right." if right else f"That is wrong. The answer was {self.question.answer}."

    def secrets(self) -> tuple[str, ...]:
        """The answer, until a page has shown it."""
        return () if self._is_shown else (self.question.answer,)

    def make_oracle(self) -> Policy:
        """A policy that reads its way to the answer."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but finding the answer."""
        return Trickster("answer", _tricks)

    def _note_shown(self, text: str) -> str:
        self._is_shown = self._is_shown or self.question.answer in text
        return text


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        path = game_of(env, SearchQA).question.path
        self._names = [entity.name for entity in path]
        self._urls = [entity.url for entity in path[:-1]]
        self._step = 0

    def act(self, observation: str) -> Message:
        self._step += 1
        if self._step == 1:
            return tool_call_reply("search", query=self._names[0])
        if self._step <= len(self._names):
            return tool_call_reply("fetch", url=self._urls[self._step - 2])
        return tool_call_reply("answer", name=self._names[-1] if self._names[-1] in observation else "not found")


def _tricks(env: TextEnv) -> list[Message]:
    game = game_of(env, SearchQA)
    answer, path = game.question.answer, game.question.path
    first, last = answer.split()
    names = (
        *(entity.name for entity in path[:-1]),
        ", ".join(entity.name for entity in game.world.entities),
        f"{answer} or {path[0].name}",
        f"The answer is {answer}",
        f"{last} {first}",
        first,
        path[-1].url,
        game.question.text,
        "",
        "*",
    )
    outside = ("file:///etc/passwd", "http://127.0.0.1:80/", "../" * 9 + "etc/passwd", "https://atlas.example/answer")
    return [tool_call_reply("answer", name=name) for name in names] + [
        tool_call_reply("fetch", url=url) for url in outside
    ]
