"""A learner of several ranks against the learner in one process: gradients, reports, states, however a step is cut."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.errors import AgentGymError, ConfigError
from agentgym.model.decoder import Decoder
from agentgym.model.model_folder import save_model_folder
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.sharded_state import load_state
from agentgym.trainers.learner.learner import LearnerConfig
from agentgym.trainers.parallel.ranks import Ranks
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.fsdp import FsdpConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.mesh import MeshConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from tests.trainers.parallel.conftest import numbers_of

Tiny = Callable[..., Decoder]
Fresh = Callable[..., TrainingBatch]
Case = dict[str, Any]
Found = dict[str, Any]
OnRanks = Callable[[dict[str, Case], int], list[dict[str, Found]]]
Alone = Callable[[str], Found]

PROGRAM = Path(__file__).parent / "rank_process.py"
STEP = OptimizerConfig(learning_rate=1e-3, warmup_steps=1, max_grad_norm=0.5)
GROUPS = replace(
    STEP, rates={"embed_tokens": 0.1, "mlp": 3.0}, layer_decay=0.7, weight_decay=0.1, weight_decays={"norm": 0.0}
)
LORA = LoraConfig(rank=3, target_modules=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
ROWS = {1: 1, 4: 44, 16: 180}
"""Tokens of a micro-batch by the rows that it then holds, about: rows have 5 to 16."""
LOSSES: dict[str, dict[str, object]] = {
    "ppo_clip": {},
    "gspo": {"clip_low": 0.5, "clip_high": 0.5},
    "clip_cov": {"fraction": 0.2, "cov_low": 0.0},
}
SETTINGS: dict[str, dict[str, object]] = {
    "kl": {"kl": KLConfig(coefficient=0.1), "entropy_coefficient": 0.01, "epochs": 2, "minibatches": 2},
    "kl-of-rewards": {"kl": KLConfig(coefficient=0.1, place="reward")},
    "correction": {"correction": "tis_token"},
    "checkpointing": {"activation_checkpointing": True},
    "gathered-once": {"fsdp": FsdpConfig(reshard_after_forward=False), "loss": "gspo"},
    "sharded-gradients": {"fsdp": FsdpConfig(gradients="sharded"), "loss": "gspo"},
    "critic": {"critic": CriticConfig(trunk="own", clip=None)},
    "lora": {"lora": LORA},
    "lora-kl": {"lora": LORA, "kl": KLConfig(coefficient=0.1), "activation_checkpointing": True, "epochs": 2},
    "lora-critic": {"lora": LORA, "critic": CriticConfig(trunk="own", clip=None), "loss": "gspo"},
}

SHARED = {"sequence": MeshConfig(sequence=2), "tensor": MeshConfig(tensor=2)}
"""How two ranks share their forward passes."""
SHARING = "ppo_clip-4 gspo-4 kl checkpointing critic shared-prefixes one-row untied biased long rates".split()
"""What they learn so."""


def moved(batch: TrainingBatch) -> TrainingBatch:
    """Sampled by a policy that was another one, so that losses differ; two rows a trajectory."""
    generator = torch.Generator().manual_seed(1)
    away = 0.3 * torch.randn(batch.num_tokens, generator=generator)
    old_logp_N = torch.where(batch.mask_N, (batch.old_logp_N + away).clamp(max=0.0), 0.0)
    return replace(
        batch,
        old_logp_N=old_logp_N,
        sampled_logp_N=old_logp_N,
        trajectory_N=batch.trajectory_N // 2,
        return_N=torch.where(batch.mask_N, batch.advantage_N + 1, 0.0),
    )


def sharing(case: Case, mesh: MeshConfig) -> Case:
    """The case on ranks that share forward passes."""
    return {**case, "config": replace(case["config"], mesh=mesh)}


def in_one_process(case: Case) -> Found:
    learn: Callable[..., Found] = runpy.run_path(str(PROGRAM))["learn"]
    return learn(sharing(case, MeshConfig()), None)


@pytest.fixture(scope="module")
def settings_cases(make_tiny: Tiny, make_batch: Fresh) -> dict[str, Case]:
    """The cases that differ in settings alone, by name."""
    model = make_tiny()
    settings = {
        f"{loss}-{rows}": {"loss": loss, "loss_settings": own, "micro_batch_tokens": tokens}
        for loss, own in LOSSES.items()
        for rows, tokens in ROWS.items()
    }
    settings |= {name: {"micro_batch_tokens": 44, **own} for name, own in SETTINGS.items()}
    base = {"model": model, "optimizer": STEP, "batch": moved(make_batch(model, num_groups=5))}
    return {
        name: {**base, "config": LearnerConfig(threads=1, **own), "counted": name in COUNTED}  # type: ignore[arg-type]
        for name, own in settings.items()
    }


@pytest.fixture(scope="module")
def cases(
    settings_cases: dict[str, Case], make_tiny: Tiny, make_batch: Fresh, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Case]:
    """What is learned, by name."""
    all_cases = dict(settings_cases)
    plain = all_cases["ppo_clip-4"]
    model, batch = plain["model"], plain["batch"]
    shared = moved(make_batch(model, num_groups=3, shared=40))
    folder = tmp_path_factory.mktemp("model")
    save_model_folder(model, folder)
    long_model = make_tiny(window=4096)
    long_batch = moved(make_batch(long_model, num_groups=1, shared=900, longer=2000)).select([0, 1])
    # Eight steps of Adam, which makes more of rounding with each: at half the rate.
    slower = {**all_cases["kl"], "optimizer": replace(STEP, learning_rate=STEP.learning_rate / 2)}
    before = in_one_process(plain)
    all_cases |= {
        "kl-slower": slower,
        "shared-prefixes": {**plain, "batch": shared},
        "reference": {**all_cases["kl"], "reference": make_tiny(seed=1)},
        "one-row": {**plain, "batch": batch.select([5])},
        "untied": {**plain, "model": make_tiny(tied=False)},
        "muon": {**plain, "optimizer": replace(STEP, name="muon")},
        "rates": {**plain, "optimizer": GROUPS},
        "bfloat16": {**plain, "config": replace(plain["config"], dtype="bfloat16")},
        "resumed": {**plain, "state": before["state"], "weights": before["between"]},
        "lora-resumed": {**all_cases["lora"], "state": in_one_process(all_cases["lora"])["state"]},
        "lora-late": {**all_cases["lora"], "bare": True},
        "offload": {**plain, "config": replace(plain["config"], fsdp=FsdpConfig(cpu_offload=True))},
        "differs": {**plain, "differs": True},
        "alone": {**plain, "alone": True},
        "shared-trunk": {**plain, "config": replace(plain["config"], critic=CriticConfig(trunk="shared"))},
        "three": sharing(plain, MeshConfig(sequence=3)),
        "one-head": sharing({**plain, "model": make_tiny(num_kv_heads=1)}, MeshConfig(tensor=2)),
        "loaded": {**all_cases["kl"], "folder": folder},
        "loaded-tensor": sharing({**all_cases["kl"], "folder": folder}, MeshConfig(tensor=2)),
        "biased": {**plain, "model": make_tiny(qkv_bias=True)},
        "few-heads": sharing({**plain, "model": make_tiny(num_kv_heads=1)}, MeshConfig(sequence=2)),
        "long": {
            **plain,
            "model": long_model,
            "batch": long_batch,
            "config": LearnerConfig(threads=1, micro_batch_tokens=8192),
        },
    }
    shared_passes = {
        f"{name}-{mesh}": sharing(all_cases[name], SHARED[mesh])
        for mesh in SHARED
        for name in [*SHARING, "muon", "resumed"]
    }
    return all_cases | shared_passes | {"lora-sequence": sharing(all_cases["lora"], SHARED["sequence"])}


REFUSED = {
    "offload": "leave it out on a CPU",
    "differs": "different batches",
    "alone": "what Ranks.shard gave",
    "lora-late": "before it is sharded",
    "shared-trunk": "critic.trunk own",
    "three": "2 learner ranks are no multiple of learner.mesh.sequence 3",
    "one-head": "1 key/value heads cannot be split into 2 equal parts, as learner.mesh.tensor",
}
LEARNED = [
    *(f"{loss}-{rows}" for loss in LOSSES for rows in ROWS),
    *SETTINGS,
    "shared-prefixes",
    "one-row",
    "reference",
    "untied",
    "loaded",
    "rates",
]
QUICK = ["ppo_clip-4", "lora"]
"""The cases of every run of the tests; the others are learned with the slow ones."""
COUNTED = ("ppo_clip-1", "ppo_clip-16", "gathered-once")
"""The cases of which exchanges are counted."""
SHARED_PASSES = [
    *(f"{name}-sequence" for name in ("ppo_clip-4", "gspo-4", "shared-prefixes", "critic", "long", "lora")),
    "few-heads",
    *(f"{name}-tensor" for name in ("ppo_clip-4", "shared-prefixes", "critic", "long", "loaded", "biased", "rates")),
]
"""The same, by ranks that share their passes."""


@pytest.fixture(scope="module")
def alone(cases: dict[str, Case]) -> Alone:
    """`alone(name)` returns what one process finds, which learns each case once."""
    outcomes: dict[str, Found] = {}

    def learn(name: str) -> Found:
        name = name.removesuffix("-sequence").removesuffix("-tensor")
        if name not in outcomes:
            outcomes[name] = in_one_process(cases[name])
        return outcomes[name]

    return learn


@pytest.fixture(scope="module")
def quick_ranks(settings_cases: dict[str, Case], on_ranks: OnRanks) -> list[dict[str, Found]]:
    """What each of two ranks found of the quick cases."""
    return on_ranks({name: settings_cases[name] for name in QUICK}, 2)


@pytest.fixture(scope="module")
def two_ranks(cases: dict[str, Case], on_ranks: OnRanks) -> list[dict[str, Found]]:
    """What each of two ranks found."""
    names = [*LEARNED, *REFUSED, "muon", "bfloat16", "resumed", "lora-resumed"]
    return on_ranks({name: cases[name] for name in names}, 2)


@pytest.fixture(scope="module")
def one_block(cases: dict[str, Case], on_ranks: OnRanks) -> list[dict[str, Found]]:
    """The same of two ranks that share their passes."""
    names = [*SHARED_PASSES, "muon-tensor", "resumed-sequence", "resumed-tensor"]
    return on_ranks({name: cases[name] for name in names}, 2)


def check(ranks: list[Found], expected: Found) -> None:
    """Every rank has the numbers of the learner in one process, and the same ones as the others."""
    for name, bound in {"first": 1e-5, "critic": 1e-5, "last": 1e-4}.items():  # Adam makes more of rounding
        assert all(rank[name] == ranks[0][name] for rank in ranks), "to the last bit"
        if expected[name] is not None:
            assert numbers_of(ranks[0][name]) == pytest.approx(numbers_of(expected[name]), rel=bound, abs=bound / 10), (
                name
            )
    for rank in ranks:
        assert_close(rank["gradients"], expected["gradients"], 1e-6)
        torch.testing.assert_close(rank["logprobs"], expected["logprobs"], rtol=0, atol=1e-4)
        torch.testing.assert_close(rank["proxies"], expected["proxies"], rtol=0, atol=1e-4)
        for name in ("penalties", "values", "ends"):
            assert (name in rank) == (name in expected)
            if name in expected:
                torch.testing.assert_close(rank[name], expected[name], rtol=0, atol=1e-5)


def assert_close(tensors: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for left, right in zip(tensors, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=bound)


def assert_equal(value_or_tree: Any, expected: Any) -> None:
    """Compares trees of tensors and numbers, bit for bit; tuples are read back as lists."""
    if isinstance(expected, Tensor):
        assert torch.equal(value_or_tree, expected)
    elif isinstance(expected, dict):
        assert value_or_tree.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(value_or_tree[key], value)
    elif isinstance(expected, list | tuple):
        for left, right in zip(value_or_tree, expected, strict=True):
            assert_equal(left, right)
    else:
        assert value_or_tree == expected


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_learn_what_one_process_learns(
    name: str, settings_cases: dict[str, Case], quick_ranks: list[dict[str, Found]]
) -> None:
    check([rank[name] for rank in quick_ranks], in_one_process(settings_cases[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED_PASSES)
def test_two_ranks_that_share_passes_learn_what_one_process_learns(
    name: str, alone: Alone, one_block: list[dict[str, Found]]
) -> None:
    check([rank[name] for rank in one_block], alone(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(sequence=2), MeshConfig(tensor=2), MeshConfig(sequence=2, tensor=2), MeshConfig(sequence=4)],
    ids=str,
)
def test_four_ranks_that_share_passes_learn_what_one_process_learns(
    mesh: MeshConfig, cases: dict[str, Case], alone: Alone, on_ranks: OnRanks
) -> None:
    names = ["kl-slower" if name == "kl" else name for name in SHARING]
    ranks = on_ranks({name: sharing(cases[name], mesh) for name in names}, 4)
    for name in names:
        check([rank[name] for rank in ranks], alone(name))


@pytest.mark.long
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(tensor=2)], ids=str)
def test_each_rank_averages_its_own_shards(
    mesh: MeshConfig, settings_cases: dict[str, Case], on_ranks: OnRanks
) -> None:
    plain = settings_cases["ppo_clip-4"]
    case = {**plain, "config": replace(plain["config"], ema_decay=0.5)}
    expected = in_one_process(case)["state"]["optimizer"]["average"]
    resumed = {**case, "state": in_one_process(case)["state"]}
    first, _ = on_ranks({"ema": sharing(case, mesh), "resumed": sharing(resumed, mesh)}, 2)
    averages = first["ema"]["state"]["optimizer"]["average"]
    assert averages.keys() == expected.keys()
    for name, mean in expected.items():
        torch.testing.assert_close(averages[name], mean, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(tensor=2)], ids=str)
def test_ranks_write_their_own_shards_of_a_state_which_any_number_of_ranks_reads(
    mesh: MeshConfig, settings_cases: dict[str, Case], on_ranks: OnRanks, tmp_path: Path
) -> None:
    plain = settings_cases["critic"]
    case = sharing({**plain, "config": replace(plain["config"], ema_decay=0.5)}, mesh)
    first, _ = on_ranks({"saved": {**case, "saved": tmp_path}}, 2)
    saved = first["saved"]
    assert {path.name[:4] for path in tmp_path.glob("*.distcp")} == {"__0_", "__1_"}
    assert_equal(load_state(tmp_path), saved["state"])
    whole = {**case, "state": saved["state"], "weights": saved["between"]}
    alone = in_one_process(whole)
    outcome = on_ranks({"shards": sharing({**whole, "state": tmp_path}, MeshConfig())}, 3)[0]["shards"]
    assert_close(list(outcome["weights"].values()), list(alone["weights"].values()), 1e-6)
    assert numbers_of(outcome["last"]) == pytest.approx(numbers_of(alone["last"]), rel=1e-5, abs=1e-6)
    resumed = on_ranks({"shards": {**whole, "state": tmp_path}}, 2)[0]["shards"]
    assert resumed["last"] == saved["last"], "to the last bit"


@pytest.mark.slow
def test_ranks_that_share_a_pass_keep_less_of_it(alone: Alone, one_block: list[dict[str, Found]]) -> None:
    memory = alone("long")["kept"]
    for rank in one_block:
        assert rank["long-sequence"]["kept"] < 0.7 * memory, "what hides later keys is the same for any number of ranks"
        assert rank["long-tensor"]["kept"] < 0.75 * memory


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_number_of_ranks_learns_what_one_process_learns(
    size: int, cases: dict[str, Case], alone: Alone, on_ranks: OnRanks, request: pytest.FixtureRequest
) -> None:
    if size == 2:
        ranks = request.getfixturevalue("two_ranks")
    else:
        ranks = on_ranks({name: cases[name] for name in LEARNED}, size)
    for name in LEARNED:
        check([rank[name] for rank in ranks], alone(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("muon", "two_ranks"), ("muon-tensor", "one_block")])
def test_muon_orthogonalizes_whole_matrices_up_to_its_bfloat16(
    name: str, ranks: str, alone: Alone, request: pytest.FixtureRequest
) -> None:
    outcome, expected = request.getfixturevalue(ranks)[0][name], alone(name)
    assert numbers_of(outcome["first"]) == pytest.approx(numbers_of(expected["first"]), rel=1e-5, abs=1e-6)
    for name, tensor in outcome["weights"].items():
        moved_by = (expected["weights"][name] - expected["between"][name]).norm()
        assert (tensor - expected["weights"][name]).norm() < 0.05 * moved_by, name


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "ranks"), [("", "two_ranks"), ("-sequence", "one_block"), ("-tensor", "one_block")])
def test_a_state_of_two_ranks_goes_on_in_one_process_and_back(
    mesh: str, ranks: str, cases: dict[str, Case], alone: Alone, request: pytest.FixtureRequest
) -> None:
    first_rank = request.getfixturevalue(ranks)[0]
    saved = first_rank[f"ppo_clip-4{mesh}"]
    goes_on = in_one_process({**cases["ppo_clip-4"], "state": saved["state"], "weights": saved["between"]})
    assert_close(list(goes_on["weights"].values()), list(saved["weights"].values()), 1e-6)
    assert numbers_of(goes_on["last"]) == pytest.approx(numbers_of(saved["last"]), rel=1e-5, abs=1e-6)
    back, expected = first_rank[f"resumed{mesh}"], alone("resumed")
    assert_close(list(back["weights"].values()), list(expected["weights"].values()), 1e-6)
    assert numbers_of(back["last"]) == pytest.approx(numbers_of(expected["last"]), rel=1e-5, abs=1e-6)
    assert goes_on["last"].learning_rate == back["last"].learning_rate


@pytest.mark.slow
def test_adapters_of_two_ranks_go_on_in_one_process_and_back(
    cases: dict[str, Case], alone: Alone, two_ranks: list[dict[str, Found]]
) -> None:
    saved = two_ranks[0]["lora"]
    goes_on = in_one_process({**cases["lora"], "state": saved["state"]})
    back, plain = two_ranks[0]["lora-resumed"], alone("lora-resumed")
    assert len(back["gradients"]) == len(plain["gradients"]) == 20 and all(
        gradient.any() for gradient in plain["gradients"]
    )
    for rank in two_ranks:
        assert_close(rank["lora-resumed"]["gradients"], plain["gradients"], 1e-6)
    for outcome, reference in ((goes_on, saved), (back, plain)):
        assert_close(list(outcome["weights"].values()), list(reference["weights"].values()), 1e-5)
        assert len(outcome["weights"]) == 10, "only weights that have an adapter are sent"
        assert numbers_of(outcome["last"]) == pytest.approx(numbers_of(reference["last"]), rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_whole_weights_and_states_go_to_rank_0_alone(alone: Alone, two_ranks: list[dict[str, Found]]) -> None:
    first, second = (rank["critic"] for rank in two_ranks)
    assert not second["weights"] and not second["state"]
    expected = alone("critic")
    assert {name: tensor.shape for name, tensor in first["weights"].items()} == {
        name: tensor.shape for name, tensor in expected["weights"].items()
    }
    for part in ("head", "trunk"):
        assert_close(
            list(first["state"]["critic"][part].values()), list(expected["state"]["critic"][part].values()), 1e-5
        )


@pytest.mark.slow
def test_ranks_exchange_gradients_once_a_step_however_many_micro_batches_it_has(
    cases: dict[str, Case], two_ranks: list[dict[str, Found]]
) -> None:
    units = 1 + len(cases["ppo_clip-1"]["model"].layers)
    for name in COUNTED:
        assert two_ranks[0][name]["calls"]["c10d::_reduce_scatter_base_"] == units, name
    # Weights: gathered for each forward and each backward pass; or once for the pass without gradient that gspo needs,
    # and once for all micro-batches.
    assert two_ranks[0]["ppo_clip-16"]["calls"]["c10d::_allgather_base_"] == 2 * units
    assert two_ranks[0]["ppo_clip-1"]["calls"]["c10d::_allgather_base_"] == 20 * units, "ten rows on each rank"
    assert two_ranks[0]["gathered-once"]["calls"]["c10d::_allgather_base_"] == 2 * units


@pytest.mark.slow
def test_mixed_precision_computes_in_bfloat16_and_steps_in_float32(
    cases: dict[str, Case], two_ranks: list[dict[str, Found]]
) -> None:
    rounded, expected = two_ranks[0]["bfloat16"], two_ranks[0]["ppo_clip-4"]
    for left, right in zip(rounded["gradients"], expected["gradients"], strict=True):
        assert left.dtype == torch.float32
        assert 0 < float((left - right).norm()) < 0.2 * float(right.norm())
    assert {tensor.dtype for tensor in rounded["weights"].values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_do_is_refused(name: str, two_ranks: list[dict[str, Found]]) -> None:
    for rank in two_ranks:
        with pytest.raises(AgentGymError, match=REFUSED[name]):
            raise rank[name]  # type: ignore[misc]


def test_ranks_need_a_process_group() -> None:
    with pytest.raises(ConfigError, match="init_process_group in each process first"):
        Ranks()
