"""What holds for every estimator of the table, whatever it computes."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory, UnknownName
from agentgym.trainers.algorithms.advantages import ADVANTAGES, Credit

NAMES = sorted(ADVANTAGES)
WITH_GROUPS = sorted(
    name for name, estimator in ADVANTAGES.items() if "allow_single" in inspect.signature(estimator).parameters
)
SEEDS = range(4)
EPISODE_LEVEL = {
    "dr_grpo", "gdpo", "gpg", "grpo", "grpo_passk", "maxrl", "opo", "reinforce_plus_plus_baseline", "rloo",
}  # fmt: skip
VOCABULARY = {
    "values_BT", "bootstrap_B", "turns_BT", "states_BT", "greedy_B", "components_BTK", "proxy_BT",
}  # fmt: skip


def batch_for(name: str, seed: int, make_batch: Any, **settings: Any) -> Any:
    return make_batch(seed, positive=name == "maxrl", **settings)


def check_close(first: Credit, second: Credit) -> None:
    for left, right in zip(first, second, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def compacted(batch: Any) -> tuple[Any, list[list[int]]]:
    """The batch with only its trained tokens, and where they stood."""
    places = [[t for t, trained in enumerate(row) if trained] for row in batch.mask_BT.tolist()]
    longest = max(len(row) for row in places)

    def squeezed(tensor: Tensor) -> Tensor:
        rows = torch.zeros(tensor.shape[0], longest, *tensor.shape[2:], dtype=tensor.dtype)
        for row, indices in enumerate(places):
            rows[row, : len(indices)] = tensor[row, indices]
        return rows

    rewards_BT = torch.zeros_like(batch.rewards_BT)
    for row, indices in enumerate(places):
        for place, reward in enumerate(batch.rewards_BT[row].tolist()):
            nearest = max([index for index in indices if index <= place], default=indices[0])
            rewards_BT[row, nearest] += reward
    further = {key: squeezed(t) if key.endswith(("_BT", "_BTK")) else t for key, t in batch.further.items()}
    # the reward's components count by episode, so that those of the holes must stay in the sum
    lost = batch.further["components_BTK"].sum(1) - further["components_BTK"].sum(1)
    further["components_BTK"][:, 0] += lost
    short = replace(batch, rewards_BT=squeezed(rewards_BT), mask_BT=squeezed(batch.mask_BT), further=further)
    return short, places


def test_the_table_holds_what_users_know_by_name() -> None:
    assert set(NAMES) == EPISODE_LEVEL | {
        "gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline",
        "return_batch_norm", "turn_returns", "turn_group", "gigpo", "turn_gae", "none",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_of_the_vocabulary_and_settings_are_keywords(name: str) -> None:
    parameters = list(inspect.signature(ADVANTAGES[name]).parameters.values())
    inputs = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert inputs[:3] == ["rewards_BT", "mask_BT", "groups_B"]
    assert set(inputs[3:]) <= VOCABULARY
    settings = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in settings)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_names_a_source_the_expectation_and_the_differences(name: str) -> None:
    text = inspect.getdoc(ADVANTAGES[name]) or ""
    assert any(str(year) in text for year in range(1990, 2030))
    if name not in ("turn_returns", "tir_optimal_token_baseline"):
        assert "Differences from" in text or "Differences:" in text
    if name != "tir_optimal_token_baseline":
        assert "Expectation:" in text


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_holes_in_the_mask_change_nothing(name: str, seed: int, make_batch: Any) -> None:
    batch = batch_for(name, seed, make_batch, trained=0.5)
    assert batch.mask_BT.any(-1).all()
    short, places = compacted(batch)
    for full_BT, short_BT in zip(batch.estimate(name), short.estimate(name), strict=True):
        for row, indices in enumerate(places):
            torch.testing.assert_close(full_BT[row, indices], short_BT[row, : len(indices)], rtol=1e-12, atol=1e-12)
        assert not full_BT[~batch.mask_BT].any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_rows_does_not_matter(name: str, seed: int, make_batch: Any) -> None:
    batch = batch_for(name, seed, make_batch)
    order = torch.randperm(len(batch.groups_B), generator=torch.Generator().manual_seed(seed)).tolist()
    whole = batch.estimate(name)
    check_close(batch.take(order).estimate(name), Credit(whole.advantages_BT[order], whole.returns_BT[order]))


@pytest.mark.parametrize("name", NAMES)
def test_the_ids_of_the_groups_do_not_matter(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    check_close(replace(batch, groups_B=-3 * batch.groups_B + 11).estimate(name), batch.estimate(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_that_arrives_behind_the_last_trained_token_is_not_lost(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    batch.further["turns_BT"].copy_(torch.arange(11) // 3)
    batch.mask_BT[:, -2:] = False
    batch.mask_BT[:, -3] = True
    batch.rewards_BT[:, -3] = batch.rewards_BT[:, -2] = 0.0
    batch.rewards_BT[:, -1] = torch.arange(1.0, 1.0 + len(batch.groups_B))
    late = batch.estimate(name)
    moved = batch.rewards_BT.clone()
    moved[:, -3], moved[:, -1] = batch.rewards_BT[:, -1], 0.0
    check_close(late, replace(batch, rewards_BT=moved).estimate(name))
    nothing = batch.rewards_BT.clone()
    nothing[:, -1] = 0.0
    assert not torch.allclose(late.returns_BT, replace(batch, rewards_BT=nothing).estimate(name).returns_BT)


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_before_the_first_trained_token_is_not_lost(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    batch.further["turns_BT"].copy_(torch.arange(11) // 3)
    batch.mask_BT[:, 0], batch.mask_BT[:, 1] = False, True
    batch.rewards_BT[:, 0] = torch.arange(1.0, 1.0 + len(batch.groups_B))
    batch.rewards_BT[:, 1] = 0.0
    moved = batch.rewards_BT.clone()
    moved[:, 1], moved[:, 0] = batch.rewards_BT[:, 0], 0.0
    check_close(batch.estimate(name), replace(batch, rewards_BT=moved).estimate(name))


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_a_group_of_one_is_refused_or_zero_and_never_its_raw_return(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch, sizes=(3, 1, 4))
    lone = batch.groups_B.tolist().index(-2)
    with pytest.raises(ConfigError, match="group -2 is a group of one"):
        batch.estimate(name)
    if name != "gigpo":
        assert not batch.estimate(name, allow_single=True).advantages_BT[lone].any()
    batch.further["states_BT"].copy_(torch.arange(11))  # no state twice
    batch.further["turns_BT"].copy_(torch.arange(11))
    credit = batch.estimate(name, allow_single=True)
    assert not credit.advantages_BT[lone].any()
    assert credit.advantages_BT.any()
    assert credit.returns_BT[lone].any()


def test_all_with_a_baseline_of_the_group_are_among_those_that_refuse() -> None:
    assert set(WITH_GROUPS) == EPISODE_LEVEL | {
        "optimal_token_baseline", "tir_optimal_token_baseline", "turn_group", "gigpo",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_row_with_nothing_trained_has_zeros_and_no_nan(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    batch.mask_BT[1] = False
    credit = batch.estimate(name)
    assert not credit.advantages_BT[1].any() and not credit.returns_BT[1].any()
    assert credit.advantages_BT.isfinite().all() and credit.advantages_BT.any() == (name != "none")
    batch.mask_BT[:] = False
    assert not any(tensor.any() or tensor.isnan().any() for tensor in batch.estimate(name))


@pytest.mark.parametrize("name", NAMES)
def test_one_trained_token_in_each_row_or_in_the_batch_gives_no_nan(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    batch.mask_BT[:] = False
    batch.mask_BT[torch.arange(len(batch.groups_B)), torch.arange(len(batch.groups_B)) % 11] = True
    batch.further["turns_BT"].clamp_(min=0)
    assert all(tensor.isfinite().all() for tensor in batch.estimate(name))
    batch.mask_BT[1:] = False
    assert all(tensor.isfinite().all() for tensor in batch.estimate(name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_an_empty_batch_gives_an_empty_credit(name: str, shape: tuple[int, int], make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    rows, tokens = shape

    def cut(tensor: Tensor, key: str) -> Tensor:
        return tensor[:rows, :tokens] if key.endswith(("_BT", "_BTK")) else tensor[:rows]

    empty = replace(
        batch,
        rewards_BT=cut(batch.rewards_BT, "_BT"),
        mask_BT=cut(batch.mask_BT, "_BT"),
        groups_B=torch.zeros(rows, dtype=torch.int64),
        further={key: cut(tensor, key) for key, tensor in batch.further.items()},
    )
    assert all(tensor.shape == shape for tensor in empty.estimate(name))


@pytest.mark.parametrize("name", sorted({*WITH_GROUPS, "reinforce_plus_plus", "return_batch_norm"}))
@pytest.mark.parametrize("reward", [0.1, 100.1, 1e30])
def test_equal_rewards_give_no_advantage(name: str, reward: float, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch, trained=1.0)
    batch.rewards_BT[:] = 0.0
    batch.rewards_BT[:, -1] = reward
    batch.further["components_BTK"][:] = reward
    batch.further["turns_BT"].zero_()
    credit = batch.estimate(name)
    if name.endswith("token_baseline"):  # the epsilon of its denominator leaves a trace
        assert credit.advantages_BT.abs().max() < 1e-6 * reward
    else:
        assert not credit.advantages_BT.any()


@pytest.mark.parametrize("name", NAMES)
def test_huge_rewards_stay_finite(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    for key in ("values_BT", "bootstrap_B", "greedy_B", "components_BTK"):
        batch.further[key].mul_(1e30)
    for dtype in (torch.float64, torch.float32):
        credit = replace(batch, rewards_BT=batch.rewards_BT * 1e30).to(dtype).estimate(name)
        assert all(tensor.isfinite().all() for tensor in credit) and credit.returns_BT.any()
        assert credit.advantages_BT.any() == (name != "none")


@pytest.mark.parametrize("name", NAMES)
def test_inputs_stay_as_they_are_and_the_result_carries_no_gradient(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    tensors = [batch.rewards_BT, batch.mask_BT, batch.groups_B, *batch.further.values()]
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point())
    credit = batch.estimate(name)
    assert not credit.advantages_BT.requires_grad and not credit.returns_BT.requires_grad
    assert all(torch.equal(left, right) for left, right in zip(tensors, before, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_result_has_the_dtype_and_the_statistics_are_float64(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    narrow = batch.to(torch.float32)
    exact = narrow.to(torch.float64).estimate(name)
    for tensor, expected in zip(narrow.estimate(name), exact, strict=True):
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, expected.to(torch.float32), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_at_untrained_tokens_is_never_read(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    garbage = {
        key: torch.where(batch.mask_BT, tensor, math.nan if tensor.is_floating_point() else 12345)
        for key, tensor in batch.further.items()
        if key in ("values_BT", "proxy_BT", "turns_BT", "states_BT")
    }
    check_close(replace(batch, further=batch.further | garbage).estimate(name), batch.estimate(name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused(name: str, wrong: float, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    batch.rewards_BT[2, 3] = wrong
    with pytest.raises(InvalidTrajectory, match=rf"rewards are finite, got {wrong} at \(2, 3\)"):
        batch.estimate(name)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    with pytest.raises(InvalidTrajectory, match=r"mask is bool .*got float64 of shape \(9, 11\) and int64"):
        replace(batch, mask_BT=batch.mask_BT.to(torch.int64)).estimate(name)
    with pytest.raises(InvalidTrajectory, match="rewards are float"):
        replace(batch, rewards_BT=batch.rewards_BT[:, 1:]).estimate(name)
    for key in sorted(set(inspect.signature(ADVANTAGES[name]).parameters) & VOCABULARY):
        with pytest.raises(InvalidTrajectory, match=key):
            replace(batch, further=batch.further | {key: batch.further[key][1:]}).estimate(name)
        with pytest.raises(InvalidTrajectory, match=key):
            replace(batch, further=batch.further | {key: batch.further[key].to(torch.int32)}).estimate(name)
        if batch.further[key].is_floating_point():
            broken = torch.full_like(batch.further[key], math.inf if key == "components_BTK" else math.nan)
            with pytest.raises(InvalidTrajectory, match=f"{key} is finite"):
                replace(batch, further=batch.further | {key: broken}).estimate(name)


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_groups_that_do_not_fit_are_refused(name: str, make_batch: Any) -> None:
    batch = batch_for(name, 0, make_batch)
    for groups_B in (batch.groups_B[1:], batch.groups_B.to(torch.int32), batch.groups_B[:, None]):
        with pytest.raises(InvalidTrajectory, match="groups_B is int64 of shape"):
            replace(batch, groups_B=groups_B).estimate(name)


def test_an_unknown_estimator_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'grpo'"):
        ADVANTAGES["grop"]
