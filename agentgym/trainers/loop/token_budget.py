"""The token budgets that follow from a run's model and environments."""

from __future__ import annotations

from dataclasses import replace

from agentgym.chat_templates.template_folder import chat_folder
from agentgym.envs.catalog.resolve import turn_limit
from agentgym.model.decoder_config import folder_window
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.run_tasks import played_choices
from agentgym.trainers.resolve import resolve_config

__all__ = ["with_token_budget"]


def with_token_budget(config: TrainConfig, *, is_resumed: bool = False) -> TrainConfig:
    """Returns the resolved configuration with `limits.turn_tokens`, and `norm_tokens` if the aggregation divides by it.

    In a mix, the environment that allows the longest replies decides. Raises RunFolderError for a folder without a
    model, and what `make_env` raises for an environment that does not exist.
    """
    config = resolve_config(config, is_resumed=is_resumed)
    limits = config.limits
    needs_norm = config.aggregation == "seq-mean-token-sum-norm" and config.norm_tokens is None
    if limits.turn_tokens is not None and not needs_norm:
        return config
    window = _window(config)
    turns = [turn_limit(choice.env, kwargs) for choice in played_choices(config) for kwargs in choice.variants]
    if not turns:
        return config
    turn_tokens = max(limits.turn_tokens_in(window, num_turns) for num_turns in turns)
    config = replace(config, limits=replace(limits, turn_tokens=turn_tokens))
    most_turns = min(limits.max_turns, max(limits.max_turns if limit is None else limit for limit in turns))
    bounds = (most_turns * turn_tokens, window, limits.context_window, limits.trajectory_tokens)
    return replace(config, norm_tokens=min(size for size in bounds if size is not None)) if needs_norm else config


def _window(config: TrainConfig) -> int:
    return folder_window(chat_folder(config.model, config.chat_template))
