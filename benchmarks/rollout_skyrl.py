"""SkyRL's side of `rollout.py`, in an environment of its own: `rollout_skyrl.py SPEC.json`, JSON last.

`SkyRLGymGenerator` plays its environments; a model's replies are those of the specification. In SkyRL the environment
reads tool calls itself, here by one regular expression and `json.loads`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import typing
from pathlib import Path
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # SkyRL 0.3's models of pydantic are refused by Python 3.11 otherwise
import skyrl_gym  # noqa: E402
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig  # noqa: E402
from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


class Walk(BaseTextEnv):
    """The same walk as that of `rollout.py`."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Looks in the direction of the call."""
        self.turns += 1
        match = CALL.search(action)
        assert match is not None, "no call in the reply"
        call = json.loads(match[1])
        text = SPEC["observation"].format(**call["arguments"])
        done = self.turns == SPEC["turns"]
        return BaseTextEnvStepOutput(
            observations=[{"role": "tool", "content": text}], reward=float(done), done=done, metadata={}
        )


class ScriptedEngine:
    """Answers at once."""

    model_name = "scripted"

    def __init__(self, text: str) -> None:
        self.text = text

    async def generate(self, engine_input: Any, model: str | None = None) -> dict[str, Any]:
        """Returns the reply of the specification."""
        reply = SPEC["reply"]
        return {
            "responses": [self.text],
            "response_ids": [list(reply)],
            "stop_reasons": ["stop"],
            "response_logprobs": [[0.0] * len(reply)],
        }

    async def finish_session(self, session_id: object) -> None:
        """Has nothing to release."""


def main() -> None:
    """Plays the specification's episodes twice, and prints the milliseconds of a turn of the second time."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SPEC["tokenizer"])
    skyrl_gym.register(id="walk", entry_point=Walk)
    config = GeneratorConfig()
    config.max_turns, config.batched, config.max_input_length = SPEC["turns"], False, 10**6
    config.sampling_params.logprobs = 1
    engine: Any = ScriptedEngine(tokenizer.decode(SPEC["reply"]))
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=0), engine, tokenizer)
    messages = [{"role": "system", "content": SPEC["system"]}, {"role": "user", "content": SPEC["first"]}]
    num_episodes, num_turns = SPEC["episodes"], SPEC["turns"]
    seconds = 0.0
    for _ in range(2):
        batch: Any = {
            "prompts": [list(messages) for _ in range(num_episodes)],
            "env_classes": ["walk"] * num_episodes,
            "env_extras": [{} for _ in range(num_episodes)],
            "sampling_params": None,
            "trajectory_ids": [TrajectoryID(str(index // 8), index % 8) for index in range(num_episodes)],
        }
        started = time.process_time()
        output = asyncio.run(generator.generate(batch, disable_tqdm=True))
        seconds = time.process_time() - started
        num_policy = num_turns * len(SPEC["reply"])
        assert all(sum(mask) == num_policy for mask in output["loss_masks"]), "an episode did not take its turns"
    print(json.dumps({"ms": 1000 * seconds / (num_episodes * num_turns)}))


if __name__ == "__main__":
    main()
