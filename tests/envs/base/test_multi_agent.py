"""MultiAgentEnv, TicTacToe-v0 and Negotiation-v0: whose turn it is, who sees what, who earns what."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentgym.envs import EVAL_SEED_START, Action, EpisodeOver, TextEnv, make_env, policy_for
from agentgym.envs.base.multi_agent import MultiAgentEnv
from agentgym.envs.games.negotiation import Negotiation
from agentgym.envs.games.tic_tac_toe import LINES, TicTacToe, best_cells, winner
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.testing import examine_env
from agentgym.tools import tool
from agentgym.types import Message, ToolCall

GAMES = ("Negotiation-v0", "TicTacToe-v0")


def say(env: TextEnv, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    return env.step(Action.from_message(Message("assistant", text)))


def call(env: TextEnv, name: str, **arguments: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
    return env.step(Action.from_message(Message("assistant", "", tool_calls=(ToolCall("c", name, arguments),))))


def played(env: TextEnv, kind: str, seed: int) -> tuple[float, dict[str, float]]:
    """Reward and metrics of an episode."""
    observation, _ = env.reset(seed=seed)
    policy = policy_for(env, kind)
    policy.reset(env, observation, seed + 10_000)
    total, ended = 0.0, False
    while not ended:
        observation, reward, terminated, truncated, info = env.step(Action.from_message(policy.act(observation)))
        total, ended = total + reward, terminated or truncated
    return total, info["metrics"]


@pytest.mark.long
@pytest.mark.parametrize("env_id", GAMES)
def test_every_claim_of_the_card_holds(env_id: str) -> None:
    verdicts = {verdict.check: verdict for verdict in examine_env(env_id)}
    assert [verdict.findings for verdict in verdicts.values() if verdict.findings] == []
    no_tools = {"tool schemas", "raising tools", "arguments against the schema"} if env_id == "TicTacToe-v0" else set()
    unclaimed = {name for name, verdict in verdicts.items() if verdict.verdict == "not claimed"}
    assert unclaimed == {"fork", "answer leak", *no_tools}


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("TicTacToe-v0", {}),
        ("TicTacToe-v0", {"opponent": "greedy", "words": True}),
        ("Negotiation-v0", {}),
        ("Negotiation-v0", {"level": 2}),
    ],
)
def test_oracle_and_cheat_over_many_tasks(env_id: str, kwargs: dict[str, Any]) -> None:
    env = make_env(env_id, kwargs)
    for seed in (*range(60), *range(EVAL_SEED_START, EVAL_SEED_START + 10)):
        reward, metrics = played(env, "oracle", seed)
        assert (reward, metrics["success"]) == (1.0, 1.0)
        reward, metrics = played(env, "cheat", seed)
        assert (reward, metrics["success"]) == (0.0, 0.0)


def test_a_mistake_in_the_keywords_is_told() -> None:
    with pytest.raises(ConfigError, match="has the opponents random, greedy, careful, oracle, self; got 'orcle'"):
        make_env("TicTacToe-v0", {"opponent": "orcle"})
    with pytest.raises(ConfigError, match="has the seats X, O; got 'Y'"):
        make_env("TicTacToe-v0", {"seat": "Y"})
    with pytest.raises(ConfigError, match="opponent=self plays every seat"):
        make_env("TicTacToe-v0", {"opponent": "self", "seat": "X"})
    for wrong in (7, -1, [4, 3], [4], [0, 7], "4", 2.5):
        with pytest.raises(ConfigError, match=r"opening is a number of moves from 0 to 6, or the fewest and the most"):
            make_env("TicTacToe-v0", {"opening": wrong})
    with pytest.raises(ConfigError, match="has the levels 1, 2; got level 3"):
        make_env("Negotiation-v0", {"level": 3})


# ---- tic-tac-toe


def test_perfect_play_against_perfect_play_is_a_draw() -> None:
    for seed in range(8):
        reward, metrics = played(make_env("TicTacToe-v0", {"opponent": "oracle"}), "oracle", seed)
        assert (reward, metrics["draw"], metrics["success"]) == (0.5, 1.0, 0.0)


def test_minimax_completes_and_blocks_lines() -> None:
    assert [winner("".join("X" if cell in line else "." for cell in range(9))) for line in LINES] == ["X"] * 8
    assert winner("XXOOOXXXO") == ""
    assert best_cells("XX.OO....", "X") == [2]
    assert best_cells("XX..O....", "O") == [2]
    assert best_cells(".........", "X") == list(range(9))
    assert best_cells("X........", "O") == [4]


def test_a_random_opponent_takes_each_free_cell_equally_often() -> None:
    env = make_env("TicTacToe-v0", {"seat": "O"})
    firsts = [env.reset(seed=seed)[0].replace("\n", "").index("O") for seed in range(900)]
    assert all(70 <= firsts.count(cell) <= 130 for cell in range(9))


def test_both_players_see_their_own_marks_as_x() -> None:
    env = make_env("TicTacToe-v0", {"opponent": "self"})
    assert env.reset(seed=0)[0] == "123\n456\n789"
    assert say(env, "5")[0] == "123\n4O6\n789"
    assert say(env, "1")[0] == "O23\n4X6\n789"


@pytest.mark.parametrize(("opening", "lengths"), [(5, range(6)), ((2, 3), range(2, 4))])
def test_an_opening_of_random_moves_follows_from_the_seed_and_ends_no_game(opening: Any, lengths: range) -> None:
    env = make_env("TicTacToe-v0", {"opponent": "self", "opening": opening})
    game = env.unwrapped
    assert isinstance(game, TicTacToe)
    counts: Counter[int] = Counter()
    for seed in range(200):
        first, _ = env.reset(seed=seed)
        board, mover = game.board, game.agent_selection
        num_moves = 9 - board.count(".")
        assert mover == "XO"[num_moves % 2] and board.count("X") - board.count("O") == num_moves % 2
        assert not winner(board)
        assert env.reset(seed=seed)[0] == first
        counts[num_moves] += 1
    assert set(counts) == set(lengths) and min(counts.values()) > 10
    env.close()


def test_cells_and_marks_may_be_words() -> None:
    env = make_env("TicTacToe-v0", {"opponent": "self", "words": True})
    assert env.reset(seed=0)[0] == "attic balcony cellar\ngarden hall kitchen\nlibrary pantry tower"
    assert say(env, "the hall")[0] == "attic balcony cellar\ngarden blue kitchen\nlibrary pantry tower"
    assert say(env, "attic")[0] == "blue balcony cellar\ngarden red kitchen\nlibrary pantry tower"
    assert say(env, "5")[4]["tool_results"] == ()
    assert env.turns == 3
    assert say(env, "**Tower**")[0] == "red balcony cellar\ngarden blue kitchen\nlibrary pantry blue"


def test_a_game_of_all_seats_pays_each_its_own() -> None:
    env = make_env("TicTacToe-v0", {"opponent": "self"})
    assert isinstance(env, TicTacToe)
    env.reset(seed=0)
    for cell in "1425":
        assert say(env, cell)[1:3] == (0.0, False)
    observation, reward, terminated, _, info = say(env, "3")
    assert observation == "XXX\nOO6\n789\nYou win."
    assert (reward, terminated, info["agent"], info["metrics"]["success"]) == (1.0, True, "X", 1.0)
    assert env.rewards == {"X": 1.0, "O": 0.0}
    assert env.step_result("O", "")[0] == "OOO\nXX6\n789\nYou lose."
    with pytest.raises(EpisodeOver):
        say(env, "6")


def test_a_reply_without_a_legal_move_is_answered_and_the_third_loses() -> None:
    env = make_env("TicTacToe-v0", {"seat": "X"})
    env.reset(seed=0)
    observation = say(env, "I take 5.")[0]
    cell = "123456789"[observation.replace("\n", "").index("O")]
    assert say(env, cell)[0] == f"{cell} is not free.\n{observation}"
    assert say(env, "4 or 6")[0] == f"Reply with one free cell.\n{observation}"
    text, reward, terminated, _, info = say(env, "resign")
    assert (reward, terminated, text.endswith("You lose.")) == (0.0, True, True)
    assert (info["metrics"]["illegal"], info["metrics"]["success"]) == (3.0, 0.0)


@pytest.mark.parametrize("env_id", GAMES)
def test_a_game_that_runs_out_of_turns_has_no_success(env_id: str) -> None:
    env = make_env(env_id)
    env.reset(seed=0)
    truncated = False
    while not truncated:
        _, reward, terminated, truncated, info = call(env, "resign")
    assert (reward, terminated, info["metrics"]["success"]) == (0.0, False, 0.0)


# ---- negotiation


def test_a_deal_pays_each_its_share_of_the_most_it_could_have() -> None:
    env = make_env("Negotiation-v0", {"opponent": "self"})
    assert isinstance(env, Negotiation)
    env.reset(seed=0)
    env.items, env.values, env.least = (2, 2), {"A": (4, 1), "B": (1, 4)}, {"A": 3, "B": 5}
    env.most = {"A": 9, "B": 10}
    opening = env.observe("A")
    assert opening == ("On the table: 2 books, 2 hats. Worth to you, each: books 4, hats 1. You need 3. Turns left: 4.")
    text = call(env, "offer", books=2, hats=0)[0]
    assert "You are offered 0 books, 2 hats." in text and "books 1, hats 4. You need 5" in text
    *_, terminated, _, info = call(env, "accept")
    assert terminated
    assert env.rewards == {"A": 8 / 9, "B": 0.8}
    assert info["metrics"] == {"success": 0.0, "deal": 1.0, "value": 8.0}
    assert "2 books" in env.step_result("A", "")[0]


def test_without_a_deal_nobody_gets_anything() -> None:
    env = make_env("Negotiation-v0", {"opponent": "self"})
    assert isinstance(env, Negotiation)
    env.reset(seed=1)
    assert call(env, "accept")[4]["tool_results"][0].content == "Nothing is offered to you."
    for _ in range(6):
        assert not call(env, "offer", books=99, hats=0)[2]
    assert call(env, "offer", books=0, hats=0)[2]
    assert env.rewards == {"A": 0.0, "B": 0.0}


def test_what_an_agent_needs_and_what_it_is_worth_is_not_told_to_the_other() -> None:
    env = make_env("Negotiation-v0", {"opponent": "self", "level": 2})
    assert isinstance(env, Negotiation)
    for seed in range(20):
        env.reset(seed=seed)
        before = env.observe("A")
        env.values["B"], env.least["B"] = (9, 9, 9), 77
        assert env.observe("A") == before
        assert env.worth("A", env.items) == 10


# ---- the base


class Nim(MultiAgentEnv):
    """Who takes the last match wins."""

    agents = ("first", "second", "third")
    opponents = ("random",)
    max_turns = 30

    def deal(self, options: dict[str, Any]) -> None:
        self.left = 7

    def observe(self, agent: str) -> str:
        return f"{self.left} left, {agent}."

    @tool
    def take(self, number: int) -> str:
        """Takes matches.

        Args:
            number: 1 or 2
        """
        if not self.may_move:
            return "one move in each reply"
        self.left -= number
        if self.left <= 0:
            self.finish({self.agent_selection: 1.0}, winners=(self.agent_selection,))
        self.pass_turn()
        return "Taken."


def test_turns_go_around_and_one_reply_makes_one_move() -> None:
    env = Nim(opponent="self")
    env.reset(seed=0)
    calls = tuple(ToolCall(str(n), "take", {"number": 1}) for n in range(3))
    observation, *_, info = env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))
    assert (observation, env.agent_selection) == ("6 left, second.", "second")
    assert [result.content for result in info["tool_results"]] == ["Taken.", *["one move in each reply"] * 2]
    call(env, "take", number=1)
    assert call(env, "take", number=1)[0] == "4 left, first."


class Mute:
    """Says something in place of a move."""

    def reset(self, env: TextEnv, observation: str, seed: int) -> None: ...

    def act(self, observation: str) -> Message:
        return Message("assistant", "hm")


def test_an_opponent_that_makes_no_move_is_a_fault_of_the_environment() -> None:
    class Silent(Nim):
        def make_opponent(self, kind: str) -> Any:
            return Mute()

    with pytest.raises(EnvironmentFault, match="the opponent random made no move as first"):
        Silent(seat="second").reset(seed=0)
