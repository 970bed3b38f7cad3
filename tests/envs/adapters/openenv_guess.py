"""A server of the real OpenEnv, run by an interpreter that has it: `openenv_guess.py PORT`."""

import random
import sys

import uvicorn
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    """A guess, in words."""

    message: str


class GuessObservation(Observation):
    """What is said to it."""

    text: str = ""


class Guess(Environment):
    """A number from 1 to 3 is found in two guesses, or not."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed=None, episode_id=None, **settings):
        """Draws the number."""
        self._number = random.Random(seed).randint(1, 3)
        self._state = State(episode_id=episode_id, step_count=0)
        return GuessObservation(text="Guess a number from 1 to 3.")

    def step(self, action, timeout_s=None, **settings):
        """Judges a guess."""
        self._state.step_count += 1
        right = action.message.strip() == str(self._number)
        done = right or self._state.step_count >= 2
        return GuessObservation(text="Yes." if right else "No.", done=done, reward=float(right))

    @property
    def state(self):
        """Which episode it is, and how far."""
        return self._state


if __name__ == "__main__":
    app = create_app(Guess, GuessAction, GuessObservation, env_name="guess", max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
