"""`agentgym sft` and `dpo` learn on two ranks of torchrun what one process learns, and go on with the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.sft.lesson_ranks import join_ranks

OnRanks = Callable[..., list[int]]

PROGRAM = Path(__file__).parent / "lesson_process.py"
ADAMW = ["--optimizer.name", "adamw", "--optimizer.learning-rate", "1e-3", "--optimizer.warmup-steps", "1"]
UNEVEN = ["--batch-size", "5", "--micro-batch-tokens", "150"]
"""Five rows a step, of which one rank has three, in passes of one or two rows."""
LESSONS = {
    "sft": ["sft", "--conversations", "rows.jsonl", "--validation", "rows.jsonl", "--steps", "4", *ADAMW],
    "dpo": ["dpo", "--pairs", "pairs.jsonl", "--validation", "pairs.jsonl", "--steps", "4", *ADAMW],
}
ADAPTERS = {"weights": [], "adapters": ["--lora.rank", "3"]}


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[OnRanks]:
    """`on_ranks(*words)` runs a command on two ranks, and returns their exit codes; they print at most one object."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:

        def run(*words: object) -> list[int]:
            assert program.stdin and program.stdout
            print(json.dumps([str(word) for word in words]), file=program.stdin, flush=True)
            printed = list(iter(program.stdout.readline, "\n"))
            assert sum(line.startswith("{") for line in printed) == words.count("--json")
            found: list[int] = json.loads(printed[-1])
            return found

        try:
            yield run
        finally:
            os.killpg(program.pid, signal.SIGKILL)


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
            asked = "go " * (1 + 3 * number)
            said = [{"role": "user", "content": asked}, {"role": "assistant", "content": "room " * (number + 1)}]
            print(json.dumps({"messages": said}), file=rows)
            replies = {"chosen": "north " * (number + 1), "rejected": "take lamp"}
            print(json.dumps({"prompt": asked, **replies}), file=pairs)
    return {
        name: [str(folder / word) if word.endswith(".jsonl") else word for word in words]
        for name, words in LESSONS.items()
    }


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_alike(one: Path, two: Path) -> None:
    """The numbers of all steps and the weights are those of the other folder, but for rounding."""
    for mine, theirs in zip(steps_of(one), steps_of(two), strict=True):
        numbers = {name: value for name, value in theirs.items() if value is not None and name != "elapsed_s"}
        assert {name: mine[name] for name in numbers} == pytest.approx(numbers, rel=2e-4, abs=2e-6)
    own, other = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert own.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("lesson", LESSONS)
def test_two_ranks_learn_what_one_process_learns(
    lesson: str, adapters: str, lessons: dict[str, list[str]], models: dict[str, str], on_ranks: OnRanks, tmp_path: Path
) -> None:
    for model, folder in models.items():
        words = [*lessons[lesson], *UNEVEN, *ADAPTERS[adapters], "--model", folder]
        ranks, alone = tmp_path / f"{model}-ranks", tmp_path / f"{model}-alone"
        assert on_ranks(*words, "--json", "--output", ranks) == [0, 0]
        assert main([*words, "--threads", "1", "--output", str(alone)]) == 0
        assert_alike(ranks, alone)
        assert not (ranks / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("lesson", LESSONS)
def test_ranks_go_on_at_their_checkpoint_with_the_same_bytes(
    lesson: str, adapters: str, lessons: dict[str, list[str]], on_ranks: OnRanks, tmp_path: Path
) -> None:
    words = [*lessons[lesson], *ADAPTERS[adapters], "--checkpoint-minutes", "0"]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    (tmp_path / "stops.py").write_text(STOPS)
    assert on_ranks(*words, "--trackers", f"{tmp_path / 'stops.py'}:Stop", "--output", cut) == [130, 130]
    assert len(steps_of(cut)) in (2, 3)  # trackers are told by a thread of their own
    shutil.copytree(cut, tmp_path / "alone")
    go = [words[0], "--resume", "--trackers", f"{tmp_path / 'stops.py'}:Go", "--output"]
    assert on_ranks(*go, cut) == [0, 0]
    assert on_ranks(*words, "--output", whole) == [0, 0]
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    losses = [[step["loss"] for step in steps_of(folder)] for folder in (cut, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert main([*go, str(tmp_path / "alone")]) == 0
    assert_alike(tmp_path / "alone", whole)


STOPS = '''
import os
import signal


class Go:
    def begin(self, run): ...
    def step(self, step, metrics): ...
    def episodes(self, step, sample): ...
    def finish(self): ...


class Stop(Go):
    """Interrupts rank 0, which alone has trackers, in the second step."""

    def step(self, step, metrics):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
'''


def test_a_gpu_with_a_number_is_refused_where_each_rank_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with join_ranks(LearnerConfig(device="cuda:1")) as ranks:
        assert ranks is None
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    told = "each rank has a GPU of its own: --device cuda, got cuda:1"
    with pytest.raises(ConfigError, match=told), join_ranks(LearnerConfig(device="cuda:1")):
        pass
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match="begin the ranks with torchrun"), join_ranks(LearnerConfig(device="cuda")):
        pass
