"""Registers the bundled environments with Gymnasium, and loads none of them.

Who calls it: the start-up hook (`startup/`, installed beside the package) right after Gymnasium was imported; `import
agentgym` where Gymnasium was there first; `resolve_env`, for names given to a command.
"""

from __future__ import annotations

__all__ = ["BUNDLED", "register_envs"]

BUNDLED = {
    "TextGame-v0": "agentgym.envs.text_game:TextGame",
    "GuessNumber-v0": "agentgym.envs.guess_number:GuessNumber",
    "WordLadder-v0": "agentgym.envs.word_ladder:WordLadder",
    "Prompt-v0": "agentgym.envs.prompt:Prompt",
    "LongRoad-v0": "agentgym.envs.long_road:LongRoad",
    "Countdown-v0": "agentgym.envs.countdown:Countdown",
    "Mastermind-v0": "agentgym.envs.mastermind:Mastermind",
    "Sokoban-v0": "agentgym.envs.sokoban:Sokoban",
    "Sudoku-v0": "agentgym.envs.sudoku:Sudoku",
    "Wordle-v0": "agentgym.envs.wordle:Wordle",
    "GSM8K-v0": "agentgym.envs.gsm8k:GSM8K",
    "CodeTasks-v0": "agentgym.envs.code_tasks:CodeTasks",
}
"""Environment id to where its class is; an id's version changes when its tasks or rewards do."""


def register_envs() -> None:
    """Makes `gymnasium.make("TextGame-v0")` work; a second call does nothing."""
    # Not at the top: importing Gymnasium is what makes the hook import this module. And the package before its part:
    # a thread that begins with a part breaks the import of the whole in another thread.
    import gymnasium
    from gymnasium.envs.registration import registry

    for env_id, entry_point in BUNDLED.items():
        if env_id not in registry:
            gymnasium.register(id=env_id, entry_point=entry_point)
