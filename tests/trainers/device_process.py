"""`device_process.py FOLDER DEVICE` trains each case for a step or two, and ends with a line of JSON: their metrics,
and how often each update waited for the device, and on how many cores an operator of its thread computes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pretend_device
import torch

from agentgym.chat_templates import open_renderer
from agentgym.embedded import embedded_folder
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.envs.catalog.resolve import make_env
from agentgym.model.policy import load_policy_on
from agentgym.rollout.limits import Limits
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.preferences.loop import PreferenceConfig, learn_preferences
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.parity import ParityConfig
from agentgym.trainers.sft.demonstrations import DemonstrationConfig, Pair, stream
from agentgym.trainers.sft.loop import ImitationConfig, learn

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
        eval=HeldOutConfig(batch_size=0),
        learner=replace(learner, device=device),
        local=LocalEngineConfig(num_slots=4),
        limits=Limits(max_turns=3, turn_tokens=24),
        parity=ParityConfig(batch_size=1, turns=2),
    )


def lessons(device: str) -> dict[str, list[dict[str, Any]]]:
    """Imitates demonstrations, and prefers some over others, with passes for a row or two."""
    renderer, env = open_renderer(embedded_folder()), make_env("TextGame-v0")
    shown = list(islice(stream([env], renderer, 0, DemonstrationConfig()), 8))
    env.close()
    seen: dict[str, list[dict[str, Any]]] = {"sft": [], "dpo": []}

    def see(lesson: str) -> Any:
        return lambda step: seen[lesson].append({**asdict(step), "cores": torch.get_num_threads()})

    learner = LearnerConfig(threads=1, micro_batch_tokens=2 * len(shown[0].ids))
    model = load_policy_on(device, embedded_folder())
    learn(model, renderer, iter(shown), ImitationConfig(steps=2, batch_size=4, learner=learner), on_step=see("sft"))
    pairs = iter([Pair(*rows) for rows in zip(shown[::2], shown[1::2], strict=True)])
    learn_preferences(model, pairs, PreferenceConfig(steps=2, batch_size=2, learner=learner), on_step=see("dpo"))
    assert model.embed.device.type == device
    return seen


def main(folder: str, device: str) -> None:
    """Trains the cases one after the other."""
    if device == pretend_device.NAME:
        pretend_device.register()
    torch.set_num_threads(2)
    found, counts, update = {}, [], Learner.update

    def count(learner: Learner, *given: Any, **options: Any) -> Any:
        pretend_device.WAITS.clear()
        stats = update(learner, *given, **options)
        counts.append({"waits": len(pretend_device.WAITS), "cores": torch.get_num_threads()})
        return stats

    Learner.update = count
    for case in CASES:
        trainer = Trainer(config_of(case, device), Path(folder, f"{case}-{device}"))
        trainer.fit()
        assert trainer.model.embed.device.type == device
        assert torch.get_num_threads() == 2
        found[case] = [{**step, **counted} for step, counted in zip(trainer.metrics, counts, strict=True)]
        counts.clear()
    print(json.dumps(found | lessons(device)), flush=True)
    os._exit(0)  # torch ends its threads for a device of Python by an abort


if __name__ == "__main__":
    main(*sys.argv[1:])
