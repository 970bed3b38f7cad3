"""Ranks of a model that transformers computes against the learner in one process: mixtures of experts, towers, hybrids.

Rows share the prefix of their group, or are sorted by length, so that ranks of a hybrid have not as many batches.
"""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.errors import ConfigError, RunFolderError
from agentgym.model.packed_layout import similar_rows
from agentgym.model.policy import load_policy
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import LearnerConfig
from agentgym.trainers.model_check.small_models import save_small_model
from agentgym.trainers.parallel.balance import balance_rows, row_costs
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.fsdp import FsdpConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.mesh import MeshConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.router import RouterConfig
from tests.trainers.parallel.conftest import numbers_of

Fresh = Callable[..., TrainingBatch]
Case = dict[str, Any]
Found = dict[str, Any]
OnRanks = Callable[[dict[str, Case], int], list[dict[str, Found]]]

PROGRAM = Path(__file__).parent / "rank_process.py"
STEP = OptimizerConfig(learning_rate=1e-4, warmup_steps=1, max_grad_norm=1e3)  # clipping changes the last bits
LORA = LoraConfig(rank=3)
MODELS = ("qwen3_moe", "gemma3", "qwen3_5_text", "lfm2")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "balanced": {"router": RouterConfig(balance=0.5), "activation_checkpointing": True},
    "frozen-routers": {"router": RouterConfig(frozen=True)},
    "one-pass": {"micro_batch_tokens": 4096},
    "kl": {"kl": KLConfig(coefficient=0.1), "activation_checkpointing": True},
    "critic": {"critic": CriticConfig(trunk="own", clip=None), "loss": "gspo"},
    "gathered-once": {"fsdp": FsdpConfig(reshard_after_forward=False)},
    "sharded-gradients": {"fsdp": FsdpConfig(gradients="sharded")},
}
ADAPTERS = {"lora": {"lora": LORA}, "lora-kl": {"lora": LORA, "kl": KLConfig(coefficient=0.1)}}
UNEVEN = ["plain", "critic", "gathered-once", "sharded-gradients", "lora-kl"]
"""The settings that shard or gather tensors in ways of their own, which three ranks cannot divide equally."""
QUICK = [
    "qwen3_moe-plain",
    "qwen3_moe-balanced",
    "qwen3_moe-lora",
    "qwen3_moe-replayed",
    "gemma3-plain",
    "qwen3_5_text-one-pass",
]
"""The cases of every run of the tests; the others are learned with the slow ones."""


@pytest.fixture(scope="module")
def base_case(make_batch: Fresh, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """`base_case(name)` returns what all cases of a model have, which is made once."""

    @functools.cache
    def make(name: str) -> Case:
        folder, number = tmp_path_factory.mktemp(name), MODELS.index(name)
        save_small_model(name, folder)
        batch = make_batch(load_policy(folder), num_groups=4, shared=40 * (number % 2), longer=8)
        if number % 2 == 0:
            batch = batch.select(sorted(range(batch.num_rows), key=batch.seqlens.__getitem__))
        returns_N = torch.where(batch.mask_N, batch.advantage_N + 1, 0.0)
        return {"model": folder, "optimizer": STEP, "batch": replace(batch, return_N=returns_N)}

    return make


@pytest.fixture(scope="module")
def cases(base_case: Callable[[str], Case]) -> dict[str, Case]:
    """What is learned, by name."""
    all_cases: dict[str, Case] = {}
    for name in MODELS:
        base = base_case(name)
        for setting, own in (SETTINGS | ADAPTERS).items():
            config = LearnerConfig(threads=1, **{"micro_batch_tokens": 160, **own})
            all_cases[f"{name}-{setting}"] = {**base, "config": config}
        if name == "qwen3_moe":
            all_cases["qwen3_moe-replayed"] = replayed(all_cases["qwen3_moe-plain"])
        config = LearnerConfig(threads=1, mesh=MeshConfig(sequence=2))
        all_cases[f"{name}-mesh"] = {**base, "config": config}
    return all_cases


def replayed(case: Case) -> Case:
    """The same with experts that do not follow from the routers; those of a shared prefix are equal."""
    model, batch = load_policy(case["model"]), case["batch"]
    first_NR = batch.ids_N[:, None] * 7 + torch.arange(len(model.routers))
    experts_NRK = (first_NR[..., None] + torch.arange(model.num_chosen())) % 4
    return case | {"batch": replace(batch, experts_NRK=experts_NRK.to(torch.int16))}


def in_one_process(case: Case) -> Found:
    learn: Callable[..., Found] = runpy.run_path(str(PROGRAM))["learn"]
    return learn(case, None)


@pytest.fixture(scope="module")
def quick_ranks(cases: dict[str, Case], on_ranks: OnRanks) -> list[dict[str, Found]]:
    """What each of two ranks found of the quick cases."""
    quick = {name: cases[name] for name in [*QUICK, "gemma3-mesh"]}
    return on_ranks({**quick, "missing": {**cases[QUICK[0]], "model": Path("no/such/folder")}}, 2)


def check(ranks: list[Found], expected: Found) -> None:
    """Every rank has the numbers of the learner in one process, and the same ones as the others."""
    for name in expected.keys() & {"first", "critic", "last"}:
        assert all(rank[name] == ranks[0][name] for rank in ranks), "to the last bit"
        if expected[name] is not None:
            assert numbers_of(ranks[0][name]) == pytest.approx(numbers_of(expected[name]), rel=1e-4, abs=1e-5), name
    for rank in ranks:
        assert_near(rank["gradients"], expected["gradients"])
        for name in ("logprobs", "values", "ends"):
            assert (name in rank) == (name in expected)
            if name in expected:
                assert_near([rank[name]], [expected[name]])
    assert ranks[0]["weights"].keys() == expected["weights"].keys()
    assert_near(list(ranks[0]["weights"].values()), list(expected["weights"].values()))


def assert_near(tensors: list[Tensor], expected: list[Tensor]) -> None:
    """All numbers differ by a hundred thousandth of the largest at most."""
    bound = 1e-5 * max(float(tensor.abs().max()) for tensor in expected)
    for left, right in zip(tensors, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=bound)


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_of_any_model_learn_what_one_process_learns(
    name: str, cases: dict[str, Case], quick_ranks: list[dict[str, Found]]
) -> None:
    check([rank[name] for rank in quick_ranks], in_one_process(cases[name]))


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_of_any_model_have_the_bits_of_one_process_in_two_shares(
    name: str, cases: dict[str, Case], quick_ranks: list[dict[str, Found]]
) -> None:
    case = cases[name]
    expected = in_one_process({**case, "config": replace(case["config"], shares=2)})
    outcome = quick_ranks[0][name]
    assert torch.equal(outcome["logprobs"], expected["logprobs"])
    assert all(torch.equal(tensor, expected["weights"][key]) for key, tensor in outcome["weights"].items())


@pytest.mark.long
def test_ranks_compute_tokens_with_the_experts_of_the_record(quick_ranks: list[dict[str, Found]]) -> None:
    plain, replayed = (quick_ranks[0][f"qwen3_moe-{name}"]["gradients"] for name in ("plain", "replayed"))
    assert not torch.allclose(plain[0], replayed[0], rtol=0.1)


@pytest.mark.long
def test_ranks_have_adapters_on_experts_and_publish_them_merged(
    cases: dict[str, Case], quick_ranks: list[dict[str, Found]]
) -> None:
    outcome = quick_ranks[0]["qwen3_moe-lora"]
    adapters = outcome["state"]["lora"]["tensors"]
    key = "base_model.model.model.layers.1.mlp.experts.{}.lora_{}.weight"
    low_XRI, high_XOR = (adapters[key.format("up_proj", matrix)] for matrix in "AB")
    assert (low_XRI.shape, high_XOR.shape) == ((4, 3, 128), (4, 32, 3))
    first = dict(load_policy(cases["qwen3_moe-lora"]["model"]).published_tensors())  # type: ignore[attr-defined]
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        expected_OI = first[name] + LORA.alpha / LORA.rank * high_XOR[expert] @ low_XRI[expert]
        torch.testing.assert_close(outcome["between"][name], expected_OI, rtol=0, atol=1e-5)
        assert not torch.equal(outcome["between"][name], first[name])


def test_ranks_of_a_hybrid_have_different_numbers_of_batches(base_case: Callable[[str], Case]) -> None:
    """The case `qwen3_5_text-one-pass` is one in which a rank waits for the passes of the other."""
    case = base_case("qwen3_5_text")
    batch = case["batch"]
    portions = balance_rows(row_costs(batch, load_policy(case["model"])), 2)
    numbers = {len(similar_rows([batch.seqlens[row] for row in rows])) for rows in portions}
    assert len(numbers) == 2, numbers


@pytest.mark.long
def test_passes_that_ranks_share_are_those_of_the_fast_decoder(quick_ranks: list[dict[str, Found]]) -> None:
    for rank in quick_ranks:
        with pytest.raises(ConfigError, match=r"leave learner\.mesh out"):
            raise rank["gemma3-mesh"]  # type: ignore[misc]


@pytest.mark.long
def test_every_rank_raises_the_error_of_the_one_that_loads(quick_ranks: list[dict[str, Found]]) -> None:
    for rank in quick_ranks:
        with pytest.raises(RunFolderError, match="no/such/folder"):
            raise rank["missing"]  # type: ignore[misc]


def test_a_stack_of_experts_costs_what_a_token_takes_of_it(base_case: Callable[[str], Case]) -> None:
    model = load_policy(base_case("qwen3_moe")["model"])
    attention, router = 128 * 32 * (4 + 4 + 2 + 2), 128 * 4
    assert model.layer_cost == (attention + router + 2 * 3 * 128 * 32, 2 * 128)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_of_any_model_learns_what_one_process_learns(
    model: str, size: int, cases: dict[str, Case], on_ranks: OnRanks
) -> None:
    names = [f"{model}-{setting}" for setting in (SETTINGS | ADAPTERS if size == 2 else UNEVEN)]
    ranks = on_ranks({name: cases[name] for name in names}, size)
    for name in names:
        check([rank[name] for rank in ranks], in_one_process(cases[name]))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_state_of_two_ranks_of_any_model_goes_on_in_one_process_and_back(
    model: str, cases: dict[str, Case], on_ranks: OnRanks
) -> None:
    critic, lora = cases[f"{model}-critic"], cases[f"{model}-lora"]
    before, adapted = in_one_process(critic), in_one_process(lora)
    back = {**critic, "state": before["state"], "weights": before["between"]}
    adapted_back = {**lora, "state": adapted["state"]}
    first, _ = on_ranks({"saved": critic, "back": back, "lora": lora, "lora-back": adapted_back}, 2)
    check([first["back"]], in_one_process(back))
    check([first["lora-back"]], in_one_process(adapted_back))
    saved, lora_saved = first["saved"], first["lora"]
    goes_on = in_one_process({**critic, "state": saved["state"], "weights": saved["between"]})
    assert_near(list(goes_on["weights"].values()), list(saved["weights"].values()))
    adapters_go_on = in_one_process({**lora, "state": lora_saved["state"]})
    assert_near(list(adapters_go_on["weights"].values()), list(lora_saved["weights"].values()))
