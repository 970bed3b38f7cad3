"""95% intervals of averages over an evaluation's episodes, which account for episodes that share a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentgym.errors import ConfigError
from agentgym.types import JSON

__all__ = ["ANY_REWARD", "Interval", "mean_interval", "share_interval", "success_interval"]

ANY_REWARD = (-math.inf, math.inf)
"""The range of rewards that may be any number."""
Z = 1.959963984540054
"""The two-sided 95% quantile of the standard normal distribution."""


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
        variance = _clustered_variance(successes, clusters)
        if rate in (0.0, 1.0) or variance is None:
            effective = float(num_clusters)
        elif variance > 0:
            effective = max(1.0, min(float(num), rate * (1 - rate) / variance))
    z2 = Z * Z / effective
    middle = (rate + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(rate * (1 - rate) / effective + z2 / (4 * effective))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def mean_interval(
    values: Sequence[float], clusters: Sequence[str], possible: tuple[float, float] = ANY_REWARD
) -> Interval | None:
    """Returns the normal 95% interval of a mean, its error clustered by task; None for fewer than two tasks.

    It is cut to the range of `possible` values, unless one of the values is outside of it.
    """
    variance = _clustered_variance(values, clusters)
    if variance is None:
        return None
    mean, half = math.fsum(values) / len(values), Z * math.sqrt(variance)
    low, high = possible if possible[0] <= min(values) and max(values) <= possible[1] else ANY_REWARD
    return Interval(max(low, mean - half), min(high, mean + half))


def _clustered_variance(values: Sequence[float], clusters: Sequence[str]) -> float | None:
    """The variance of a mean: `C / (C - 1) * sum over clusters (sum of residuals)^2 / n^2`; None below 2 clusters."""
    if len(values) != len(clusters):
        raise ConfigError(f"{len(values)} values need as many clusters, got {len(clusters)}")
    names, cluster_E = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True)
    if len(names) < 2:
        return None
    value_E: NDArray[np.float64] = np.asarray(values, np.float64)
    residual_C = np.bincount(cluster_E, weights=value_E - value_E.mean(), minlength=len(names))
    return float(len(names) / (len(names) - 1) * np.square(residual_C).sum() / len(values) ** 2)


def share_interval(values: Sequence[float]) -> Interval | None:
    """Returns the 95% interval of the mean of one value in [0, 1] per task (the independent draws); None without any.

    It is the normal interval of the values and four more, two zeros and two ones (Agresti and Coull 1998), clipped to
    [0, 1]: without these, few tasks that differ from all others would make it far too short. If all values are 0 (or
    all 1) the bound is exact, `1 - 0.025^(1 / tasks)` (Clopper and Pearson 1934). It holds for any distribution of the
    values, as Markov's inequality bounds the chance of a 1 by the mean. Unlike in Agresti and Coull, values need not be
    0 or 1; the variance is that of the values, and shares of several episodes have less of it.
    """
    if not values:
        return None
    if not 0.0 <= min(values) <= max(values) <= 1.0:
        raise ConfigError(f"values between 0 and 1 were wanted, got {min(values)} to {max(values)}")
    exact = 0.025 ** (1 / len(values))
    if max(values) == 0.0:
        return Interval(0.0, 1.0 - exact)
    if min(values) == 1.0:
        return Interval(exact, 1.0)
    widened = np.asarray([*values, 0.0, 0.0, 1.0, 1.0], np.float64)
    middle, half = float(widened.mean()), Z * float(widened.std(ddof=1)) / math.sqrt(len(widened))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))
