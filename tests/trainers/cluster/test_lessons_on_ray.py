"""`agentgym sft` and `dpo` learn on two ranks of a cluster what one process learns, and go on with the same numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

import ray
from ray.cluster_utils import Cluster

from agentgym.cli.main import main
from agentgym.embedded import embedded_folder

pytestmark = pytest.mark.slow
ADAMW = ["--optimizer.name", "adamw", "--optimizer.learning-rate", "1e-3", "--optimizer.warmup-steps", "1"]
UNEVEN = ["--batch-size", "5", "--micro-batch-tokens", "150"]
"""Five rows a step, of which one rank has three, in passes of one or two rows."""
LESSONS = {
    "sft": ["sft", "--conversations", "rows.jsonl", "--validation", "rows.jsonl", "--steps", "4", *ADAMW, *UNEVEN],
    "dpo": ["dpo", "--pairs", "pairs.jsonl", "--validation", "pairs.jsonl", "--steps", "4", *ADAMW, *UNEVEN],
}
ADAPTERS = {"weights": [], "adapters": ["--lora.rank", "3"]}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[list[str]]:
    """The options of two ranks on a cluster that the tests share."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        ray_options = ["--ray.address", nodes.address, "--ray.learners", "2", "--ray.cpus", "learner=0.5"]
        yield ["--executor", "ray", *ray_options]
    finally:
        if ray.is_initialized():
            ray.shutdown()
        nodes.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The embedded model, and a mixture of experts with its tokenizer, which transformers computes."""
    folder, first = tmp_path_factory.mktemp("mixture"), embedded_folder()
    for pattern in ("tokenizer*", "chat_template*", "*.jinja"):
        for file in first.glob(pattern):
            shutil.copy(file, folder)
    vocab_size = json.loads((first / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, num_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return {"embedded": "embedded", "mixture": str(folder)}


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The words of each lesson, with conversations and pairs of several lengths."""
    folder = tmp_path_factory.mktemp("rows")
    with open(folder / "rows.jsonl", "w") as rows, open(folder / "pairs.jsonl", "w") as pairs:
        for number in range(11):
            question = "go " * (1 + 3 * number)
            reply = {"role": "assistant", "content": "room " * (number + 1)}
            print(json.dumps({"messages": [{"role": "user", "content": question}, reply]}), file=rows)
            replies = {"chosen": "north " * (number + 1), "rejected": "take lamp"}
            print(json.dumps({"prompt": question, **replies}), file=pairs)
    return {
        name: [str(folder / word) if word.endswith(".jsonl") else word for word in words]
        for name, words in LESSONS.items()
    }


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_alike(folder: Path, reference: Path) -> None:
    """The numbers of all steps and the weights are those of the other folder, but for rounding."""
    names = ("loss", "grad_norm", "validation_loss", "accuracy", "margin", "tokens")
    for mine, theirs in zip(steps_of(folder), steps_of(reference), strict=True):
        numbers = {name: theirs[name] for name in names if theirs.get(name) is not None}
        assert {name: mine[name] for name in numbers} == pytest.approx(numbers, rel=2e-4, abs=2e-6)
    own, weights = load_file(folder / "model.safetensors"), load_file(reference / "model.safetensors")
    assert own.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=3e-4)


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("lesson", LESSONS)
def test_two_ranks_learn_what_one_process_learns(
    lesson: str,
    adapters: str,
    lessons: dict[str, list[str]],
    models: dict[str, str],
    two_ranks: list[str],
    tmp_path: Path,
) -> None:
    for model, folder in models.items():
        words = [*lessons[lesson], *ADAPTERS[adapters], "--model", folder]
        ranks, alone = tmp_path / f"{model}-ranks", tmp_path / f"{model}-alone"
        assert main([*words, *two_ranks, "--output", str(ranks)]) == 0
        assert main([*words, "--threads", "1", "--output", str(alone)]) == 0
        assert_alike(ranks, alone)


@pytest.mark.parametrize("lesson", LESSONS)
def test_ranks_go_on_at_their_checkpoint_with_the_same_bytes(
    lesson: str, lessons: dict[str, list[str]], two_ranks: list[str], tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = [*lessons[lesson], *two_ranks, "--checkpoint.every", "2"]
    assert main([*words, "--output", str(whole)]) == 0
    assert main([*words, "--max-minutes", "0.0001", "--output", str(cut)]) == 0
    assert len(steps_of(cut)) < 4
    assert main([words[0], "--resume", "--max-minutes", "None", "--output", str(cut)]) == 0
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    losses = [[step["loss"] for step in steps_of(folder)] for folder in (cut, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
