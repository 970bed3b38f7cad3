"""Episodes as the rows of a table: one for each, with its messages and, by training row, its tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from agentgym.openai_wire import message_to_openai
from agentgym.rewards.reply import conversation
from agentgym.rollout.record.episodes_file import EpisodeRecord
from agentgym.rollout.record.json_pieces import encode_json
from agentgym.types import JSON

__all__ = ["COLUMNS", "table_row"]

_CALL: JSON = {"id": "string", "type": "string", "function": {"name": "string", "arguments": "string"}}
_MESSAGE: JSON = {
    "role": "string",
    "content": "string",
    "reasoning_content": "string",
    "tool_calls": [_CALL],
    "tool_call_id": "string",
}
COLUMNS: Mapping[str, JSON] = {
    "phase": "string",
    "step": "int64",
    "group": "string",
    "member": "int64",
    "env_id": "string",
    "seed": "int64",
    "options": "string",
    "status": "string",
    "stop_reason": "string",
    "error": "string",
    "reward": "double",
    "success": "bool",
    "turn_rewards": ["double"],
    "metrics": "string",
    "num_turns": "int64",
    "num_tokens": "int64",
    "num_trained_tokens": "int64",
    "messages": [_MESSAGE],
    "ids": [["int32"]],
    "mask": [["bool"]],
    "logprobs": [["float"]],
    "advantages": [["float"]],
}
"""The type of each column: Arrow's name, a list of a type, or fields by name. `options` and `metrics` are JSON text."""


def table_row(record: EpisodeRecord) -> dict[str, object]:
    """Returns the row of an episode.

    Raises ValueError for numbers that fit in no column.

    The last four columns have a list for each training row. Logprobs and advantages are 0 at ids that were not sampled.
    """
    episode = record.trajectory
    counted = {} if episode.rows else episode.metrics
    if abs(episode.task.seed) >= 2**63:
        raise ValueError("its seed has more than 63 bits")
    num_read, num_replied = (int(counted.get(f"{name}_tokens", 0)) for name in ("prompt", "completion"))
    return {
        "phase": _spelled_out(record.phase),
        "step": record.step,
        "group": _spelled_out(episode.group),
        "member": episode.member,
        "env_id": _spelled_out(episode.task.env_id),
        "seed": episode.task.seed,
        "options": encode_json(dict(episode.task.options)),
        "status": str(episode.status),
        "stop_reason": str(episode.stop_reason),
        "error": _spelled_out(episode.error),
        "reward": episode.reward,
        "success": episode.success,
        "turn_rewards": [turn.reward for turn in episode.turns],
        "metrics": encode_json(dict(episode.metrics)),
        "num_turns": len(episode.turns),
        "num_tokens": episode.num_tokens + num_read + num_replied,
        "num_trained_tokens": episode.num_trained_tokens + num_replied,
        "messages": _spelled_out([message_to_openai(message) for message in conversation(episode)]),
        "ids": [row.ids for row in episode.rows],
        "mask": [row.mask for row in episode.rows],
        "logprobs": [row.logprobs for row in episode.rows],
        "advantages": None if record.advantages is None else _advantages(record),
    }


def _spelled_out(value: JSON) -> JSON:
    """Returns text, or a value with texts in it, with lone surrogates written out: UTF-8 has none."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {name: _spelled_out(item) for name, item in value.items()}
    return [_spelled_out(item) for item in value] if isinstance(value, list | tuple) else value


def _advantages(record: EpisodeRecord) -> list[NDArray[np.float32]]:
    """Returns the advantages at each row's ids."""
    spreads = []
    for row, values in zip(record.trajectory.rows, record.advantages or (), strict=True):
        spread = np.zeros(len(row), np.float32)
        spread[row.sampled_mask] = values
        spreads.append(spread)
    return spreads
