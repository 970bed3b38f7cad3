"""A model that transformers computes is taught, trained, resumed, verified and exported by the usual commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.engines.local.rows import Rows
from agentgym.engines.local.transformers_step import TransformersStep
from agentgym.model.model_class import auto_class
from agentgym.model.routing import PassRouting, routing_of
from agentgym.rollout.record.line_reader import LineReader

ROOT = Path(__file__).parent.parent.parent
IN_SOURCE = {"PYTHONPATH": str(ROOT)}
SMALL = ["--tasks", "2", "--group-size", "2", "--eval.episodes", "0", "--limits.turn-tokens", "12"]

NORM = "language_model.model.norm.weight"
VARIED = """
from agentgym.rewards import Reward


def varied(trajectory, task):
    return Reward(sum(int(row.ids.sum()) for row in trajectory.rows) % 7 / 7)
"""
"""A reward that differs between episodes, so that even a random model has something to learn."""


SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def _make_folder(folder: Path, kind: str, vision: dict[str, int] | None = None, **settings: float) -> Path:
    """Saves a random model of a kind, with the tokenizer of the embedded model."""
    from transformers import AutoConfig

    vocab_size = json.loads((embedded_folder() / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    text = {"vocab_size": vocab_size, **SHAPE, **settings}
    towers = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    config = AutoConfig.for_model(kind, **(text if vision is None else towers))
    auto_class(config).from_config(config).float().save_pretrained(folder)
    for pattern in ("tokenizer*", "chat_template*", "*.jinja", "special_tokens_map.json"):
        for file in embedded_folder().glob(pattern):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 with a vision tower: sliding windows and scaled embeddings."""
    return _make_folder(tmp_path_factory.mktemp("gemma"), "gemma3", VISION, sliding_window=64)


@pytest.fixture(scope="module")
def run(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, one of them resumed, that began with a taught model."""
    folder = tmp_path_factory.mktemp("runs")
    taught, path = str(folder / "taught"), folder / "run"
    lesson = ["sft", "--env", "TextGame-v0", "--model", str(gemma), "--steps", "2", "--eval.episodes", "0"]
    assert main([*lesson, "--output", taught]) == 0
    (folder / "varied.py").write_text(VARIED)
    reward = ["--reward.function", f"{folder / 'varied.py'}:varied"]
    train = ["train", "--env", "TextGame-v0", "--model", taught, *SMALL, *reward, "--output", str(path)]
    assert main([*train, "--steps", "1"]) == 0
    assert main([*train, "--steps", "2", "--resume"]) == 0
    return path


@pytest.mark.long
def test_teaching_and_training_change_the_weights(gemma: Path, run: Path) -> None:
    folders = [gemma, run.parent / "taught", run / "checkpoints" / "step-000002"]
    first, taught, trained = (load_file(folder / "model.safetensors") for folder in folders)
    assert first.keys() == taught.keys() == trained.keys()
    assert not torch.equal(first[NORM], taught[NORM])
    assert not torch.equal(taught[NORM], trained[NORM])
    tower = [name for name in first if "vision_tower" in name or "projector" in name]
    assert len(tower) > 20
    assert all(torch.equal(first[name], trained[name]) for name in tower)


@pytest.mark.long
def test_the_engine_samples_with_the_logprobs_of_the_learner(run: Path) -> None:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["mismatch_max"] < 1e-3 for step in steps)
    assert all(step["mfu"] is None for step in steps)


@pytest.mark.long
def test_the_run_is_sound(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "--deep"]) == 0
    assert "sound" in capsys.readouterr().out


@pytest.mark.long
def test_the_exported_model_is_that_of_the_checkpoint(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    assert exported.config.model_type == "gemma3"
    saved = load_file(run / "checkpoints" / "step-000002" / "model.safetensors")
    assert torch.equal(exported.get_decoder().norm.weight, saved[NORM])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--executor", "ray", "--ray.learners", "2", "--learner.mesh.tensor", "2"], "leave learner.mesh out"),
        (["--model-backend", "fast"], "the fast decoder does not compute this model"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(
    gemma: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    train = ["train", "--env", "TextGame-v0", "--model", str(gemma), *SMALL, "--output", str(tmp_path / "run")]
    assert main([*train, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
def test_adapters_of_a_mixture_of_experts_resume_to_the_bit_and_are_exported(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    first = _make_folder(tmp_path / "first", "qwen3_moe", **experts)
    (tmp_path / "varied.py").write_text(VARIED)
    reward = ["--reward.function", f"{tmp_path / 'varied.py'}:varied"]
    adapt = ["--learner.lora.rank", "4", "--learner.kl.coefficient", "0.01", "--optimizer.learning-rate", "1e-3"]
    train = ["train", "--env", "TextGame-v0", "--model", str(first), *SMALL, *reward, *adapt]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*train, "--steps", "2", "--output", str(whole)]) == 0
    assert main([*train, "--steps", "1", "--output", str(parts)]) == 0
    assert main([*train, "--steps", "2", "--output", str(parts), "--resume"]) == 0
    for name in ("episodes.jsonl.zst", "checkpoints/step-000002/model.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert main(["export", str(parts), str(tmp_path / "merged")]) == 0
    assert main(["export", str(parts), str(tmp_path / "adapter"), "--adapter"]) == 0
    ids_T = torch.arange(7, 60, 3)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(first)
        first_TV = base(ids_T).logits[0].log_softmax(-1)
        merged_TV = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids_T).logits[0].log_softmax(-1)
        adapted_TV = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids_T).logits[0].log_softmax(-1)
    torch.testing.assert_close(adapted_TV, merged_TV, rtol=0, atol=1e-5)
    assert (adapted_TV - first_TV).abs().max() > 1e-3
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"] == [
        "k_proj",
        "o_proj",
        "q_proj",
        "v_proj",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixture", "tower"])
def test_a_run_of_adapters_that_is_killed_goes_on_bitwise(kind: str, gemma: Path, tmp_path: Path) -> None:
    """Adapters of experts, and of the language part of a model that sees images; `kills.py` has the comparison."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    first = gemma if kind == "tower" else _make_folder(tmp_path / "first", "qwen3_moe", **experts)
    options = ["--model", str(first), "--learner.lora.rank", "4", "--limits.turn-tokens", "12"]
    command = [sys.executable, str(ROOT / "benchmarks" / "kills.py"), "--kills", "2", "--", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env={**os.environ, **IN_SOURCE})
    assert done.returncode == 0 and "bitwise equal" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
def test_recorded_experts_are_replayed_and_a_run_with_them_resumes_to_the_bit(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    first = _make_folder(tmp_path / "first", "qwen3_moe", **experts)
    (tmp_path / "varied.py").write_text(VARIED)
    train = ["train", "--env", "TextGame-v0", "--model", str(first), *SMALL, "--learner.router.replay"]
    train += ["--reward.function", f"{tmp_path / 'varied.py'}:varied", "--learner.router.balance", "0.01"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*train, "--steps", "2", "--output", str(whole)]) == 0
    assert main([*train, "--steps", "1", "--output", str(parts)]) == 0
    assert main([*train, "--steps", "2", "--output", str(parts), "--resume"]) == 0
    for name in ("episodes.jsonl.zst", "checkpoints/step-000002/model.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert main(["verify", str(whole), "--deep"]) == 0
    with LineReader(whole / "episodes.jsonl.zst") as lines:
        spans = [span for line in lines for row in json.loads(line)["rows"] for span in row["spans"]]
    assert all(span["experts"]["shape"][1:] == [2, 2] for span in spans if span["source"] == "policy")
    steps = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(len(step["router_loads"]) == 2 and step["mismatch_max"] < 1e-3 for step in steps)


@pytest.mark.long
def test_the_models_own_balance_weight_equals_the_same_weight_set_by_hand(
    tmp_path: Path,
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}
    first = _make_folder(tmp_path / "first", "qwen3_moe", **experts, router_aux_loss_coef=0.02)
    (tmp_path / "same.py").write_text("def same(trajectory, task):\n    return 1.0\n")  # all groups are dead
    train = ["train", "--env", "TextGame-v0", "--model", str(first), *SMALL, "--steps", "1"]
    train += ["--reward.function", f"{tmp_path / 'same.py'}:same"]
    lines = []
    for name, more in (("own", []), ("given", ["--learner.router.balance", "0.02"])):
        assert main([*train, *more, "--output", str(tmp_path / name)]) == 0
        lines.append(json.loads((tmp_path / name / "metrics.jsonl").read_text()))
    own, by_hand = lines
    assert own["dead_groups"] == own["groups"] and own["learned_tokens"] == own["trained_tokens"] > 0
    assert own["loss"] == by_hand["loss"] == pytest.approx(0.02 * own["router_loss"], rel=1e-4)
    assert own["optimizer_steps"] == 1 and own["grad_norm"] == by_hand["grad_norm"] > 0


@pytest.mark.long
def test_an_engine_that_takes_other_experts_is_refused_with_routing_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the replay of its experts the same engine is trained with."""

    def route_to_the_first(self: TransformersStep, rows: Rows, *inputs: Any) -> torch.Tensor:
        routing = PassRouting(torch.arange(2).expand(2, inputs[0].numel(), 2))
        with routing_of(routing):
            states = self.model.states(*inputs)
        if self.cache.experts_SWRK is not None:
            self.cache.experts_SWRK[rows.slot_N, rows.position_N] = [0, 1]
        return states

    monkeypatch.setattr(TransformersStep, "_states", route_to_the_first)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "initializer_range": 0.2}
    first = _make_folder(tmp_path / "first", "qwen3_moe", **experts)
    train = ["train", "--env", "TextGame-v0", "--model", str(first), *SMALL, "--steps", "1"]
    assert main([*train, "--output", str(tmp_path / "own")]) != 0
    assert "Likely cause: routing: engine and trainer give tokens to different experts" in capsys.readouterr().err
    assert main([*train, "--output", str(tmp_path / "replayed"), "--learner.router.replay"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [[], ["--learner.lora.rank", "4", "--learner.kl.coefficient", "0.01"]])
def test_two_expert_ranks_resume_with_the_bytes_of_one_process_in_two_shares(
    tmp_path: Path, adapters: list[str]
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    first = _make_folder(tmp_path / "first", "qwen3_moe", **experts)
    (tmp_path / "varied.py").write_text(VARIED)
    reward = ["--reward.function", f"{tmp_path / 'varied.py'}:varied"]
    rates = ["--optimizer.learning-rate", "1e-3", "--optimizer.max-grad-norm", "1000"]  # clipping changes the last bits
    train = ["train", "--env", "TextGame-v0", "--model", str(first), *SMALL, *reward, *rates, *adapters]
    ray = ["--executor", "ray", "--ray.learners", "2", "--ray.workers", "2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*train, "--learner.shares", "2", "--steps", "2", "--output", str(whole)]) == 0
    for number in ("1", "2"):
        words = [*train, *ray, "--steps", number, "--output", str(parts), *(["--resume"] if number == "2" else [])]
        subprocess.run([sys.executable, "-m", "agentgym", *words], check=True, timeout=280)
    assert (whole / "episodes.jsonl.zst").read_bytes() == (parts / "episodes.jsonl.zst").read_bytes()
    own, theirs = (load_file(folder / "checkpoints" / "step-000002" / "model.safetensors") for folder in (whole, parts))
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    assert main(["verify", str(parts), "--deep"]) == 0
    if adapters:
        assert main(["export", str(parts), str(tmp_path / "adapter"), "--adapter"]) == 0
        assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")


@pytest.mark.slow
def test_two_ranks_with_half_of_the_experts_learn_on_ray_as_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    first = _make_folder(tmp_path / "first", "qwen3_moe", **experts)
    (tmp_path / "varied.py").write_text(VARIED)
    train = ["train", "--env", "TextGame-v0", "--model", str(first), *SMALL]
    train += ["--reward.function", f"{tmp_path / 'varied.py'}:varied", "--learner.router.replay"]
    train += ["--optimizer.learning-rate", "1e-4", "--learner.kl.coefficient", "0.01"]
    ray = ["--executor", "ray", "--ray.learners", "2", "--ray.workers", "2", "--learner.mesh.expert", "2"]
    alone, divided = tmp_path / "alone", tmp_path / "divided"
    assert main([*train, "--steps", "2", "--output", str(alone)]) == 0
    for number in ("1", "2"):
        words = [*train, *ray, "--steps", number, "--output", str(divided), *(["--resume"] if number == "2" else [])]
        subprocess.run([sys.executable, "-m", "agentgym", *words], check=True, timeout=280)
    own, theirs = (
        load_file(folder / "checkpoints" / "step-000002" / "model.safetensors") for folder in (alone, divided)
    )
    assert own.keys() == theirs.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=2e-5)


@pytest.mark.long
def test_a_mixture_in_bfloat16_trains_with_the_experts_that_sampled(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "initializer_range": 0.2}
    first = _make_folder(tmp_path / "first", "qwen3_moe", **experts)
    (tmp_path / "varied.py").write_text(VARIED)
    train = ["train", "--env", "TextGame-v0", "--model", str(first), *SMALL, "--learner.dtype", "bfloat16"]
    train += ["--reward.function", f"{tmp_path / 'varied.py'}:varied", "--steps", "2"]
    train += ["--parity.max-mismatch", "10"]
    means = {}
    for name, options in (("own", []), ("replayed", ["--learner.router.replay"])):
        assert main([*train, *options, "--output", str(tmp_path / name)]) == 0
        steps = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        means[name] = max(step["mismatch_mean"] for step in steps)
    assert 0 < means["replayed"] < means["own"]
    assert means["replayed"] < 0.02
