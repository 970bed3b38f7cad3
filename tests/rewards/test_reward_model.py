"""A tiny sequence classifier, saved to disk, gives the rewards that transformers itself computes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from agentgym.errors import ConfigError, EngineError, RunFolderError
from agentgym.rewards import RewardConfig, open_rewards
from agentgym.rewards.learned import RewardModelConfig
from agentgym.rewards.reward_model import RewardModel
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import MalformedCall, Message, Task, ToolCall

MESSAGES = (Message("system", "Be right."), Message("user", "Six times seven?"), Message("assistant", "42"))


def make_model(folder: Path, tokenizer_folder: Path, num_labels: int = 1) -> Path:
    shutil.copytree(tokenizer_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|im_end|>"})
    )
    torch.manual_seed(num_labels)
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 257}
    model = transformers.Qwen2ForSequenceClassification(
        transformers.Qwen2Config(**sizes, **heads, num_labels=num_labels)
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return make_model(tmp_path_factory.mktemp("reward") / "one", tokenizer_folder)


def expected(folder: Path, messages: tuple[Message, ...], label: int = 0) -> float:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(dicts, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, label])


def test_the_score_is_the_models_output(folder: Path) -> None:
    model = RewardModel(folder)
    wrong = (*MESSAGES[:2], Message("assistant", "41"))
    assert model.score(MESSAGES) == pytest.approx(expected(folder, MESSAGES), abs=1e-6)
    assert model.score(wrong) == pytest.approx(expected(folder, wrong), abs=1e-6)
    assert model.score(MESSAGES) != model.score(wrong)


def test_calls_are_shown(folder: Path) -> None:
    model = RewardModel(folder)
    calls = [
        (ToolCall("c", "look", {"at": "map"}),),
        (ToolCall("c", "look", {"at": "sky"}),),
        (MalformedCall("c", "{", "no"),),
    ]
    scores = {model.score((*MESSAGES[:2], Message("assistant", "", tool_calls=turn_calls))) for turn_calls in calls}
    assert len(scores) == 3


def test_a_conversation_that_is_too_long_is_not_cut(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"tokens, and the reward model takes 8"):
        RewardModel(folder, max_tokens=8).score(MESSAGES)


def test_a_model_of_several_outputs_needs_a_label(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = make_model(tmp_path / "three", tokenizer_folder, num_labels=3)
    for label in (None, 3):
        with pytest.raises(ConfigError, match=f"3 outputs, got label={label}"):
            RewardModel(folder, label=label)
    assert RewardModel(folder, label=2).score(MESSAGES) == pytest.approx(expected(folder, MESSAGES, 2), abs=1e-6)


def test_what_is_no_reward_model_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(RunFolderError, match="no reward model in"):
        RewardModel(tmp_path / "none")
    causal = shutil.copytree(folder, tmp_path / "causal")
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.Qwen2ForCausalLM(config).save_pretrained(causal)
    with pytest.raises(RunFolderError, match=r"not a trained classifier: it lacks 'score\.weight'"):
        RewardModel(causal)
    silent = shutil.copytree(folder, tmp_path / "silent")
    settings = json.loads((silent / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (silent / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="no chat template"):
        RewardModel(silent)


def played(answer: str) -> Trajectory:
    row = Row((TokenSpan((1,), Source.PROMPT), TokenSpan((2,), Source.POLICY, (-1.0,), (0,))), MESSAGES[:2])
    turns = (Turn(Message("assistant", answer), 0.0, observation="Thank you."),)
    return Trajectory(Task("Ask-v0", 0), "0", 0, (row,), turns, Status.COMPLETED, StopReason.TERMINATED)


def test_it_gives_the_rewards_of_episodes(folder: Path) -> None:
    def score(max_tokens: int) -> Any:
        async def main() -> list[Trajectory]:
            config = RewardConfig(model=RewardModelConfig(folder=str(folder), max_tokens=max_tokens))
            async with open_rewards(config) as rewards:
                return await rewards.score([played("42"), played("42" * 200)])

        return asyncio.run(main())

    short, long = score(max_tokens=300)
    assert short.reward == pytest.approx(expected(folder, MESSAGES), abs=1e-6)
    assert long.status is Status.ENV_ERROR and "the reward model takes 300" in long.error
