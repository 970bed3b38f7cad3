"""Countdown, Mastermind, Sokoban, Sudoku and Wordle: right rules, tasks that can be solved, honest rewards."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from agentgym.envs import EVAL_SEED_START, Action, TextEnv, make_env, policy_for
from agentgym.envs.games.countdown import Countdown
from agentgym.envs.games.mastermind import marks
from agentgym.envs.games.sokoban import Sokoban, shortest_way
from agentgym.envs.games.sudoku import Sudoku, solutions
from agentgym.envs.games.wordle import letter_marks, word_list
from agentgym.errors import ConfigError
from agentgym.testing import examine_env
from agentgym.types import Message, ToolCall

IDS = ("Countdown-v0", "Mastermind-v0", "Sokoban-v0", "Sudoku-v0", "Wordle-v0")
QUICK = ("Countdown-v0", "Wordle-v0")
"""Whose cards are checked in every run of the tests; the others are with the slow ones."""
CASES = [(env_id, level) for env_id in IDS for level in (1, 2, 3, 4) if level < 4 or env_id == "Sudoku-v0"]


def say(env: TextEnv, name: str, **arguments: Any) -> tuple[str, float, bool]:
    message = Message("assistant", "", tool_calls=(ToolCall("call_0", name, arguments),))
    observation, reward, terminated, *_ = env.step(Action.from_message(message))
    return observation, reward, terminated


def played(env: TextEnv, kind: str, seed: int) -> tuple[float, float]:
    """Reward and success of an episode."""
    observation, _ = env.reset(seed=seed)
    policy = policy_for(env, kind)
    policy.reset(env, observation, seed)
    total, ended = 0.0, False
    while not ended:
        observation, reward, terminated, truncated, info = env.step(Action.from_message(policy.act(observation)))
        total, ended = total + reward, terminated or truncated
    return total, info["metrics"]["success"]


@pytest.mark.long
@pytest.mark.parametrize(
    "env_id", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in IDS if name not in QUICK)]
)
def test_every_claim_of_the_card_holds(env_id: str) -> None:
    verdicts = {verdict.check: verdict for verdict in examine_env(env_id)}
    assert [verdict.findings for verdict in verdicts.values() if verdict.findings] == []
    unclaimed = {name for name, verdict in verdicts.items() if verdict.verdict == "not claimed"}
    partial = {
        "Sokoban-v0": {"answer leak"},
        "Wordle-v0": {"held-out tasks"},
    }  # Wordle has too few words to be distinct
    assert unclaimed == {"fork", *partial.get(env_id, ())}


@pytest.mark.long
@pytest.mark.parametrize(("env_id", "level"), CASES)
def test_oracle_and_cheat_over_many_tasks(env_id: str, level: int) -> None:
    env = make_env(env_id, {"level": level})
    for seed in (*range(25), *range(EVAL_SEED_START, EVAL_SEED_START + 5)):
        assert played(env, "oracle", seed) == (1.0, 1.0)
        assert played(env, "cheat", seed) == (0.0, 0.0)


@pytest.mark.parametrize(("env_id", "level"), CASES)
def test_different_seeds_give_different_tasks(env_id: str, level: int) -> None:
    env: Any = make_env(env_id, {"level": level})
    tasks = set()
    for seed in range(40):
        observation, _ = env.reset(seed=seed)
        tasks.add((observation, getattr(env, "code", ""), getattr(env, "word", "")))
    assert len(tasks) >= (10 if (env_id, level) == ("Mastermind-v0", 1) else 30)


@pytest.mark.parametrize("env_id", IDS)
def test_an_unknown_level_is_refused(env_id: str) -> None:
    with pytest.raises(ConfigError, match=r"has the levels 1, 2, 3.*; got level 7"):
        make_env(env_id, {"level": 7})


@pytest.mark.parametrize("env_id", IDS)
def test_many_calls_in_one_reply_use_up_what_many_replies_do(env_id: str) -> None:
    env = make_env(env_id)
    env.reset(seed=0)
    (spec,) = env.tool_specs
    kinds = {"string": "1", "integer": 0}
    arguments = {
        name: part.get("enum", [kinds.get(part["type"])])[0] for name, part in spec.parameters["properties"].items()
    }  # type: ignore[union-attr,index]
    calls = tuple(ToolCall(f"call_{number}", spec.name, arguments) for number in range(40))
    *_, terminated, _, info = env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))
    assert terminated and info["metrics"]["success"] == 0.0


# ---- Countdown


def test_each_number_counts_once_and_an_answer_is_judged_exactly() -> None:
    env = Countdown(level=2)
    env.reset(seed=3)
    env.numbers, env.target = [2, 3, 8, 8], 19
    assert "2 is not there once more" in say(env, "answer", expression="2 + 2 + 3")[0]
    assert "7 is not there." in say(env, "answer", expression="7 + 8")[0]
    assert say(env, "answer", expression="8 + 8 + 3")[1:] == (1.0, True)


def test_an_answer_too_many_ends_the_episode() -> None:
    env = make_env("Countdown-v0")
    env.reset(seed=0)
    answers = [say(env, "answer", expression="1 / 0") for _ in range(3)]
    assert [result[2] for result in answers] == [False, False, True]
    assert "No answers left" in answers[-1][0]


# ---- Mastermind and Wordle


@pytest.mark.parametrize(
    ("guess", "code", "expected"),
    [
        ("1234", "1234", (4, 0)),
        ("1234", "4321", (0, 4)),
        ("1122", "2111", (1, 2)),
        ("11", "22", (0, 0)),
        ("1112", "3331", (0, 1)),
    ],
)
def test_marks_of_a_code(guess: str, code: str, expected: tuple[int, int]) -> None:
    assert marks(guess, code) == expected


def test_marks_count_each_digit_once() -> None:
    for guess, code in itertools.product(map("".join, itertools.product("123", repeat=3)), repeat=2):
        in_place, elsewhere = marks(guess, code)
        assert in_place == sum(a == b for a, b in zip(guess, code, strict=True))
        assert in_place + elsewhere == sum(min(guess.count(digit), code.count(digit)) for digit in "123")


@pytest.mark.parametrize(
    ("guess", "word", "expected"),
    [
        ("crane", "crane", "H H H H H"),
        ("eerie", "there", "E N E N H"),
        ("allow", "label", "E E E N N"),
        ("sassy", "grass", "E E N H N"),
    ],
)
def test_marks_of_a_word(guess: str, word: str, expected: str) -> None:
    short = {"H": "here", "E": "elsewhere", "N": "no"}
    assert letter_marks(guess, word) == [short[mark] for mark in expected.split()]


def test_word_lists_are_words_of_their_length() -> None:
    sizes = [len(word_list(length)) for length in (3, 4, 5)]
    assert min(sizes) > 300
    assert all(word.isascii() and word.islower() and len(word) == 5 for word in word_list(5))


# ---- Sudoku


def rules_hold(grid: list[list[int]]) -> bool:
    size, box = len(grid), math.isqrt(len(grid))
    array = np.array(grid)
    boxes = array.reshape(box, box, box, box).swapaxes(1, 2).reshape(size, size)
    return all(sorted(line) == list(range(1, size + 1)) for part in (array, array.T, boxes) for line in part.tolist())


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_a_sudoku_has_one_solution(level: int) -> None:
    env = Sudoku(level=level)
    for seed in range(8):
        env.reset(seed=seed)
        assert rules_hold(env.solution)
        assert sum(digit == 0 for row in env.given for digit in row) == env.num_empty
        assert all(
            g in (0, s)
            for row, full in zip(env.given, env.solution, strict=True)
            for g, s in zip(row, full, strict=True)
        )
        assert solutions([list(row) for row in env.given]) == 1


def test_solutions_are_counted_as_trying_all_grids_does() -> None:
    grid = [[1, 2, 0, 0], [3, 4, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    rows = list(itertools.permutations(range(1, 5)))
    count = sum(
        rules_hold([list(row) for row in full])
        for full in itertools.product(rows, repeat=4)
        if full[0][:2] == (1, 2) and full[1][:2] == (3, 4)
    )
    assert solutions(grid, limit=1000) == count > 1


def test_a_placement_is_refused_where_it_breaks_a_rule_and_may_be_taken_back() -> None:
    env = Sudoku(level=1)
    env.reset(seed=0)
    env.solution = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]
    env.given = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 0, 0], [4, 3, 0, 1]]
    env.grid = [list(row) for row in env.given]
    assert say(env, "place", row=1, column=1, digit=1)[0].startswith("Row 1, column 1 is given.")
    assert say(env, "place", row=3, column=3, digit=3)[0].startswith("3 is already in that")
    assert say(env, "place", row=3, column=3, digit=4)[0].startswith("Placed.")
    assert "Placements left: 1." in say(env, "place", row=3, column=4, digit=3)[0]
    assert say(env, "place", row=4, column=3, digit=2) == ("The grid is solved.", 1.0, True)


# ---- Sokoban


@pytest.mark.parametrize(("level", "fewest", "most"), [(1, 2, 5), (2, 5, 12), (3, 8, 18)])
def test_a_room_takes_as_many_moves_as_its_level(level: int, fewest: int, most: int) -> None:
    env = Sokoban(level=level)
    for seed in range(10):
        env.reset(seed=seed)
        way = shortest_way(env.room, env.state)
        assert way is not None and fewest <= len(way) <= most
        assert env.left == 2 * len(way) + 4


def test_boxes_are_pushed_and_never_pulled_or_pushed_into_anything() -> None:
    env = Sokoban()
    env.reset(seed=0)
    cells = frozenset((row, column) for row in (1, 2, 3) for column in (1, 2, 3))
    env.room = type(env.room)(3, cells, frozenset({(1, 3), (3, 3)}))
    env.state, env.left = ((2, 1), frozenset({(2, 2), (1, 2)})), 9
    assert env.view().splitlines()[:5] == ["# # # # #", "# . B o #", "# P B . #", "# . . o #", "# # # # #"]
    say(env, "move", direction="right")
    assert env.state == ((2, 2), frozenset({(2, 3), (1, 2)}))
    assert say(env, "move", direction="right")[0].startswith("Something is in the way.")
    say(env, "move", direction="left")
    assert env.state == ((2, 1), frozenset({(2, 3), (1, 2)}))
    assert "Moves left: 6." in env.view()


def test_a_box_in_a_corner_cannot_be_solved() -> None:
    env = Sokoban()
    env.reset(seed=0)
    cells = frozenset((row, column) for row in (1, 2, 3) for column in (1, 2, 3))
    room = type(env.room)(3, cells, frozenset({(2, 2)}))
    assert shortest_way(room, ((2, 2), frozenset({(1, 1)}))) is None
    assert shortest_way(room, ((2, 1), frozenset({(2, 2)}))) == []
