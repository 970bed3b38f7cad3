"""A reference and a critic with ranks of their own: they compute and learn what the learner's ranks do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

import ray
from ray.cluster_utils import Cluster
from transformers import AutoConfig, AutoModelForCausalLM

from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.model.model_folder import load_decoder
from agentgym.trainers import Trainer
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.checkpoint import learner_folders, load_learner
from agentgym.trainers.checkpoints.sharded_state import finish_state
from agentgym.trainers.cluster.rank_process import CopyTarget
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.cluster import ClusterConfig
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.lora import LoraConfig
from tests.trainers.cluster.test_run_on_ray import episodes, killer_of, losses, steps_of

Begin = Callable[..., Any]


@pytest.fixture
def ppo(small_run: TrainConfig) -> TrainConfig:
    """A run with a critic, held to its first weights."""
    run = replace(small_run, algo="ppo", steps=3)
    run = replace(run, learner=replace(run.learner, kl=KLConfig(coefficient=0.1)))
    return replace(run)


def on_ray(run: TrainConfig, **settings: Any) -> TrainConfig:
    return replace(run, executor="ray", ray=ClusterConfig(**settings))


def test_the_reference_is_the_first_weights_or_a_teacher(
    ppo: TrainConfig, begin_rank: Begin, fresh_batch: Callable[..., TrainingBatch], tmp_path: Path
) -> None:
    run = resolve_config(on_ray(ppo, references=1))
    learner = begin_rank(run, embedded_folder())
    reference = begin_rank(run, tmp_path / "none", "ReferenceActor")  # only the first weights are loaded
    batch = fresh_batch(learner._learner.model)
    expected_M = learner.act_on(Learner.logprobs, batch)
    assert learner._learner.reference is None
    assert torch.equal(reference.logprobs(batch), expected_M)
    learner._learner.model.embed.data.mul_(1.5)
    assert not torch.equal(learner.act_on(Learner.logprobs, batch), expected_M)
    Trainer(replace(ppo, steps=1), tmp_path / "run").save(tmp_path / "same")
    assert torch.equal(teacher_of(run, tmp_path / "same", begin_rank).logprobs(batch), expected_M)


def teacher_of(run: TrainConfig, folder: Path, begin_rank: Begin) -> Any:
    kl = KLConfig(coefficient=0.1, reference=str(folder))
    return begin_rank(replace(run, learner=replace(run.learner, kl=kl)), folder, "ReferenceActor")


def test_a_teacher_may_be_of_another_architecture(
    ppo: TrainConfig, begin_rank: Begin, fresh_batch: Callable[..., TrainingBatch], tmp_path: Path
) -> None:
    run, own = resolve_config(on_ray(ppo, references=1)), load_decoder(embedded_folder())
    batch, folder = fresh_batch(own), tmp_path / "other"
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8, "num_attention_heads": 4}
    shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    mixture = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", vocab_size=own.vocab_size, **shape))
    mixture.float().eval().save_pretrained(folder)
    expected = []
    for ids_T, target_T in zip(batch.ids_N.split(batch.seqlens), batch.target_N.split(batch.seqlens), strict=True):
        with torch.no_grad():
            expected.append(mixture(ids_T[None]).logits[0].log_softmax(-1).gather(1, target_T[:, None])[:, 0])
    teacher_M = teacher_of(run, folder, begin_rank).logprobs(batch)
    torch.testing.assert_close(teacher_M, torch.cat(expected)[batch.mask_N], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 2], ids=["weights", "adapters"])
def test_critic_ranks_learn_as_learner_ranks_do_and_exchange_their_state(
    rank: int, ppo: TrainConfig, begin_rank: Begin, fresh_batch: Callable[..., TrainingBatch], tmp_path: Path
) -> None:
    run = resolve_config(on_ray(replace(ppo, learner=replace(ppo.learner, kl=KLConfig(), lora=LoraConfig(rank=rank)))))
    apart = replace(run, ray=ClusterConfig(critics=1))
    together = begin_rank(run, embedded_folder())
    own, learner = begin_rank(apart, embedded_folder(), "CriticActor"), begin_rank(apart, embedded_folder())
    assert learner._learner.critic is None
    batch = fresh_batch(together._learner.model)
    batch = replace(batch, return_N=torch.where(batch.mask_N, batch.advantage_N + 1, 0.0))
    assert own.fit(batch) == together.act_on(Learner.update_critic, batch)
    assert own.num_steps() == 1
    values = own.read(batch)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(values, together.read_values(batch), strict=True))
    write_state(learner, tmp_path, "learner")
    write_state(own, tmp_path, "critic")
    assert "critic" in load_learner(tmp_path)
    folders = [str(folder) for folder in learner_folders(tmp_path)]
    before = begin_rank(run, embedded_folder())
    before.load_state(folders)
    assert torch.equal(before.read_values(batch)[0], values[0])
    write_state(before, tmp_path / "whole", "learner")
    after = begin_rank(apart, embedded_folder(), "CriticActor")
    after.load_state([str(folder) for folder in learner_folders(tmp_path / "whole")])
    assert torch.equal(after.read(batch)[0], values[0])
    assert after.fit(batch) == own.fit(batch)


def write_state(rank: Any, checkpoint: Path, part: str) -> None:
    """Writes what a single rank trains into a checkpoint's folder."""
    checkpoint.mkdir(exist_ok=True)
    rank._shipment_key = rank.num_steps(), None  # the weights are not written here
    rank.copy_state(0)
    rank.write_copy(0, CopyTarget(folder=str(checkpoint), part=part, marker="", config={}))
    while (results := rank.results_of(0)) is None:
        time.sleep(0.01)
    finish_state(checkpoint / part, *rank.end_copy(0), [results])


@pytest.mark.parametrize(
    ("learner", "ray", "message"),
    [
        ({}, {"references": 1}, "its coefficient is 0"),
        ({"kl": KLConfig(coefficient=1, penalty="jsd")}, {"references": 1}, "leave ray.references out"),
        (
            {"kl": KLConfig(coefficient=1), "lora": LoraConfig(rank=2)},
            {"references": 1},
            "have the first weights anyway",
        ),
        ({"critic": CriticConfig(trunk="shared")}, {"critics": 1}, "the critic is on the policy's trunk"),
    ],
)
def test_ranks_that_would_have_nothing_to_do_are_refused(
    learner: dict[str, Any], ray: dict[str, Any], message: str, ppo: TrainConfig
) -> None:
    run = replace(ppo, learner=replace(ppo.learner, **{"kl": KLConfig(), **learner}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_config(on_ray(run, **ray))


def test_an_algorithm_without_a_critic_has_no_ranks_of_one(small_run: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="grpo takes no critic: leave them out"):
        resolve_config(on_ray(small_run, critics=1))


@pytest.fixture
def cluster() -> Iterator[str]:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    try:
        yield nodes.address
    finally:
        if ray.is_initialized():
            ray.shutdown()
        nodes.shutdown()  # type: ignore[no-untyped-call]


SMALL = {"cpus": {"learner": 0.5, "engine": 0.5}}


@pytest.mark.slow
def test_a_run_with_separate_ranks_survives_their_deaths_with_a_local_runs_bytes(
    cluster: str, ppo: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ppo = replace(ppo, checkpoint=CheckpointConfig(every=1))
    Trainer(ppo, tmp_path / "local").fit()
    folder = tmp_path / "ray"
    with killer_of(["CriticActor", "ReferenceActor"], folder / "metrics.jsonl"):
        Trainer(on_ray(ppo, address=cluster, references=1, critics=1, **SMALL), folder).fit()
    assert episodes(folder) == episodes(tmp_path / "local")
    assert losses(folder) == losses(tmp_path / "local")
    for label in ("critic", "reference"):
        assert any(f"{label} 0 is gone" in message for message in caplog.messages), caplog.messages
    assert verify_run(folder).ok


@pytest.mark.slow
def test_two_ranks_of_each_kind_learn_as_one_process_that_can_resume_them(
    cluster: str, ppo: TrainConfig, tmp_path: Path
) -> None:
    first = replace(ppo, steps=2)
    Trainer(on_ray(first, address=cluster, references=2, critics=2, **SMALL), tmp_path / "ray").fit()
    Trainer(ppo, tmp_path / "ray", resume=True).fit()
    Trainer(ppo, tmp_path / "local").fit()
    assert losses(tmp_path / "ray") == pytest.approx(losses(tmp_path / "local"), rel=1e-4, abs=1e-6)
    values = [[step["value_loss"] for step in steps_of(tmp_path / name)] for name in ("ray", "local")]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
