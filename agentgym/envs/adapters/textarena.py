"""`textarena/GAME`: a game of TextArena; the agent has one seat, and a named policy the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from agentgym.envs.adapters.namespaces import needs, unknown_name
from agentgym.envs.adapters.own_randomness import OwnRandomness
from agentgym.envs.base.card import EnvCard, version_of
from agentgym.envs.base.policies import Policy, RandomPolicy
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.loading import Wanted, load_named
from agentgym.types import Message

__all__ = ["TextArena", "names"]

LARGEST_SEED = 2**31
MAX_PLAYERS = 15
DEFAULT_TURNS = 200
"""The turns of the agent after which a game without an end of its own is truncated."""
LISTED = "listed"
LIST = re.compile(r"(?:available|legal|valid) (?:moves|actions|options|targets)[^\n:]*:([^\n]*)", re.IGNORECASE)
MOVE = re.compile(r"\[[^\[\]\n]+\]")
OPPONENT = Wanted(
    noun="opponent",
    example="function",
    hint=f"Or give {LISTED!r}, which plays a random one of the moves that the game lists.",
)
Opponent = Callable[[str], str]
"""A function that plays the other seats: it maps the messages since its last turn to its reply."""


class TextArena(TextEnv):
    """A game of TextArena, from one seat. The reward is what the game gives that seat at its end, from -1 to 1.

    Observations are the game's messages since the last reply, without the reply itself. A game of several players needs
    an `opponent` for the other seats: "listed" plays a random one of the moves that the game lists in brackets, and
    `package.module:function` names a function from what it sees to its reply. Further keywords are the game's own.
    """

    max_turns = DEFAULT_TURNS
    own_split = True  # a seed gives the same task as in the library itself

    def __init__(
        self, render_mode: str | None = None, *, game: str, opponent: str | None = None, seat: int = 0, **settings: Any
    ) -> None:
        super().__init__(render_mode)
        if game not in names():
            raise unknown_name("textarena", game, names())
        self.game = game
        self.seat = seat
        self._settings = settings
        self._randomness = OwnRandomness()
        self._env: Any = None
        self._num_players = self._players_needed()
        if not 0 <= seat < self._num_players:
            raise ConfigError(f"{game} has {self._num_players} players; got seat {seat}")
        if self._num_players > 1 and opponent is None:
            raise ConfigError(
                f"{game} has {self._num_players} players: say who plays the others with opponent='{LISTED}', a random "
                "one of the moves that the game lists, or 'package.module:function', from what it sees to its reply"
            )
        self._opponent_name = opponent
        self._opponent: Opponent | None = None
        self.card = EnvCard(
            task=f"Play TextArena's {game}.",
            reward="What the game gives at its end; some pay for coming near.",
            reward_range=(-1.0, 1.0),
            canary_floor=0.0 if self._num_players == 1 else 1.0,  # any legal move may win against a weak opponent
            data=f"TextArena's {game} under the reset seed",
            licence="MIT",
            version=version_of(game) or 0,
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Begins a game; other players move first if the game has them begin."""
        drawn = int(self.np_random.integers(LARGEST_SEED)) if seed is None else seed
        self._opponent = None if self._opponent_name is None else _opponent(self._opponent_name, drawn)
        self._deal(drawn, self._num_players)
        with self._randomness.again():
            if self._others_play():
                raise EnvironmentFault(f"{self.game} was over before the agent moved")
            return self._new_messages(), {}

    def step(self, action: str) -> StepResult:
        """Plays a reply, and then the others until it is the agent's turn again."""
        with self._randomness.again():
            if not (self._play_reply(str(action)) or self._others_play()):
                return self._new_messages(), 0.0, False, False, {}
            rewards, infos = self._env.close()
        if self.seat not in (rewards or {}):
            raise EnvironmentFault(f"{self.game} ended without a reward for seat {self.seat}: it gave {rewards}")
        reward = float(rewards[self.seat])
        mine = infos.get(self.seat, {})
        texts = [self._new_messages(), str(mine.get("reason") or "")]
        metrics = {"success": float(reward >= 1.0), "invalid_move": float(bool(mine.get("invalid_move")))}
        observation = "\n".join(text for text in texts if text) or "The game is over."
        return observation, reward, True, False, {"metrics": metrics}

    def make_random(self) -> Policy:
        """A policy that takes any of the moves that the game lists, or replies with random words if it lists none."""
        return _AnyListed()

    def _players_needed(self) -> int:
        """Opens the game with the fewest players that it takes; returns their number."""
        refused = ""
        for num_players in range(1, MAX_PLAYERS + 1):
            try:
                self._deal(0, num_players)
                return num_players
            except AssertionError as error:  # TextArena's refusal of a number of players
                refused = str(error)
            except Exception as error:  # the boundary: some games need data, keys or another Python
                raise _unplayable(self.game, error) from error
        raise ConfigError(f"TextArena's {self.game} takes no number of players up to {MAX_PLAYERS}: {refused}")

    def _deal(self, seed: int, num_players: int) -> None:
        """Makes a new game and resets it."""
        import textarena

        with self._randomness.start_stream(seed):
            self._env = textarena.make(self.game, **self._settings)
            self._env.reset(num_players=num_players, seed=seed)

    def _others_play(self) -> bool:
        """Plays the other seats until it is the agent's turn; returns True if the game is over."""
        while True:
            player, messages = self._core.get_observation()
            if player == self.seat:
                self._waiting = messages
                return False
            assert self._opponent is not None  # a game of several players has one
            if self._play_reply(self._opponent(self._as_text(messages, player))):
                return True

    def _play_reply(self, reply: str) -> bool:
        """Plays the reply of the player to move; returns True if the game is over."""
        done = bool(self._env.step(reply)[0])
        if done:
            self._waiting = self._core.state.observations[self.seat]
        return done

    def _new_messages(self) -> str:
        """The messages to the agent's seat since its last reply."""
        return self._as_text(self._waiting, self.seat)

    @property
    def _core(self) -> Any:
        """The game below the wrappers, which would repeat the whole history in every observation."""
        import textarena

        env = self._env
        while isinstance(env, textarena.Wrapper):
            env = env.env
        return env

    def _as_text(self, messages: list[tuple[int, str, Any]], seat: int) -> str:
        names = self._core.state.role_mapping
        lines = []
        for sender, text, _ in messages:
            if sender != seat:
                lines.append(text if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {text}")
        return "\n".join(lines)


def names() -> list[str]:
    """The games that are registered with TextArena."""
    try:
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise needs("textarena", "textarena", error) from error
    return sorted(ENV_REGISTRY)


def listed_moves(text: str) -> list[str]:
    """The moves that a game listed last.

    >>> listed_moves("Available Moves: '[0]', '[2]'")
    ['[0]', '[2]']
    """
    lists = LIST.findall(text)
    return MOVE.findall(lists[-1]) if lists else []


def _unplayable(game: str, error: Exception) -> ConfigError:
    if isinstance(error, LookupError) and "NLTK" in str(error):
        return ConfigError(
            f"TextArena's {game} needs data of NLTK that are not here, and cannot be downloaded by it: run `python -m "
            "nltk.downloader words averaged_perceptron_tagger_eng wordnet` where there is a network, and set NLTK_DATA"
        )
    first_line = next((line for line in str(error).strip().splitlines() if line.strip()), "")
    return ConfigError(f"TextArena's {game} cannot be made here: {type(error).__name__}: {first_line}")


def _opponent(name: str, seed: int) -> Opponent:
    if name == LISTED:
        return _Listed(seed)
    opponent = load_named(name, OPPONENT)
    if not callable(opponent):
        raise ConfigError(f"the opponent {name!r} is a {type(opponent).__name__}, not a function from text to text")
    return opponent


class _Listed:
    """Plays a random one of the moves that the game lists."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, observation: str) -> str:
        moves = listed_moves(observation)
        if not moves:
            raise EnvironmentFault(
                f"the opponent {LISTED!r} found no list of moves in {observation[-200:]!r}; this game needs an "
                "opponent of its own, 'package.module:function'"
            )
        return str(self._rng.choice(moves))


class _AnyListed(RandomPolicy):
    """Takes any listed move, without knowledge of the game."""

    def act(self, observation: str) -> Message:
        """One move."""
        moves = listed_moves(observation)
        return Message("assistant", self._pick(moves)) if moves else super().act(observation)
