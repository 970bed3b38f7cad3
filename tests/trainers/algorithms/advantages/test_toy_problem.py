"""The mean gradient of every estimator on a problem whose gradient is known, against what its docstring says of it.

A softmax policy draws one of 3 arms, twice; the second reward depends on both draws, the second policy on nothing. So 9
episodes exist, and every expectation is a sum. Coordinates: the 2 x 3 logits.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.trainers.algorithms.advantages import ADVANTAGES

SIZE = 4
SAMPLES = 100_000
SEED = 0
"""Not chosen for its numbers. The standard error of a gradient is that of the whole vector, the root of the summed
squares of its coordinates' errors: a correct estimator is within two of it for all but 0.3% of the seeds if its error
spreads evenly over the logits' 4 degrees of freedom, and for all but 5% if it lies in one. Nearly all estimators share
the sample's error, so that these chances do not add up. A wrong factor lies far outside (see the last tests), and the
sums over all groups depend on no seed."""
LOGITS = torch.tensor([[0.3, -0.4, 0.1], [-0.2, 0.5, 0.0]], dtype=torch.float64)
FIRST = [0.5, 0.0, -0.5]
SECOND = [[1.0, 0.0, 2.0], [0.0, 3.0, -1.0], [0.5, 1.5, 0.5]]
SUCCESS = [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
VALUES = [0.4, [1.0, -0.3, 0.8]]
"""A critic that is wrong everywhere."""
BOOTSTRAP = [[0.0, 2.0, 0.0], [0.0, -1.0, 0.0], [0.0, 1.5, 0.0]]
"""The value of what would have come, in the episodes that are truncated."""
LAM = 0.4
GREEDY = 0.7
STEP_WEIGHT = 0.5

PROBABILITY = LOGITS.softmax(-1).tolist()
OUTCOMES = list(itertools.product(range(3), range(3)))

Gradient = list[float]
GroupRule = Callable[[Sequence[tuple[int, int]]], list[list[float]]]
Critic = Callable[[tuple[int, int], int], float]


def rewards(outcome: tuple[int, int]) -> tuple[float, float]:
    return FIRST[outcome[0]], SECOND[outcome[0]][outcome[1]]


def total(outcome: tuple[int, int]) -> float:
    return sum(rewards(outcome))


def chance(outcome: tuple[int, int]) -> float:
    return PROBABILITY[0][outcome[0]] * PROBABILITY[1][outcome[1]]


def slopes(outcome: tuple[int, int], weights: Sequence[float]) -> Gradient:
    """`sum_t weights_t grad log pi_t`."""
    return [weights[step] * ((arm == outcome[step]) - PROBABILITY[step][arm]) for step in range(2) for arm in range(3)]


def expectation(weights: Callable[[tuple[int, int]], Sequence[float]]) -> Tensor:
    """Of the summed gradient, when an episode's advantages depend on it alone."""
    parts = [[chance(outcome) * slope for slope in slopes(outcome, weights(outcome))] for outcome in OUTCOMES]
    return torch.tensor(parts, dtype=torch.float64).sum(0)


def unordered_groups() -> Iterator[tuple[Sequence[tuple[int, int]], float]]:
    """Yields the members of each group of `SIZE`, with the chance of all their orders.

    What treats all members alike has its sum over all groups from a thirteenth of them.
    """
    for members in itertools.combinations_with_replacement(OUTCOMES, SIZE):
        num_orders = math.factorial(SIZE) // math.prod(math.factorial(n) for n in Counter(members).values())
        yield members, num_orders * math.prod(chance(outcome) for outcome in members)


@functools.cache
def group_expectation(rule: GroupRule) -> Tensor:
    """Of the summed gradient as a mean over the members, when the advantages depend on a group of `SIZE`.

    The rule treats all members alike.
    """
    result = [0.0] * 6
    for members, share in unordered_groups():
        for outcome, weights in zip(members, rule(members), strict=True):
            for index, slope in enumerate(slopes(outcome, weights)):
                result[index] += share / SIZE * slope
    return torch.tensor(result, dtype=torch.float64)


def spread(number: Callable[[tuple[int, int], int], float]) -> float:
    """The standard deviation over tokens of a number by episode and step."""
    pairs = [(chance(outcome) / 2, number(outcome, step)) for outcome in OUTCOMES for step in range(2)]
    mean = sum(share * value for share, value in pairs)
    return math.sqrt(sum(share * (value - mean) ** 2 for share, value in pairs))


def to_go(outcome: tuple[int, int], step: int) -> float:
    return sum(rewards(outcome)[step:])


def value(outcome: tuple[int, int], step: int) -> float:
    return VALUES[0] if step == 0 else VALUES[1][outcome[0]]


def true_value(outcome: tuple[int, int], step: int) -> float:
    later = [sum(p * r for p, r in zip(PROBABILITY[1], SECOND[arm], strict=True)) for arm in range(3)]
    return later[outcome[0]] if step else sum(PROBABILITY[0][arm] * (FIRST[arm] + later[arm]) for arm in range(3))


def proxy(outcome: tuple[int, int], step: int) -> float:
    return 1 - 2 * PROBABILITY[step][outcome[step]] + sum(p * p for p in PROBABILITY[step])


POLICY_GRADIENT = expectation(lambda outcome: [total(outcome)] * 2)
SPREAD_TO_GO = spread(to_go)
SPREAD_ADVANTAGE = spread(lambda outcome, step: to_go(outcome, step) - value(outcome, step))
SPREAD_TOTAL = spread(lambda outcome, step: total(outcome))
LESS = (SIZE - 1) / SIZE


def z_scores(numbers: list[float]) -> list[float]:
    mean = sum(numbers) / len(numbers)
    return [(number - mean) / (deviation(numbers) + 1e-6) for number in numbers]


def deviation(numbers: list[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))


def grpo_rule(members: Sequence[tuple[int, int]]) -> list[list[float]]:
    return [[score] * 2 for score in z_scores([total(outcome) for outcome in members])]


def gdpo_rule(members: Sequence[tuple[int, int]]) -> list[list[float]]:
    parts = [z_scores([rewards(outcome)[k] for outcome in members]) for k in range(2)]
    return [[first + second] * 2 for first, second in zip(*parts, strict=True)]


def passk_rule(members: Sequence[tuple[int, int]]) -> list[list[float]]:
    scores = [total(outcome) for outcome in members]
    leads = [max(0.0, s - max(scores[:i] + scores[i + 1 :])) for i, s in enumerate(scores)]
    return [[lead / (deviation(scores) + 1e-6)] * 2 for lead in leads]


def otb_rule(members: Sequence[tuple[int, int]]) -> list[list[float]]:
    columns = []
    for step in range(2):
        spent = [sum(proxy(outcome, earlier) for earlier in range(step + 1)) for outcome in members]
        baseline = sum(w * to_go(outcome, step) for w, outcome in zip(spent, members, strict=True)) / sum(spent)
        columns.append([to_go(outcome, step) - baseline for outcome in members])
    return [list(pair) for pair in zip(*columns, strict=True)]


def best_of_group() -> Tensor:
    """The gradient of the expected best of `SIZE` returns, through its distribution function."""
    logits = LOGITS.clone().requires_grad_()
    chances = logits.softmax(-1)
    levels = sorted({total(outcome) for outcome in OUTCOMES})
    below = [
        sum(chances[0, outcome[0]] * chances[1, outcome[1]] for outcome in OUTCOMES if total(outcome) <= level)
        for level in levels
    ]
    masses = [
        high**SIZE - (low**SIZE if isinstance(low, Tensor) else 0.0)
        for low, high in zip([0.0, *below[:-1]], below, strict=True)
    ]
    best = sum(level * mass for level, mass in zip(levels, masses, strict=True))
    assert isinstance(best, Tensor)
    return torch.autograd.grad(best, logits)[0].flatten()


def first_terms_of_log_success() -> Tensor:
    """`sum_{k < SIZE} grad pass@k / k`, with `pass@k = 1 - (1 - p)^k`."""
    logits = LOGITS.clone().requires_grad_()
    chances = logits.softmax(-1)
    failure = 1 - (chances[0][:, None] * chances[1][None] * torch.tensor(SUCCESS, dtype=torch.float64)).sum()
    series = sum((1 - failure**k) / k for k in range(1, SIZE))
    assert isinstance(series, Tensor)
    return torch.autograd.grad(series, logits)[0].flatten()


class Episodes:
    """Episodes in groups of `SIZE` as the estimators are shown them, and the gradients of their tokens' logprobs."""

    def __init__(self, arms_BT: Tensor) -> None:
        self.arms_BT = arms_BT
        self.slopes_BTV = torch.nn.functional.one_hot(arms_BT, 3) - torch.tensor(PROBABILITY, dtype=torch.float64)
        self.groups_B = torch.arange(len(arms_BT)) // SIZE

    def table(self, number: Callable[[tuple[int, int], int], float]) -> Tensor:
        lookup = torch.tensor(
            [[number(outcome, step) for step in range(2)] for outcome in OUTCOMES], dtype=torch.float64
        )
        return lookup[self.arms_BT[:, 0] * 3 + self.arms_BT[:, 1]]

    def gradients(self, name: str, inputs: Sequence[str], critic: Critic | None = None, **settings: Any) -> Tensor:
        """The summed gradient as a mean over the members, by group."""
        rewards_BT = self.table(lambda outcome, step: rewards(outcome)[step])
        if name == "maxrl":
            rewards_BT = self.table(lambda outcome, step: step * SUCCESS[outcome[0]][outcome[1]])
        steps_BT = torch.arange(2).expand_as(rewards_BT)
        all_inputs = {
            "values_BT": self.table(value if critic is None else critic),
            "bootstrap_B": self.table(lambda outcome, _: BOOTSTRAP[outcome[0]][outcome[1]])[:, 0],
            "turns_BT": steps_BT,
            "states_BT": steps_BT,
            "greedy_B": torch.full_like(rewards_BT[:, 0], GREEDY),
            "proxy_BT": self.table(proxy),
            "components_BTK": torch.diag_embed(rewards_BT),
        }
        mask_BT = torch.ones_like(steps_BT, dtype=torch.bool)
        further = {key: all_inputs[key] for key in inputs}
        credit = ADVANTAGES[name](rewards_BT, mask_BT, self.groups_B, **further, **settings)
        return (credit.advantages_BT[:, :, None] * self.slopes_BTV).flatten(1).unflatten(0, (-1, SIZE)).mean(1)

    def gradient(
        self, name: str, inputs: Sequence[str], critic: Critic | None = None, **settings: Any
    ) -> tuple[Tensor, Tensor]:
        """Mean and standard error; groups are what is independent of each other."""
        by_group = self.gradients(name, inputs, critic, **settings)
        return by_group.mean(0), by_group.std(0) / math.sqrt(len(by_group))


@pytest.fixture(scope="module")
def sample() -> Episodes:
    generator = torch.Generator().manual_seed(SEED)
    chances = torch.tensor(PROBABILITY, dtype=torch.float64)
    return Episodes(torch.multinomial(chances, SAMPLES, replacement=True, generator=generator).T)


@pytest.fixture(scope="module")
def every_group() -> tuple[Episodes, Tensor]:
    """All groups that can be, with the chance of each."""
    groups = list(itertools.product(OUTCOMES, repeat=SIZE))
    chances = [math.prod(chance(outcome) for outcome in members) for members in groups]
    episodes = Episodes(torch.tensor([outcome for members in groups for outcome in members]))
    return episodes, torch.tensor(chances, dtype=torch.float64)


def alpha(sample: Episodes) -> float:
    """The share that `gpg` scales by, of the sample itself."""
    return SAMPLES / int((sample.table(lambda outcome, _: total(outcome))[:, 0] != 0).sum())


NO_STD = {"normalize_by_std": False}
PLAIN = {"gamma": 1.0, "lam": 1.0, "whiten_advantages": False}
WHITE = PLAIN | {"whiten_advantages": True}
OTB_INPUTS = ["proxy_BT"]

MULTIPLES: list[tuple[str, list[str], dict[str, Any], float]] = [
    ("gae", ["values_BT"], PLAIN, 1.0),
    ("gae", ["values_BT"], WHITE, 1 / SPREAD_ADVANTAGE),
    ("rloo", [], {}, 1.0),
    ("remax", ["greedy_B"], {}, 1.0),
    ("turn_returns", ["turns_BT"], {}, 1.0),
    ("turn_gae", ["values_BT", "turns_BT"], PLAIN, 1.0),
    ("turn_gae", ["values_BT", "turns_BT"], WHITE, 1 / SPREAD_ADVANTAGE),
    ("grpo", [], NO_STD, LESS),
    ("dr_grpo", [], {}, LESS),
    ("opo", [], {}, LESS),
    ("turn_group", ["turns_BT"], NO_STD, LESS),
    ("gigpo", ["turns_BT", "states_BT"], NO_STD | {"gamma": 1.0, "step_weight": STEP_WEIGHT}, (1 + STEP_WEIGHT) * LESS),
    ("reinforce_plus_plus", [], {}, 1 / SPREAD_TO_GO),
    ("reinforce_plus_plus_baseline", [], {}, LESS / (SPREAD_TOTAL * math.sqrt(LESS))),
    ("return_batch_norm", ["turns_BT"], {"gamma": 1.0}, 1 / SPREAD_TO_GO),
]


def standard_errors(estimate: tuple[Tensor, Tensor], exact: Tensor) -> float:
    """How many standard errors of the vector lie between the two."""
    mean, error = estimate
    return float((mean - exact).norm() / error.norm())


def within_two_standard_errors(estimate: tuple[Tensor, Tensor], exact: Tensor) -> bool:
    return standard_errors(estimate, exact) <= 2


@pytest.mark.long
@pytest.mark.parametrize(("name", "inputs", "settings", "factor"), MULTIPLES)
def test_the_mean_gradient_is_the_said_multiple_of_the_policy_gradient(
    name: str, inputs: list[str], settings: dict[str, Any], factor: float, sample: Episodes
) -> None:
    assert within_two_standard_errors(sample.gradient(name, inputs, **settings), factor * POLICY_GRADIENT)


CRITICS = [("gae", ["values_BT", "bootstrap_B"]), ("turn_gae", ["values_BT", "turns_BT", "bootstrap_B"])]


@pytest.mark.parametrize(("name", "inputs"), CRITICS)
def test_what_a_truncated_episode_would_have_earned_counts_as_a_reward(
    name: str, inputs: list[str], sample: Episodes, every_group: tuple[Episodes, Tensor]
) -> None:
    exact = expectation(lambda outcome: [total(outcome) + BOOTSTRAP[outcome[0]][outcome[1]]] * 2)
    assert (exact - POLICY_GRADIENT).norm() > 0.1
    assert within_two_standard_errors(sample.gradient(name, inputs, **PLAIN), exact)
    torch.testing.assert_close(every_group[1] @ every_group[0].gradients(name, inputs, **PLAIN), exact)


@pytest.mark.parametrize(("name", "inputs"), [(name, inputs[:-1]) for name, inputs in CRITICS])
@pytest.mark.parametrize("critic", [value, true_value])
def test_below_a_lambda_of_one_the_error_of_the_critic_is_the_bias(
    name: str, inputs: list[str], critic: Critic, sample: Episodes, every_group: tuple[Episodes, Tensor]
) -> None:
    settings = PLAIN | {"lam": LAM}
    bias = expectation(lambda outcome: [(1 - LAM) * (critic(outcome, 1) - true_value(outcome, 1)), 0.0])
    assert (float(bias.norm()) > 0.1) is (critic is value)
    assert within_two_standard_errors(sample.gradient(name, inputs, critic, **settings), POLICY_GRADIENT + bias)
    mean = every_group[1] @ every_group[0].gradients(name, inputs, critic, **settings)
    torch.testing.assert_close(mean, POLICY_GRADIENT + bias)


def test_gpg_is_scaled_by_the_share_of_returns_that_are_not_zero(sample: Episodes) -> None:
    exact = alpha(sample) * LESS / 2.0 * POLICY_GRADIENT
    assert alpha(sample) > 1.05
    assert within_two_standard_errors(sample.gradient("gpg", [], norm=2.0), exact)


def test_passk_without_deviation_is_the_gradient_of_the_best_of_the_group(sample: Episodes) -> None:
    assert within_two_standard_errors(sample.gradient("grpo_passk", [], **NO_STD), best_of_group() / SIZE)


def test_maxrl_is_the_first_terms_of_the_gradient_of_log_success(sample: Episodes) -> None:
    success = sum(chance(outcome) * SUCCESS[outcome[0]][outcome[1]] for outcome in OUTCOMES)
    gradient = expectation(lambda outcome: [SUCCESS[outcome[0]][outcome[1]]] * 2)
    exact = first_terms_of_log_success()
    torch.testing.assert_close(exact, gradient * (1 - (1 - success) ** (SIZE - 1)) / success)
    assert within_two_standard_errors(sample.gradient("maxrl", []), exact)


RULES: list[tuple[str, list[str], GroupRule]] = [
    ("grpo", [], grpo_rule),
    ("grpo_passk", [], passk_rule),
    ("optimal_token_baseline", OTB_INPUTS, otb_rule),
    ("tir_optimal_token_baseline", OTB_INPUTS, otb_rule),
]


@pytest.mark.parametrize(("name", "inputs", "rule"), RULES)
def test_the_mean_gradient_is_the_sum_over_all_groups(
    name: str, inputs: list[str], rule: GroupRule, sample: Episodes
) -> None:
    assert within_two_standard_errors(sample.gradient(name, inputs), group_expectation(rule))


def test_gdpo_is_the_sum_over_all_groups_in_units_of_its_deviation(sample: Episodes) -> None:
    variance = 0.0
    for members, share in unordered_groups():
        variance += share / SIZE * sum(weights[0] ** 2 for weights in gdpo_rule(members))
    exact = group_expectation(gdpo_rule) / math.sqrt(variance)
    assert within_two_standard_errors(sample.gradient("gdpo", ["components_BTK"]), exact)


@pytest.mark.parametrize(
    ("name", "inputs", "settings", "factor"),
    [
        case
        for case in MULTIPLES
        if case[2].get("whiten_advantages") is not True
        and case[0] not in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "return_batch_norm")
    ],
)
def test_the_expectation_over_all_groups_is_exactly_the_said_multiple(
    name: str, inputs: list[str], settings: dict[str, Any], factor: float, every_group: tuple[Episodes, Tensor]
) -> None:
    episodes, chances = every_group
    exact = chances @ episodes.gradients(name, inputs, **settings)
    torch.testing.assert_close(exact, factor * POLICY_GRADIENT, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "inputs", "rule"), RULES)
def test_the_expectation_over_all_groups_is_that_of_the_loops(
    name: str, inputs: list[str], rule: GroupRule, every_group: tuple[Episodes, Tensor]
) -> None:
    episodes, chances = every_group
    exact = chances @ episodes.gradients(name, inputs)
    torch.testing.assert_close(exact, group_expectation(rule), rtol=1e-6, atol=1e-8)


def test_the_best_of_a_group_and_log_success_are_exact_over_all_groups(every_group: tuple[Episodes, Tensor]) -> None:
    episodes, chances = every_group
    best = chances @ episodes.gradients("grpo_passk", [], **NO_STD)
    torch.testing.assert_close(best, best_of_group() / SIZE, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(chances @ episodes.gradients("maxrl", []), first_terms_of_log_success())


def test_two_standard_errors_tell_a_biased_estimator_from_an_unbiased_one(sample: Episodes) -> None:
    assert standard_errors(sample.gradient("grpo", [], **NO_STD), POLICY_GRADIENT) > 10
    assert standard_errors(sample.gradient("optimal_token_baseline", OTB_INPUTS), LESS * POLICY_GRADIENT) > 4
    assert standard_errors(sample.gradient("grpo_passk", []), best_of_group() / SIZE) > 4


def test_every_estimator_of_the_table_is_held_against_its_expectation() -> None:
    ours = {name for name, estimator in ADVANTAGES.items() if estimator.__module__.startswith("agentgym.")}
    in_tests_of_their_own = {"gpg", "grpo_passk", "maxrl", "gdpo", "none"}
    assert ours == {case[0] for case in (*MULTIPLES, *RULES, *CRITICS)} | in_tests_of_their_own


def test_the_gradients_of_the_table_are_those_of_the_softmax() -> None:
    logits = LOGITS.clone().requires_grad_()
    expected = sum(
        logits.softmax(-1)[0, first] * logits.softmax(-1)[1, second] * total((first, second))
        for first, second in OUTCOMES
    )
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(torch.autograd.grad(expected, logits)[0].flatten(), POLICY_GRADIENT)
