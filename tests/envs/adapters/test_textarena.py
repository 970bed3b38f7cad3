"""TextArena's games, from one seat."""

from __future__ import annotations

import random

import gymnasium
import pytest

from agentgym.envs import make_env
from agentgym.errors import ConfigError, EnvironmentFault, UnknownName
from agentgym.testing import check_env, examine_env

pytestmark = pytest.mark.adapter
GUESS = "textarena/GuessTheNumber-v0"


def test_a_game_is_played_to_its_end_and_the_reward_is_its_own() -> None:
    env = gymnasium.make(GUESS)
    for seed in range(6):
        observation, _ = env.reset(seed=seed)
        assert observation.startswith("You are Player 0. You are playing Guess The Number.")
        low, high, terminated, reward = 1, 20, False, 0.0
        while not terminated:
            guess = (low + high) // 2
            observation, reward, terminated, _, info = env.step(f"I say [{guess}]")
            low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
            assert "I say" not in observation  # the model's own words are in the conversation already
        assert (reward, info["metrics"]["success"]) == (1.0, 1.0)


def test_the_seed_is_the_game_s_own() -> None:
    import textarena

    before = random.getstate()
    theirs = textarena.make("Mastermind-v0-raw")
    for seed in (0, 7):
        theirs.reset(num_players=1, seed=seed)
        random.seed(1)
        ours = make_env("textarena/Mastermind-v0")
        ours.reset(seed=seed)
        code = theirs.state.game_state["secret_code"]
        answer = ours.step(f"[{' '.join(map(str, code))}]")
        assert answer[1:3] == (1.0, True)
    random.setstate(before)


def test_the_end_tells_why_and_a_wrong_move_is_counted() -> None:
    env = make_env(GUESS)
    env.reset(seed=0)
    assert "invalid move" in env.step("no number")[0]
    observation, reward, terminated, _, info = env.step("no number")
    assert terminated and reward == 0.0
    assert observation.endswith("Player 0 did not respond with valid '[number]'.")
    assert info["metrics"] == {"success": 0.0, "invalid_move": 1.0}


def test_a_game_of_two_needs_an_opponent_and_is_played_against_it() -> None:
    with pytest.raises(ConfigError, match="has 2 players: say who plays the others with opponent='listed'"):
        make_env("textarena/TicTacToe-v0")
    rewards = set()
    for seat in (0, 1):
        env = make_env("textarena/TicTacToe-v0", {"opponent": "listed", "seat": seat})
        for seed in range(8):
            observation, _ = env.reset(seed=seed)
            assert ("[Player 0]" in observation) == (seat == 1)
            terminated = False
            while not terminated:
                free = observation.rpartition("Available Moves: ")[2].partition("\n")[0].split(", ")
                observation, reward, terminated, *_ = env.step(free[0])
            rewards.add(reward)
    assert {-1.0, 1.0} <= rewards


def test_a_random_player_takes_listed_moves_or_random_words() -> None:
    env, rewards = make_env("textarena/TicTacToe-v0", {"opponent": "listed"}), set()
    player = env.unwrapped.make_random()
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        player.reset(env.unwrapped, observation, seed)
        over, reward, info = False, 0.0, {}
        while not over:
            observation, reward, over, _, info = env.step(player.act(observation).content)
        assert info["metrics"]["invalid_move"] == 0.0
        rewards.add(reward)
    assert rewards >= {-1.0, 1.0}
    guess = make_env(GUESS)
    observation, _ = guess.reset(seed=0)
    player.reset(guess.unwrapped, observation, 0)
    assert player.act(observation).content in observation


def test_a_fault_in_dealing_changes_no_number_of_players(monkeypatch: pytest.MonkeyPatch) -> None:
    from textarena.envs.Blackjack.env import BlackjackEnv

    env = make_env("textarena/Blackjack-v0")

    def reset(game: object, num_players: int, seed: int | None = None) -> None:
        assert num_players == 2, "a bug"

    monkeypatch.setattr(BlackjackEnv, "reset", reset)
    with pytest.raises(AssertionError, match="a bug"):
        env.reset(seed=0)


@pytest.mark.parametrize("rewards", [None, {}, {1: 1.0}])
def test_a_game_that_ends_without_a_reward_has_failed(rewards: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import textarena

    env = make_env(GUESS)
    env.reset(seed=0)
    env.step("no number")
    monkeypatch.setattr(textarena.Env, "close", lambda game: (rewards, {}))
    with pytest.raises(EnvironmentFault, match="ended without a reward for seat 0"):
        env.step("no number")


def test_an_opponent_of_one_s_own_is_a_function() -> None:
    env = make_env("textarena/TicTacToe-v0", {"opponent": "operator:length_hint", "seat": 0})
    env.reset(seed=0)
    with pytest.raises(TypeError):  # what it raises is its own fault
        env.step("[4]")
    with pytest.raises(EnvironmentFault, match="found no list of moves"):
        make_env("textarena/ConnectFour-v0", {"opponent": "listed", "seat": 1}).reset(seed=0)


@pytest.mark.parametrize(
    ("game", "words"),
    [
        ("Debate-v0", "cannot be made here: ValueError: OpenRouter API key"),
        ("ScorableGames-v0", "cannot be made here: FileNotFoundError"),
    ],
)
def test_a_game_that_cannot_be_made_names_what_it_lacks(game: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=words):
        make_env(f"textarena/{game}")
    with pytest.raises(UnknownName, match="did you mean 'GuessTheNumber-v0'"):
        make_env("textarena/GuesTheNumber-v0")


def test_a_game_without_its_word_lists_explains_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    with pytest.raises(ConfigError, match=r"python -m nltk\.downloader words"):
        make_env("textarena/Hangman-v0")


def test_env_check_tells_of_a_reward_for_coming_near() -> None:
    verdicts = {verdict.check: verdict.verdict for verdict in examine_env(GUESS)}
    # "ignored seed": the first text is the same for all, and random words are no guess that would tell seeds apart
    assert {name for name, verdict in verdicts.items() if verdict == "failed"} == {"canaries", "ignored seed"}
    assert verdicts["side by side"] == verdicts["another process"] == verdicts["global random state"] == "passed"


def test_env_check_finds_nothing_in_a_game_of_two() -> None:
    assert check_env("textarena/TicTacToe-v0", {"opponent": "listed"}) == []
