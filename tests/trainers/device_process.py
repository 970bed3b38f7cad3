"""`device_process.py FOLDER DEVICE` trains each case for a step or two, and ends with a line of JSON: their metrics,
and how often each update waited for the device, and on how many cores an operator of its thread computes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pretend_device
import torch

from agentgym.engines.local.config import LocalSettings
from agentgym.rollout.limits import Limits
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.lessons.config import DpoConfig, LessonConfig, SftConfig
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.learner import LearnerConfig

LEARNER = LearnerConfig(threads=1)
REGULARIZED = replace(
    LEARNER, kl=KLConfig(coefficient=0.1), entropy_coefficient=0.01, correction="tis_token", minibatches=2
)
CASES = {
    "regularized": ("grpo", REGULARIZED, 2),
    "critic": ("ppo", LEARNER, 2),
    # Not with activation_checkpointing: torch aborts where Python computes a device in the middle of a backward pass.
    "sequences": ("gspo", LEARNER, 1),
    "bfloat16": ("grpo", replace(LEARNER, dtype="bfloat16"), 1),
    "micro-batches": ("grpo", replace(LEARNER, micro_batch_tokens=64), 1),
}


def config_of(case: str, device: str) -> TrainConfig:
    """Few short episodes, which luck rewards."""
    algo, learner, steps = CASES[case]
    return TrainConfig(
        env="LongRoad-v0",
        env_kwargs={"length": 8},
        algo=algo,
        steps=steps,
        tasks=2,
        group_size=2,
        eval=HeldOutConfig(episodes=0),
        learner=replace(learner, device=device),
        local=LocalSettings(num_slots=4),
        limits=Limits(max_turns=3, turn_tokens=24),
    )


def lesson_of(case: str, device: str, folder: Path) -> LessonConfig:
    """Imitates demonstrations, or prefers some replies over others, with passes for a row or two."""
    learner = LearnerConfig(threads=1, micro_batch_tokens=600, device=device)
    if case == "sft":
        return SftConfig(env="TextGame-v0", steps=2, batch_size=4, learner=learner, eval=HeldOutConfig(episodes=0))
    path = folder / f"pairs-{device}.jsonl"
    pairs = [{"prompt": "go " * number, "chosen": "north " * number, "rejected": "take lamp"} for number in range(1, 5)]
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return DpoConfig(pairs=(str(path),), steps=2, batch_size=2, learner=learner)


def main(folder: str, device: str) -> None:
    """Trains the cases one after the other."""
    if device == pretend_device.NAME:
        pretend_device.register()
    torch.set_num_threads(2)
    results, counts, update = {}, [], Learner.update

    def count(learner: Learner, *arguments: Any, **options: Any) -> Any:
        pretend_device.WAITS.clear()
        stats = update(learner, *arguments, **options)
        counts.append({"waits": len(pretend_device.WAITS), "cores": torch.get_num_threads()})
        return stats

    Learner.update = count
    for case in (*CASES, "sft", "dpo"):
        config = config_of(case, device) if case in CASES else lesson_of(case, device, Path(folder))
        trainer = Trainer(config, Path(folder, f"{case}-{device}"))
        trainer.fit()
        assert trainer.model.embed.device.type == device
        assert torch.get_num_threads() == 2
        results[case] = [{**step, **counted} for step, counted in zip(trainer.metrics, counts, strict=True)]
        counts.clear()
    print(json.dumps(results), flush=True)
    os._exit(0)  # torch ends its threads for a device of Python by an abort


if __name__ == "__main__":
    main(*sys.argv[1:])
