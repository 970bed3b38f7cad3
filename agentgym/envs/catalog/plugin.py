"""Registers the bundled environments with Gymnasium, and loads none of them.

Its callers: the start-up hook (`startup/`, installed next to the package) right after Gymnasium was imported; `import
agentgym` if Gymnasium was imported first; `resolve_env`, for names given to a command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["BUNDLED", "register_envs"]

BUNDLED = {
    "TextGame-v0": "agentgym.envs.games.text_game.env:TextGame",
    "GuessNumber-v0": "agentgym.envs.games.guess_number:GuessNumber",
    "WordLadder-v0": "agentgym.envs.games.word_ladder:WordLadder",
    "Prompt-v0": "agentgym.envs.tasks.prompt:Prompt",
    "ToolPrompt-v0": "agentgym.envs.tasks.tool_prompt:ToolPrompt",
    "LongRoad-v0": "agentgym.envs.games.long_road:LongRoad",
    "Terminal-v0": "agentgym.envs.tasks.terminal.env:Terminal",
    "Countdown-v0": "agentgym.envs.games.countdown:Countdown",
    "Negotiation-v0": "agentgym.envs.games.negotiation:Negotiation",
    "TicTacToe-v0": "agentgym.envs.games.tic_tac_toe:TicTacToe",
    "Mastermind-v0": "agentgym.envs.games.mastermind:Mastermind",
    "Sokoban-v0": "agentgym.envs.games.sokoban:Sokoban",
    "Sudoku-v0": "agentgym.envs.games.sudoku:Sudoku",
    "Wordle-v0": "agentgym.envs.games.wordle:Wordle",
    "GSM8K-v0": "agentgym.envs.tasks.math.gsm8k:GSM8K",
    "SearchQA-v0": "agentgym.envs.tasks.search.env:SearchQA",
    "CodeTasks-v0": "agentgym.envs.tasks.code.env:CodeTasks",
    "Retail-v0": "agentgym.envs.tasks.retail.env:Retail",
    "Math-v0": "agentgym.envs.tasks.math.env:Math",
}
"""Maps an environment id to the path of its class; an id's version changes when its tasks or rewards do."""


def register_envs() -> None:
    """Makes `gymnasium.make("TextGame-v0")` work, and `make("textarena/Wordle-v0")`; a second call does nothing."""
    # Not at the top: importing Gymnasium is what makes the hook import this module. The package comes before its
    # submodule: a thread that begins with a submodule breaks the import of the package in another thread.
    import gymnasium
    from gymnasium.envs import registration

    for env_id, entry_point in BUNDLED.items():
        if env_id not in registration.registry:
            gymnasium.register(id=env_id, entry_point=entry_point)
    # Gymnasium has no hook for ids that are made on demand: `make` and `make_vec` look ids up here.
    if not hasattr(registration._find_spec, "finds_more"):
        registration._find_spec = _find_more(registration._find_spec)  # type: ignore[assignment]


def _find_more(find: Callable[[str], Any]) -> Callable[[str], Any]:
    """Gymnasium's look-up of an id, which asks the adapters first for one with a slash, and other packages last."""

    @functools.wraps(find)
    def find_spec(env_id: str) -> Any:
        if "/" in env_id:
            from agentgym.envs.adapters.namespaces import spec_of

            spec = spec_of(env_id)
            if spec is not None:
                return spec
        from gymnasium.envs.registration import registry

        if ":" not in env_id and env_id not in registry:
            from agentgym.envs.catalog.packages import load_packages

            load_packages()
        return find(env_id)

    find_spec.finds_more = True  # type: ignore[attr-defined]
    return find_spec
