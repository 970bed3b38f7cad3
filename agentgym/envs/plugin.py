"""Registers the bundled environments with Gymnasium; Gymnasium calls it by itself when it is imported."""

from __future__ import annotations

import gymnasium

__all__ = ["BUNDLED", "register_envs"]

BUNDLED = {
    "TextGame-v0": "agentgym.envs.text_game:TextGame",
    "GuessNumber-v0": "agentgym.envs.guess_number:GuessNumber",
    "WordLadder-v0": "agentgym.envs.word_ladder:WordLadder",
}
"""Environment id to where its class is; an id's version changes when its tasks or rewards do."""


def register_envs() -> None:
    """Makes `gymnasium.make("TextGame-v0")` work; nothing is loaded until then, and a second call does nothing."""
    for env_id, entry_point in BUNDLED.items():
        if env_id not in gymnasium.envs.registration.registry:
            gymnasium.envs.registration.register(id=env_id, entry_point=entry_point)
