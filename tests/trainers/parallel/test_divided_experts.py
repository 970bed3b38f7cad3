"""Ranks that divide the experts of a mixture, against the learner in one process.

Rows are of unequal lengths, and eight in number, so that ranks have neither as many rows nor as many tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgym.errors import ConfigError
from agentgym.model.policy import load_policy
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import LearnerConfig
from agentgym.trainers.model_check.small_models import save_small_model
from agentgym.trainers.parallel.mesh import check_mesh
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.fsdp import FsdpConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.mesh import MeshConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.router import RouterConfig
from tests.trainers.parallel.conftest import numbers_of
from tests.trainers.parallel.test_ranks_of_any_model import assert_near, check, in_one_process, replayed

Fresh = Callable[..., TrainingBatch]
Case = dict[str, Any]
Found = dict[str, Any]
OnRanks = Callable[[dict[str, Case], int], list[dict[str, Found]]]

STEP = OptimizerConfig(learning_rate=3e-5, warmup_steps=1, max_grad_norm=0.5)
MODELS = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe")
FURTHER = """qwen2_moe qwen3_next phimoe olmoe granitemoehybrid ernie4_5_moe deepseek_v3 minimax_m2""".split()
"""Mixtures of other kinds: with shared experts, other routers, latent attention, states in place of attention."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"minibatches": 2},
    "recomputed": {"router": RouterConfig(balance=0.5), "activation_checkpointing": True},
    "kl": {"kl": KLConfig(coefficient=0.1), "activation_checkpointing": True},
    "critic": {"critic": CriticConfig(trunk="own", clip=None), "loss": "gspo", "ema_decay": 0.5},
    "gathered-once": {"fsdp": FsdpConfig(reshard_after_forward=False)},
    "sharded-gradients": {"fsdp": FsdpConfig(gradients="sharded")},
    "lora": {"lora": LoraConfig(rank=3), "kl": KLConfig(coefficient=0.1)},
    "lora-attention": {"lora": LoraConfig(rank=3, target_modules=ATTENTION), "activation_checkpointing": True},
}
QUICK = """qwen3_moe-plain qwen3_moe-lora qwen3_moe-one-row qwen3_moe-one-sided mixtral-plain
gpt_oss-recomputed""".split()
"""The cases that are learned with those of other ranks; all others are learned with the slow ones."""


@pytest.fixture(scope="module")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts, the first of the models."""
    folder = tmp_path_factory.mktemp(MODELS[0])
    save_small_model(MODELS[0], folder)
    return folder


@pytest.fixture(scope="module")
def cases(mixture_folder: Path, make_batch: Fresh, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """What is learned, by name."""
    all_cases: dict[str, Case] = {}
    for name in MODELS:
        folder = mixture_folder if name == MODELS[0] else tmp_path_factory.mktemp(name)
        base = small_case(name, folder, make_batch)
        for setting, own in SETTINGS.items():
            config = LearnerConfig(threads=1, **{"micro_batch_tokens": 160, **own})
            all_cases[f"{name}-{setting}"] = base | {"config": config, "counted": True}
    plain = all_cases["qwen3_moe-plain"]
    one_row = {"batch": plain["batch"].select([0]), "config": LearnerConfig(threads=1)}
    all_cases["qwen3_moe-one-row"] = plain | one_row
    all_cases["qwen3_moe-replayed"] = replayed(plain)
    record_NRK = all_cases["qwen3_moe-replayed"]["batch"].experts_NRK
    to_first = replace(plain["batch"], experts_NRK=torch.arange(2).expand_as(record_NRK).to(record_NRK.dtype))
    all_cases["qwen3_moe-one-sided"] = plain | {"batch": to_first}  # no token for the experts of the last rank
    all_cases["qwen3_moe-grouped"] = plain | {"experts": "grouped_mm"}  # as on a GPU
    all_cases["gpt_oss-grouped"] = all_cases["gpt_oss-plain"] | {"experts": "grouped_mm"}
    teacher, shape = tmp_path_factory.mktemp("teacher"), json.loads((plain["model"] / "config.json").read_text())
    save_small_model(shape | {"num_experts": 3}, teacher)  # which two ranks do not divide
    taught = replace(plain["config"], kl=KLConfig(coefficient=0.1, reference=str(teacher)))
    all_cases["qwen3_moe-taught"] = plain | {"config": taught}
    return all_cases


def small_case(name: str, folder: Path, make_batch: Fresh) -> Case:
    """A small model of an architecture, which the folder may already hold, and a batch."""
    if not (folder / "config.json").exists():
        save_small_model(name, folder)
    batch = make_batch(load_policy(folder), num_groups=3, longer=8)
    batch = batch.select(list(range(8)))
    returns_N = torch.where(batch.mask_N, batch.advantage_N + 1, 0.0)
    config = LearnerConfig(threads=1, micro_batch_tokens=160)
    return {"model": folder, "optimizer": STEP, "batch": replace(batch, return_N=returns_N), "config": config}


def divided(case: Case, mesh: MeshConfig) -> Case:
    """The same case on ranks that divide the experts."""
    return case | {"config": replace(case["config"], mesh=mesh)}


@pytest.fixture(scope="module")
def two_ranks(cases: dict[str, Case], on_ranks: OnRanks) -> list[dict[str, Found]]:
    """What each of two ranks found of the quick cases."""
    divided_cases = {name: divided(cases[name], MeshConfig(expert=2)) for name in QUICK}
    return on_ranks(divided_cases | {"whole": cases["qwen3_moe-plain"]}, 2)


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_with_half_of_the_experts_learn_what_one_process_learns(
    name: str, cases: dict[str, Case], two_ranks: list[dict[str, Found]]
) -> None:
    check([rank[name] for rank in two_ranks], in_one_process(cases[name]))


@pytest.mark.long
def test_a_rank_holds_its_experts_and_gathers_no_others(
    cases: dict[str, Case], two_ranks: list[dict[str, Found]]
) -> None:
    shape = load_policy(cases["qwen3_moe-plain"]["model"])
    layer = sum(weight.nbytes for name, weight in shape.named_parameters() if "layers.0.mlp.experts" in name)
    for rank in two_ranks:
        split, whole = rank["qwen3_moe-plain"], rank["whole"]
        assert split["held"] == whole["held"] == shape.num_layers * layer / 2
        assert min(split["gathered"]) == max(whole["gathered"]) - layer, "a block without its experts"
        assert len(split["gathered"]) == 2, "such a block, and embedding and head"
        assert split["calls"]["c10d::alltoall_base_"] > 0
        assert "c10d::alltoall_base_" not in whole["calls"]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "mesh"), [(2, 2), (4, 2), (4, 4)])
def test_any_blocks_of_ranks_learn_what_one_process_learns(
    size: int, mesh: int, cases: dict[str, Case], on_ranks: OnRanks
) -> None:
    """Two ranks learn all cases. Four ranks with halves are two blocks, each of which has all experts."""
    endings = ("-plain", "-recomputed", "-lora", "-grouped") if size == 2 else ("-plain",)
    names = [name for name in cases if (size == 2 and name.startswith("qwen3_moe")) or name.endswith(endings)]
    names += [] if size == 2 else ["qwen3_moe-lora", "qwen3_moe-sharded-gradients", "qwen3_moe-one-sided"]
    ranks = on_ranks({name: divided(cases[name], MeshConfig(expert=mesh)) for name in names}, size)
    for name in names:
        check([rank[name] for rank in ranks], in_one_process(cases[name]))


@pytest.mark.slow
def test_ranks_divide_the_experts_of_any_architecture(make_batch: Fresh, on_ranks: OnRanks, tmp_path: Path) -> None:
    """Those that keep a state compute rows of similar lengths as a batch, and ranks have not as many of these."""
    cases = {name: small_case(name, tmp_path / name, make_batch) for name in FURTHER}
    ranks = on_ranks({name: divided(case, MeshConfig(expert=2)) for name, case in cases.items()}, 2)
    for name in FURTHER:
        check([rank[name] for rank in ranks], in_one_process(cases[name]))


@pytest.mark.slow
def test_what_is_rounded_to_bfloat16_is_near_that_of_ranks_with_all_experts(
    cases: dict[str, Case], on_ranks: OnRanks
) -> None:
    """Muon's steps are, and passes in mixed precision. Muon makes much of the rounding of a router's gradient."""
    plain = cases["qwen3_moe-plain"]
    frozen = replace(plain["config"], router=RouterConfig(frozen=True))
    mixed = replace(plain["config"], dtype="bfloat16")
    whole = {
        "muon": plain | {"config": frozen, "optimizer": replace(STEP, name="muon", learning_rate=1e-3)},
        "mixed": plain | {"config": mixed},
    }
    split = on_ranks({name: divided(case, MeshConfig(expert=2)) for name, case in whole.items()}, 2)[0]
    theirs = on_ranks(whole, 2)[0]
    for name, bound in {"muon": 1e-4, "mixed": 0.02}.items():
        assert numbers_of(split[name]["first"]) == pytest.approx(numbers_of(theirs[name]["first"]), rel=bound, abs=0.01)
        for own, reference in zip(split[name]["gradients"], theirs[name]["gradients"], strict=True):
            assert own.dtype == torch.float32
            assert (own - reference).norm() <= 0.05 * reference.norm()
    for name, weight in theirs["muon"]["weights"].items():
        moved_by = (weight - theirs["muon"]["between"][name]).norm()
        assert (split["muon"]["weights"][name] - weight).norm() <= 0.05 * moved_by, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe-critic", "gpt_oss-lora"])
def test_a_state_goes_from_divided_experts_to_one_process_and_back(
    name: str, cases: dict[str, Case], on_ranks: OnRanks, tmp_path: Path
) -> None:
    case, mesh = cases[name], MeshConfig(expert=2)
    saved = on_ranks({"saved": divided(case, mesh) | {"saved": tmp_path}}, 4)[0]["saved"]
    resumed = case | {"state": saved["state"], "weights": None if "lora" in name else saved["between"]}
    alone = in_one_process(resumed)
    assert_near(list(alone["weights"].values()), list(saved["weights"].values()))
    shards = resumed | {"state": tmp_path}
    others = on_ranks({"whole": resumed, "shards": divided(shards, mesh), "undivided": shards}, 2)
    for outcome in others[0].values():
        check([outcome], alone)
    back = on_ranks({"back": divided(shards, mesh)}, 4)[0]["back"]
    assert back["last"] == saved["last"], "to the last bit"


def test_what_cannot_be_divided_is_refused_before_any_process_starts(mixture_folder: Path, tmp_path: Path) -> None:
    mixture = load_policy(mixture_folder)
    check_mesh(MeshConfig(expert=2), mixture, 8)
    with pytest.raises(ConfigError, match=r"4 experts of a layer cannot be divided by learner\.mesh\.expert 3"):
        check_mesh(MeshConfig(expert=3), mixture, 3)
    with pytest.raises(ConfigError, match="experts of 64 x 128 numbers cannot be sharded over the 3 blocks"):
        check_mesh(MeshConfig(expert=2), mixture, 6)
    for name in ("gemma3_text", "llama4_text"):  # no experts, and a stack that transformers computes in one way only
        save_small_model(name, tmp_path / name)
        with pytest.raises(ConfigError, match=r"computes in several ways, and this model has none"):
            check_mesh(MeshConfig(expert=2), load_policy(tmp_path / name), 2)
