"""verl's reward managers, `(data, return_dict=False)`, called once for the episodes of a step.

`VerlData` has the fields of verl's `DataProto` that such a manager reads; verl itself is not needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentgym.openai_wire import message_to_openai
from agentgym.rewards.reply import opening
from agentgym.rewards.reward import InvalidReward, Reward, RewardFailure, reward_of_score
from agentgym.trajectory import Source, Trajectory

__all__ = ["VerlData", "call_verl_data"]

PAD = 0
"""The id before prompts and after responses, where the attention mask is 0."""


@dataclass(frozen=True, slots=True)
class VerlData:
    """The episodes of a step, or one of them, as verl's `DataProto`: `data[i]`, `len(data)` and iteration work.

    `batch` holds tensors: prompts, padded on the left, responses (replies and the answers to them), padded on the
    right, attention_mask, input_ids and position_ids over both, and response_mask, 1 at trained ids.
    """

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, Any]
    """data_source, reward_model (with ground_truth), extra_info, uid (the group), raw_prompt, __num_turns__."""
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.batch["prompts"])

    def __getitem__(self, index: Any) -> VerlData:
        batch = {name: tensor[index] for name, tensor in self.batch.items()}
        others = {name: column[index] for name, column in self.non_tensor_batch.items()}
        return VerlData(batch, others, self.meta_info)

    def __iter__(self) -> Iterator[VerlData]:
        return (self[index] for index in range(len(self)))

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> VerlData:
        """Returns the data of episodes, the last row of each; raises InvalidReward for one without token ids."""
        if any(not trajectory.rows for trajectory in trajectories):
            raise InvalidReward("verl's (data) holds token ids, and an episode has none: its chat endpoint gives none")
        rows = [trajectory.rows[-1] for trajectory in trajectories]
        starts = [len(row.spans[0].ids) for row in rows]
        width = max(starts)
        length = max(len(row) - start for row, start in zip(rows, starts, strict=True))
        ids_BT = torch.full((len(rows), width + length), PAD)
        attention_BT, trained_BT = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT)
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            span = slice(width - start, width - start + len(row))
            ids_BT[index, span] = torch.from_numpy(row.ids)
            attention_BT[index, span] = 1
            trained_BT[index, span] = torch.from_numpy(row.mask).long()
        batch = {
            "prompts": ids_BT[:, :width],
            "responses": ids_BT[:, width:],
            "input_ids": ids_BT,
            "attention_mask": attention_BT,
            "position_ids": (attention_BT.cumsum(1) - 1).clamp(min=0),
            "response_mask": trained_BT[:, width:],
        }
        columns: dict[str, list[Any]] = {}
        for trajectory in trajectories:
            for name, value in _columns(trajectory).items():
                columns.setdefault(name, []).append(value)
        return cls(batch, {name: _as_objects(values) for name, values in columns.items()})


def call_verl_data(name: str, function: Callable[..., object], trajectories: Sequence[Trajectory]) -> list[object]:
    """Returns a Reward or a RewardFailure per episode; raises InvalidReward for a result of another form.

    Each token's reward is its turn's, in an episode of one row.
    """
    takes_flag = "return_dict" in inspect.signature(function).parameters
    result = function(VerlData.of(trajectories), **({"return_dict": True} if takes_flag else {}))
    extra: Mapping[str, Sequence[object]] = {}
    if isinstance(result, Mapping):
        extra, result = result.get("reward_extra_info") or {}, result.get("reward_tensor")
    if not isinstance(result, Tensor) or result.ndim != 2 or len(result) != len(trajectories):
        raise InvalidReward(
            f"reward {name!r} gives a tensor of a reward for each token of the responses, or a dict with it as"
            f" reward_tensor; got {getattr(result, 'shape', result)!r:.80}"
        )
    rewards_BT = result.detach().to("cpu", torch.float64)
    if wrong := [column for column, values in extra.items() if len(values) != len(trajectories)]:
        raise InvalidReward(f"reward_extra_info {wrong[0]!r} of reward {name!r} has not one value for each episode")
    return [
        _reward(trajectory, rewards_T.tolist(), {column: values[index] for column, values in extra.items()})
        for index, (trajectory, rewards_T) in enumerate(zip(trajectories, rewards_BT, strict=True))
    ]


def _reward(
    trajectory: Trajectory, rewards_T: Sequence[float], extra: Mapping[object, object]
) -> Reward | RewardFailure:
    turns = None
    if len(trajectory.rows) == 1:
        turns, start = [0.0] * len(trajectory.turns), 0
        turn = -1
        for span in trajectory.rows[0].spans[1:]:
            turn += span.source is Source.POLICY
            turns[max(turn, 0)] += sum(rewards_T[start : start + len(span.ids)])
            start += len(span.ids)
        turns[-1] += sum(rewards_T[start:])
    try:
        return reward_of_score(sum(rewards_T if turns is None else turns), extra, turns)
    except InvalidReward as error:
        return RewardFailure.of(error)


def _columns(trajectory: Trajectory) -> dict[str, Any]:
    options = trajectory.task.options
    extra = options.get("extra_info")
    return {
        "data_source": options.get("data_source", trajectory.task.env_id),
        "reward_model": {"style": "rule", "ground_truth": options.get("ground_truth")},
        "extra_info": dict(extra) if isinstance(extra, Mapping) else {},
        "uid": trajectory.group,
        "raw_prompt": list(map(message_to_openai, opening(trajectory))),
        "__num_turns__": len(trajectory.turns),
    }


def _as_objects(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.object_]]:
    """Returns an array of objects, lists among them not read as further axes."""
    column = np.empty(len(values), object)
    column[:] = values
    return column
