"""A reward manager of verl is called with the fields of its `DataProto`, and its tensor is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.rewards import RewardConfig, open_rewards
from agentgym.rewards.reward import InvalidReward
from agentgym.rewards.verl_data import VerlData, call_verl_data
from agentgym.trajectory import Row, Source, Status, TokenSpan, Trajectory, Turn
from agentgym.types import Message

Make = Callable[..., Trajectory]
TRUTH = "7 7"


class Tokenizer:
    """Writes the ids themselves."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids.tolist()))


class Manager:
    """Reads what verl's naive manager reads, in the way in which it does."""

    def __init__(self, tokenizer: Tokenizer, reward_fn_key: str = "data_source") -> None:
        self.tokenizer = tokenizer
        self.key = reward_fn_key
        self.seen: list[tuple[str, str, str, Any]] = []

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        assert "rm_scores" not in data.batch.keys()  # noqa: SIM118 - as a manager asks
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra: dict[str, list[Any]] = {"acc": [], "pred": []}
        for index in range(len(data)):
            item = data[index]
            length = item.batch["prompts"].shape[-1]
            num_prompt = item.batch["attention_mask"][:length].sum()
            num_response = item.batch["attention_mask"][length:].sum()
            prompt = self.tokenizer.decode(item.batch["prompts"][-num_prompt:])
            response = self.tokenizer.decode(item.batch["responses"][:num_response])
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            info = item.non_tensor_batch.get("extra_info", {})
            info["num_turns"] = item.non_tensor_batch.get("__num_turns__")
            self.seen.append((prompt, response, item.non_tensor_batch[self.key], info))
            right = response == truth
            rewards[index, num_response - 1] = float(right)
            extra["acc"].append(right)
            extra["pred"].append(response)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards


def score(manager: Any, played: list[Trajectory]) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        async with open_rewards(RewardConfig(), manager) as rewards:
            assert rewards.together
            return await rewards.score(played)

    return asyncio.run(main())


def test_a_reward_manager_scores_a_step(episode: Make) -> None:
    options = {"data_source": "openai/gsm8k", "extra_info": {"index": 5}}
    played = [episode("a", truth=TRUTH, options=options), episode("c", turn_tokens=3, truth=TRUTH, member=1)]
    manager = Manager(Tokenizer())
    right, wrong = score(manager, played)
    assert manager.seen == [
        ("1 2 3", "7 7", "openai/gsm8k", {"index": 5, "num_turns": 1}),
        ("1 2 3", "7 7 7", "Ask-v0", {"num_turns": 1}),
    ]
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.metrics["reward/acc"] == 1.0 and wrong.metrics["reward/acc"] == 0.0
    assert wrong.info["reward"] == {"pred": "7 7 7"}
    assert played[0].task.options["extra_info"] == {"index": 5}


def test_the_function_compute_reward_may_give_a_tensor(episode: Make, tmp_path: Path) -> None:
    path = tmp_path / "verl_reward.py"
    path.write_text(
        "import torch\n\n\ndef compute_reward(data):\n"
        '    mask = data.batch["attention_mask"][:, data.batch["prompts"].shape[1]:]\n'
        "    return mask.float() * 0.5\n"
    )

    async def main() -> list[Trajectory]:
        async with open_rewards(RewardConfig(function=f"{path}:compute_reward")) as rewards:
            return await rewards.score([episode("a", replies=["b"]), episode("c", turn_tokens=1)])

    both, short = asyncio.run(main())
    assert [turn.reward for turn in both.turns] == [1.0, 1.0]
    assert short.reward == 0.5


def test_the_reward_of_a_token_is_its_turns(episode: Make) -> None:
    sampled = TokenSpan((7, 7), Source.POLICY, (-0.5,) * 2, (0,) * 2)
    row = Row((TokenSpan((1,), Source.PROMPT), sampled, TokenSpan((4, 4, 4), Source.ENV), sampled))
    turns = (Turn(Message("assistant", "a"), 0.0, "on"), Turn(Message("assistant", "b"), 0.0))
    played = replace(episode("a"), rows=(row,), turns=turns)
    (reward,) = call_verl_data("f", lambda data: torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]]), [played])
    assert reward.turns == (1 + 2 + 4 + 8 + 16, 32 + 64)
    data = VerlData.of([played, episode("c")])
    assert data.batch["response_mask"].tolist() == [[1, 1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert data.batch["prompts"].tolist() == [[0, 0, 1], [1, 2, 3]]
    assert data.batch["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert [item.non_tensor_batch["uid"] for item in data] == ["0/0", "0/0"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (1.0, "gives a tensor of a reward for each token"),
        (torch.zeros(1), "gives a tensor of a reward for each token"),
        ({"reward": 1.0}, "gives a tensor of a reward for each token"),
        ({"reward_tensor": torch.zeros(1, 2), "reward_extra_info": {"acc": []}}, "'acc' .* one value for each episode"),
    ],
)
def test_what_is_no_reward_tensor_fails(result: object, message: str, episode: Make) -> None:
    with pytest.raises(InvalidReward, match=message):
        call_verl_data("f", lambda data: result, [episode("a")])


def test_a_number_that_is_no_reward_fails_its_episode_alone(episode: Make) -> None:
    def manager(data: Any, return_dict: bool = False) -> Any:
        rewards = torch.tensor([[0.0, float("nan")], [0.0, 1.0], [0.0, 1.0]])
        return {"reward_tensor": rewards, "reward_extra_info": {"acc": [True, False, None], "len": [1, 10**400, 3]}}

    scored = score(manager, [episode(text, member=number) for number, text in enumerate("abc")])
    assert [trajectory.reward for trajectory in scored] == [None, None, 1.0]
    assert "the score is a finite number" in str(scored[0].error)
    assert "'len' is a finite number" in str(scored[1].error)
    assert scored[2].metrics["reward/len"] == 3.0 and scored[2].info["reward"] == {"acc": None}


@pytest.mark.parametrize("verdict", [False, np.bool_(False)])
def test_the_acc_of_a_manager_is_the_verdict(verdict: object, episode: Make) -> None:
    def manager(data: Any, return_dict: bool = False) -> Any:
        return {"reward_tensor": torch.tensor([[0.0, 0.1]]), "reward_extra_info": {"acc": [verdict]}}

    (scored,) = score(manager, [episode("a")])
    assert (scored.reward, scored.success) == (pytest.approx(0.1), False)


def test_an_episode_without_ids_cannot_be_scored_so(episode: Make) -> None:
    (scored,) = score(Manager(Tokenizer()), [replace(episode("a"), rows=())])
    assert scored.status is Status.ENV_ERROR and "holds token ids" in str(scored.error)
