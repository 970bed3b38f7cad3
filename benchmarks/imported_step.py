"""The first step of an imported run: loss and gradient of TRL's GRPOTrainer against ours, on the same replies.

A script of TRL (`imported_step_trl.py`) trains a step on the embedded model, in an environment of its own.
`agentgym import trl` reads the same script, and our learner takes TRL's replies and their rewards, with the settings of
the written YAML.

    python benchmarks/imported_step.py
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported, and for TRL's process

import yaml
from peer_environments import run_beside_trl

from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.cli.main import main as agentgym
from agentgym.model.model_folder import load_decoder
from agentgym.model.model_name import model_folder
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.batch.credits import credit_groups
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.resolve import resolve_config
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

SCRIPT = Path(__file__).with_name("imported_step_trl.py")
TRIED = (("dapo", "group"), ("grpo", "none"), ("dr_grpo", "group"), ("bnpo", "group"))
PARTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
LARGEST = 1e-5
"""The largest relative difference of a gradient norm, and the largest of a loss."""
Rows = Sequence[tuple[tuple[int, ...], tuple[int, ...], float]]
"""The prompt, the reply and the reward of each episode."""


def import_script(script: Path) -> TrainConfig:
    """Returns the run that the import writes."""
    written = script.with_suffix(".yaml")
    assert agentgym(["import", "trl", str(script), "--output", str(written)]) == 0
    settings = yaml.safe_load(written.read_text())
    return resolve_config(config_from_mapping(TrainConfig, {**settings, "env": "Prompt-v0"}))


def rows_of(seen: dict[str, Any], tokenizer: ChatTokenizer) -> Rows:
    """Returns TRL's episodes without padding, each with the script's reward."""
    rows = []
    for prompt, prompt_mask, reply, reply_mask in zip(*(seen[name] for name in PARTS), strict=True):
        ids = tuple(index for index, mask in zip(reply, reply_mask, strict=True) if mask)
        text = tokenizer.backend.decode(list(ids), skip_special_tokens=True)
        reward = sum(letter in "aeiou" for letter in text) / (1 + len(text))
        rows.append((tuple(index for index, mask in zip(prompt, prompt_mask, strict=True) if mask), ids, reward))
    return rows


def batch_of(rows: Rows, logprobs: Sequence[Sequence[float]], config: TrainConfig) -> TrainingBatch:
    """Returns the batch of the episodes, credited as the run does."""
    groups = []
    for prompt in dict.fromkeys(row[0] for row in rows):
        task, members = Task("imported", len(groups)), []
        for (own, ids, reward), logps in zip(rows, logprobs, strict=True):
            if own == prompt:
                spans = TokenSpan(prompt, Source.PROMPT), TokenSpan(ids, Source.POLICY, tuple(logps), (0,) * len(ids))
                turns = (Turn(Message("assistant", ""), reward, finish_reason="stop"),)
                members.append(
                    Trajectory(
                        task=task,
                        group=f"{len(groups)}",
                        member=len(members),
                        rows=(Row(spans),),
                        turns=turns,
                        status=Status.COMPLETED,
                        stop_reason=StopReason.TERMINATED,
                    )
                )
        groups.append(Group(f"{len(groups)}", task, tuple(members)))
    credits = credit_groups(groups, config.estimator, config.advantage.settings or {})
    return build_batch(groups, credits, aggregation=config.aggregation or "", norm_tokens=config.norm_tokens)


def our_step(rows: Rows, folder: Path, config: TrainConfig) -> tuple[float, float]:
    """Returns our loss and gradient norm on the episodes."""
    settings = replace(config.learner, threads=1)
    learner = Learner(load_decoder(folder), settings, config.optimizer, total_steps=10)
    ordered = sorted(rows, key=lambda row: [prompt for prompt, _, _ in rows].index(row[0]))  # by group, as batches are
    flat = learner.logprobs(batch_of(ordered, [[-1.0] * len(ids) for _, ids, _ in ordered], config)).flatten().tolist()
    logprobs = [[min(0.0, flat.pop(0)) for _ in ids] for _, ids, _ in ordered]
    stats = learner.update(batch_of(ordered, logprobs, config))
    learner.close()
    return stats.loss, stats.grad_norm


def main() -> None:
    """Prints the table; fails if a number differs."""
    folder = Path(model_folder("embedded"))
    tokenizer = ChatTokenizer.load(folder)
    with tempfile.TemporaryDirectory() as place:
        for loss, scale in TRIED:
            script = Path(place) / f"{loss}.py"
            text = SCRIPT.read_text().replace("OUTPUT", f"{place}/out").replace('"MODEL"', f'"{folder}"')
            script.write_text(text.replace('"LOSS"', f'"{loss}"').replace('"SCALE"', f'"{scale}"'))
            seen, config = run_beside_trl(script, {}), import_script(script)
            own_loss, own_norm = our_step(rows_of(seen, tokenizer), folder, config)
            print(f"{loss:8} loss {own_loss:+.7f} {seen['loss']:+.7f}   norm {own_norm:.6f} {seen['grad_norm']:.6f}")
            assert abs(own_loss - seen["loss"]) < LARGEST and abs(own_norm / seen["grad_norm"] - 1) < LARGEST


if __name__ == "__main__":
    main()
