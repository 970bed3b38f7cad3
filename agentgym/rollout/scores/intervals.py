"""95% intervals of averages over an evaluation's episodes, which account for episodes that share a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentgym.errors import ConfigError
from agentgym.types import JSON

__all__ = [
    "ANY_REWARD",
    "SAME",
    "ZERO_OR_ONE",
    "Interval",
    "difference_interval",
    "mean_interval",
    "share_interval",
    "success_interval",
]

ANY_REWARD = (-math.inf, math.inf)
"""The range of rewards that may be any number."""
Z = 1.959963984540054
"""The two-sided 95% quantile of the standard normal distribution."""
T_TERMS = (2.372271230, 2.822498616, 2.555849680, 1.589534053)
"""The excess of Student's quantile over it, by powers of 1 / degrees of freedom."""
ZERO_OR_ONE = frozenset({0.0, 1.0})
"""The rewards of tasks that are solved or not."""


SAME = "in every task"
"""The text where a mean has no interval, as it is the same in every task."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% interval, both ends included: `Interval(0.25, 0.75)`."""

    low: float
    high: float

    @property
    def ends(self) -> list[JSON]:
        """The list `[low, high]`, for JSON."""
        return [self.low, self.high]

    def __str__(self) -> str:
        return f"[{self.low:.3f}, {self.high:.3f}]"


def success_interval(successes: Sequence[float], clusters: Sequence[str]) -> Interval | None:
    """Returns Wilson's 95% score interval (Wilson 1927) of a rate of zeros and ones; None without any.

    Episodes of one task are not independent draws. If tasks repeat, the number of episodes is replaced by the
    effective one, `p (1 - p) / clustered variance` (Kish's design effect), at most the number of episodes. If all
    succeed or all fail, nothing is known about it, and the number of tasks is used.
    """
    num = len(successes)
    if not num:
        return None
    rate = math.fsum(successes) / num
    effective = float(num)
    num_clusters = len(set(clusters))
    if num_clusters < num:
        if rate in (0.0, 1.0) or num_clusters < 2:
            effective = float(num_clusters)
        elif (error := _mean_and_error(*_by_cluster(successes, clusters))[1]) > 0:
            effective = max(1.0, min(float(num), rate * (1 - rate) / error**2))
    z2 = Z * Z / effective
    middle = (rate + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(rate * (1 - rate) / effective + z2 / (4 * effective))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def mean_interval(
    values: Sequence[float], clusters: Sequence[str], possible: tuple[float, float] = ANY_REWARD
) -> Interval | None:
    """Returns the 95% interval of a mean, its error clustered by task; None for fewer than two tasks.

    If all values are 0 or 1 it is `share_interval`, and if some are -1 too, or `possible` is -1 to 1,
    `difference_interval`. For others it takes Student's t with a degree of freedom less than tasks, and None if all
    tasks have the same mean: nothing is known about how far others are from it. It is cut to the range of `possible`
    values, unless one of the values is outside of it.
    """
    sum_C, num_C = _by_cluster(values, clusters)
    if len(sum_C) < 2:
        return None
    kinds = {*values}
    if kinds <= ZERO_OR_ONE and possible in (ANY_REWARD, (0.0, 1.0)):
        return share_interval(values, clusters)
    if kinds <= {-1.0, *ZERO_OR_ONE} and (possible == (-1.0, 1.0) or (len(kinds) > 1 and possible == ANY_REWARD)):
        return difference_interval(values, clusters)
    mean, error = _mean_and_error(sum_C, num_C)
    half = t_quantile(len(sum_C) - 1) * error
    if half <= max(1e-9, 1e-12 * abs(mean)):  # equal but for rounding
        return None
    low, high = possible if possible[0] <= min(values) and max(values) <= possible[1] else ANY_REWARD
    return Interval(max(low, mean - half), min(high, mean + half))


def share_interval(values: Sequence[float], clusters: Sequence[str] | None = None) -> Interval | None:
    """Returns the 95% interval of the mean of values in [0, 1]; None without any.

    Tasks are the independent draws: `clusters` names that of each value, and without them each value is one. It is the
    normal interval of the tasks and four more, two of zeros and two of ones (Agresti and Coull 1998), clipped to
    [0, 1]: without these, few tasks that differ from all others would make it far too short. If all values are 0 (or
    all 1) the bound is exact, `1 - 0.025^(1 / tasks)` (Clopper and Pearson 1934). It holds for any distribution of the
    values, as Markov's inequality bounds the chance of a 1 by the mean. Unlike in Agresti and Coull, values need not be
    0 or 1; the variance is that of the values, and shares of several episodes have less of it.
    """
    return _bounded_interval(values, clusters, 0.0, (0.0, 0.0, 1.0, 1.0))


def difference_interval(values: Sequence[float], clusters: Sequence[str] | None = None) -> Interval | None:
    """Returns the 95% interval of the mean difference of two shares, from differences in [-1, 1]; None without any.

    As `share_interval`, with two further tasks, one of each sign (Agresti and Min 2005 add one of each sign and two
    without a difference, half of each). If no task differs the bounds are exact, `0.025^(1 / tasks) - 1` and its
    opposite.
    """
    return _bounded_interval(values, clusters, -1.0, (-1.0, 1.0))


def _bounded_interval(
    values: Sequence[float], clusters: Sequence[str] | None, low: float, further: Sequence[float]
) -> Interval | None:
    """Returns the interval of a mean of values from `low` to 1, with the means of further tasks added."""
    if not values:
        return None
    if not low <= min(values) <= max(values) <= 1.0:
        raise ConfigError(f"values between {low:g} and 1 were wanted, got {min(values)} to {max(values)}")
    sum_C, num_C = _by_cluster(values, [str(index) for index in range(len(values))] if clusters is None else clusters)
    if min(values) == max(values) and values[0] in (0.0, 1.0 + low):  # 0 and 1 of a share, 0 of a difference
        reach = 1.0 - 0.025 ** (1 / len(sum_C))
        return Interval(max(low, values[0] - reach), min(1.0, values[0] + reach))
    size = sum(num_C) / len(num_C)
    middle, error = _mean_and_error(sum_C + [size * mean for mean in further], num_C + [size] * len(further))
    return Interval(max(low, middle - Z * error), min(1.0, middle + Z * error))


def t_quantile(freedom: int) -> float:
    """Returns the two-sided 95% quantile of Student's t, to 0.2% (Abramowitz and Stegun 26.7.5)."""
    excess = math.fsum(term / float(freedom) ** power for power, term in enumerate(T_TERMS, 1))
    return {1: 12.706204736, 2: 4.302652730}.get(freedom, Z + excess)


def _by_cluster(values: Sequence[float], clusters: Sequence[str]) -> tuple[list[float], list[float]]:
    """Returns the sum and the number of the values of each cluster, `[C]`."""
    if len(values) != len(clusters):
        raise ConfigError(f"{len(values)} values need as many clusters, got {len(clusters)}")
    values_C: dict[str, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        values_C.setdefault(cluster, []).append(float(value))
    return [sum(of_cluster) for of_cluster in values_C.values()], [float(len(each)) for each in values_C.values()]


def _mean_and_error(sum_C: Sequence[float], num_C: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of the values of two clusters or more, and its standard error.

    The variance is `C / (C - 1) * sum over clusters (sum of residuals)^2 / n^2`.
    """
    total = sum(num_C)
    mean = sum(sum_C) / total
    residual_C = [value - mean * num for value, num in zip(sum_C, num_C, strict=True)]
    variance = len(num_C) / (len(num_C) - 1) * sum(residual * residual for residual in residual_C) / total**2
    return mean, math.sqrt(variance)
