"""TRL's side of `rollout.py`, in TRL's own environment: `rollout_trl.py SPEC.json`, JSON last.

`GRPOTrainer` plays environments with tools by `environment_factory`; a model's replies are those of the specification.
Counted is its `_generate`: rendering, parsing, tools and masks. The environments' reset, rewards and tensors are not.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
GROUP_SIZE = 8


class Walk:
    """The same walk as that of `rollout.py`."""

    def reset(self, **kwargs: Any) -> str:
        """The first room."""
        return ""

    def look(self, direction: str) -> str:
        """Looks in a direction.

        Args:
            direction: Where to.
        """
        return str(SPEC["observation"]).format(direction=direction)


class ScriptedTrainer(GRPOTrainer):
    """Has a model that answers at once, and ends where the replies are collected."""

    seconds: float = 0.0

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        reply = SPEC["reply"]
        return [list(reply) for _ in prompt_ids], [[0.0] * len(reply) for _ in prompt_ids]

    def _generate(self, prompts: Any) -> Any:
        started = time.process_time()
        result = super()._generate(prompts)
        self.seconds = time.process_time() - started
        tool_mask = result[2]
        num_policy = SPEC["turns"] * len(SPEC["reply"])
        assert all(sum(mask) == num_policy for mask in tool_mask), "an episode did not take its turns"
        raise StopIteration


def main() -> None:
    """Plays the specification's episodes twice, and prints the milliseconds of a turn of the second time."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SPEC["tokenizer"])
    tokenizer.response_template = qwen3_template
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    messages = [{"role": "system", "content": SPEC["system"]}, {"role": "user", "content": SPEC["first"]}]
    config = GRPOConfig(
        output_dir=SPEC["output"],
        per_device_train_batch_size=GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=10**6,
        max_tool_calling_iterations=SPEC["turns"] - 1,  # the last reply's call is left alone
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    trainer = ScriptedTrainer(
        Qwen3ForCausalLM(shape),
        lambda completions, **kwargs: [0.0] * len(completions),
        config,
        train_dataset=Dataset.from_list([{"prompt": messages}] * GROUP_SIZE),
        processing_class=tokenizer,
        environment_factory=Walk,
    )
    for _ in range(2):
        with contextlib.suppress(StopIteration):
            trainer._generate_and_score_completions([{"prompt": messages} for _ in range(SPEC["episodes"])])
    print(json.dumps({"ms": 1000 * trainer.seconds / (SPEC["episodes"] * SPEC["turns"])}))


if __name__ == "__main__":
    main()
